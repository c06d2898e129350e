"""LearnerService over real loopback connections."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import wire
from common.convert import trajectory_bytes
from common.proto import rl_pb2 as pb
from common.types import ContextKind, spans_of
from learner.service import SERVICE, Partials, serve
from tests.control.scripted import ScriptedActor, engine, failed, make_control, publish, step, trajectory


class Stage:
    """A served control plane in the RL phase, and an actor."""

    def __init__(self, folder):
        long = 4_000_000  # tokens
        domain = {"name": "toy", "train_tasks": 6, "heldout_tasks": 4, "limits": {"max_tokens": long, "max_new_tokens": long}}
        tables = {"engine": {"max_length": long, "widths": [long]}, "learner": {"row_length": long}}
        self.control = make_control(folder, domains=[domain], **tables)
        publish(self.control, 1, 0)
        self.control.set_engines([engine(1)])
        self.control.start_rl()
        self.server, self.port = serve(self.control, "127.0.0.1:0")
        self.actors: list[ScriptedActor] = []

    def actor(self, name="actor-0") -> ScriptedActor:
        self.actors.append(ScriptedActor(self.port, name))
        return self.actors[-1]

    def close(self):
        for actor in self.actors:
            actor.close()
        self.server.stop(0).wait()


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


def test_lease_deliver_train(stage):
    actor = stage.actor()
    assigned = actor.lease(4)
    assert [a.rollout_id for a in assigned] == ["1-g000000-0", "1-g000000-1", "1-g000001-0", "1-g000001-1"]
    assert [actor.deliver(trajectory(a)) for a in assigned] == ["STORED"] * 4
    batch = stage.control.take(5)
    assert [len(group) for group in batch.groups] == [2, 2]
    stage.control.commit(batch)
    report = json.loads(actor.stub.Status(pb.StatusRequest(), timeout=5).report_json)
    assert report["rollouts"] == {
        "dispatched": 4,
        "open": 0,
        "trained": 4,
        "filtered": 0,
        "stale": 0,
        "failed": 0,
        "cancelled": 0,
    }
    wanted = ("phase", "update", "updates", "success", "lag", "tokens_per_s", "engines", "actors", "waits", "evals", "sentence")
    assert set(wanted) <= set(report)


def test_lease_and_renew_carry_engines_waits_and_cancellations(stage):
    actor = stage.actor()
    reply = actor.stub.Lease(pb.LeaseRequest(actor_id="actor-0", capacity=1), timeout=5)
    assert (reply.incarnation, reply.no_more, reply.engines[0].name, reply.engines[0].version) == (1, False, "engine-0", 1)
    key = (reply.assignments[0].rollout_id, 1)
    wait = pb.WaitMessage(name="env.step", owner=key[0], on="toy-0", seconds=2.0, deadline=30.0)
    renewed = actor.renew([key, ("1-g000099-0", 1)], [wait])
    assert [(k.rollout_id, k.attempt) for k in renewed.cancel] == [("1-g000099-0", 1)]
    assert (renewed.no_more, renewed.engines[0].state) == (False, "ready")
    assert [w["owner"] for w in stage.control.status()["waits"]] == [key[0]]
    stage.control.finish()
    renewed = actor.renew([key])
    assert (len(renewed.cancel), renewed.no_more) == (1, True)


def test_a_lease_never_outgrows_a_message(stage):
    """Eight assignments of 3 MiB each: one reply cannot carry them, and until their leases ended nobody would have them."""
    for tasks in (domain.tasks for domain in stage.control.dispatch.sampler._domains.values()):
        for task in tasks:
            task.payload["text"] = "x" * 3 * 2**20
    actor = stage.actor()
    assert [len(actor.lease(8)) for _ in range(3)] == [4, 4, 0]  # eight are all that capacity allows


def test_077_a_late_answer_and_three_resends_make_one_row(stage):
    actor = stage.actor()
    a, b = actor.lease(2)
    (request,) = actor.chunks(trajectory(a))
    with stage.control._changed, pytest.raises(grpc.RpcError) as late:  # the learner answers after the deadline
        actor.stub.Deliver(request, timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    answers = [actor.send(request).status for _ in range(3)]
    assert answers[1:] == [pb.DUPLICATE, pb.DUPLICATE]
    restarted = stage.actor("actor-0")  # killed between "sent" and "acknowledged"
    restarted.incarnation = 1
    assert restarted.deliver(trajectory(a)) == "DUPLICATE"
    assert actor.deliver(trajectory(b)) == "STORED"
    assert stage.control.deliveries["stored"] == 2
    assert stage.control.tokens["sampled"] == 4


def test_failed_and_unknown_and_old_deliveries(stage):
    actor = stage.actor()
    a = actor.lease(1)[0]
    assert actor.deliver(failed(a)) == "STORED"
    assert actor.deliver(failed(a)) == "DUPLICATE"
    assert actor.deliver(trajectory(replace(a, rollout_id="1-g000500-0"))) == "REFUSED"
    actor.incarnation = 9
    assert actor.deliver(trajectory(a)) == "SUPERSEDED"


def test_a_refusal_names_the_rule(stage):
    actor = stage.actor()
    a = actor.lease(1)[0]
    (request,) = actor.chunks(trajectory(a, steps=(step([3], [(0, 42)]),)))
    reply = actor.send(request)
    assert (reply.status, reply.reason) == (pb.REFUSED, "version_exists: step 0: version 42 was never published")


def test_099_long_trajectories_arrive_whole(stage):
    """Four of 131,072 tokens and one with a 10 MB observation (2,621,440 int32 ids), all past gRPC's 4 MiB default."""
    actor = stage.actor()
    rng = np.random.default_rng(0)
    sent = {}
    for i, a in enumerate(actor.lease(5)):
        if i < 4:
            made = step(rng.integers(0, 90, 131_072).tolist(), [(0, 1)])
            made = replace(made, action_logprobs=-rng.random(131_072, np.float32))
        else:
            context = rng.integers(0, 100, 10 * 2**20 // 4).astype(np.int32)
            made = replace(
                step([3], [(0, 1)]), context_ids=context, context_spans=spans_of([(len(context), ContextKind.OBSERVATION)])
            )
        whole = trajectory(a, steps=(made,))
        sent[a.rollout_id] = hashlib.sha256(trajectory_bytes(whole)).hexdigest()
        assert actor.deliver(whole) == "STORED"
    stored = stage.control.delivered.trajectories
    assert {name: hashlib.sha256(trajectory_bytes(t)).hexdigest() for name, t in stored.items()} == sent
    place = next(r for r in stage.control.ledger.rollouts(*"g") if r.id == a.rollout_id).place
    assert hashlib.sha256(stage.control.delivered.inbox.read(place)).hexdigest() == sent[a.rollout_id]
    assert stage.server is not None
    assert actor.lease(1)[0].rollout_id == "1-g000002-1"  # the connection is as good as before


def test_099_a_cut_in_the_middle_leaves_nothing(stage, tmp_path):
    actor = stage.actor()
    a = actor.lease(1)[0]
    requests = actor.chunks(trajectory(a), size=32)
    assert len(requests) > 4
    for request in requests[:3]:
        assert actor.send(request).status == pb.MORE
    actor.close()  # cut
    assert stage.control.delivered.trajectories == {}
    assert list((tmp_path / "inbox").glob("*.spool")) == []
    again = stage.actor()
    again.incarnation = 1
    assert again.send(requests[4]).status == pb.MORE
    assert again.send(requests[-1]).status == pb.RESEND  # one is missing
    assert again.send(requests[2]).status == pb.RESEND  # forgotten: from the start
    broken = pb.DeliverRequest()
    broken.CopyFrom(requests[1])
    broken.payload = bytes(32)
    statuses = [again.send(r).status for r in (requests[0], broken, *requests[2:])]
    assert statuses == [pb.MORE] * (len(requests) - 1) + [pb.RESEND]
    assert again.deliver(trajectory(a), size=32) == "STORED"


def test_partial_messages_are_bounded_in_bytes_and_in_time():
    now = [0.0]
    partials = Partials(limit=100, clock=lambda: now[0])
    chunks = list(wire.split(bytes(200), 40))
    for name in ("a", "b", "c"):
        assert partials.add((name, 1, "x"), chunks[0]) is None
    assert partials.bytes == 80  # the longest untouched one went
    with pytest.raises(ValueError, match="without those before it"):
        partials.add(("a", 1, "x"), chunks[1])
    assert partials.add(("c", 1, "x"), chunks[1]) is None  # 120: b goes
    assert partials.bytes == 80
    now[0] = 1000.0
    assert partials.add(("d", 1, "x"), chunks[0]) is None  # c was silent for too long
    assert partials.bytes == 40
    roomy = Partials(limit=10**6, clock=lambda: now[0])
    roomy.add(("e", 1, "x"), chunks[0])
    now[0] = 2000.0
    roomy.add(("f", 1, "x"), chunks[0])
    assert roomy.bytes == 40
    assert partials.add(("d", 1, "x"), chunks[0]) is None  # a sender that starts again counts once
    assert partials.bytes == 40


def test_a_learner_that_cannot_write_is_unavailable_and_nothing_is_lost(stage, tmp_path):
    actor = stage.actor()
    a = actor.lease(1)[0]
    folder = tmp_path / "inbox"
    folder.rmdir()
    (request,) = actor.chunks(trajectory(a))
    with pytest.raises(grpc.RpcError) as error:
        actor.send(request)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "cannot write its inbox" in error.value.details()
    folder.mkdir()
    assert actor.deliver(trajectory(a)) == "STORED"


def test_several_actors_share_without_overlap(stage):
    actors = [stage.actor(f"actor-{i}") for i in range(3)]
    assigned = [actor.lease(3) for actor in actors]
    ids = [a.rollout_id for part in assigned for a in part]
    assert len(ids) == len(set(ids)) == 8  # all that capacity allows


def test_health_answers_and_a_busy_port_is_an_error(stage, tmp_path):
    channel = stage.actor().channel
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(wire.PortBusy, match=f"cannot listen on 127.0.0.1:{stage.port}"):
        serve(stage.control, f"127.0.0.1:{stage.port}")
