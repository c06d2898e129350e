"""The server over real loopback connections: pages, leases of vanished clients, hung calls, draining, health."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from common.tasks import SPLITS, fingerprint
from common.types import Action
from envserver.admission import Catalog, Verdict, build_catalog
from envserver.server import SERVICE, EnvServer, Settings
from envserver.testing import serving
from tests.envserver.fakes import Script, script_task
from tests.processes import eventually

HANG = script_task(step="hang")


def catalog(train=(script_task("train-0"),), heldout=(script_task("heldout-0"),)):
    tasks = {"train": list(train), "heldout": list(heldout)}
    return Catalog(
        tasks, {"train": {"train-bad": Verdict("error", "x")}, "heldout": {}}, {s: fingerprint(tasks[s]) for s in tasks}
    )


def settings(**changes):
    return Settings(**{"address": "127.0.0.1:0", "capacity": 4, "threads": 4, "lease_s": 60.0, "drain_s": 0.0} | changes)


def open_request(name, task=None):
    return pb.OpenRequest(session_id=name, task=convert.task_to(task or script_task()))


def step_request(name, index=0, text="work"):
    return pb.StepRequest(session_id=name, step_index=index, action=convert.action_to(Action(text)))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_describe_and_list_tasks_in_pages():
    train = [script_task(f"train-{i}") for i in range(2300)]
    async with serving(Script(), catalog(train), settings()) as served:
        await served.stub.Open(open_request("a"))
        described = await served.stub.Describe(pb.DescribeRequest())
        assert (described.domain, described.capacity, described.open_sessions) == ("script", 4, 1)
        assert (described.tools_json, described.instructions, described.has_reference) == ("[]", "Follow the script.", True)
        assert (described.draining, described.lease_seconds) == (False, 60.0)
        assert described.splits["train"] == pb.SplitInfo(tasks=2300, fingerprint=fingerprint(train), quarantined=1)
        listed, sizes = [], []
        for _ in range(4):
            page = await served.stub.ListTasks(pb.ListTasksRequest(split="train", offset=len(listed)))
            assert (page.total, page.fingerprint) == (2300, fingerprint(train))
            listed += [convert.task_from(task) for task in page.tasks]
            sizes.append(len(page.tasks))
        assert sizes == [1000, 1000, 300, 0]
        assert fingerprint(listed) == fingerprint(train)
        page = await served.stub.ListTasks(pb.ListTasksRequest(split="train", offset=5, limit=2))
        assert [task.id for task in page.tasks] == ["train-5", "train-6"]
        code, words = await status_of(served.stub.ListTasks(pb.ListTasksRequest(split="test")))
        assert (code, words) == (grpc.StatusCode.INVALID_ARGUMENT, "unknown split 'test'; splits: train, heldout")
        code, _ = await status_of(served.stub.ListTasks(pb.ListTasksRequest(split="train", offset=-1)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_page_of_large_tasks_stays_below_the_message_limit():
    train = [script_task(f"train-{i}", text="x" * 2**20) for i in range(9)]
    async with serving(Script(), catalog(train), settings()) as served:
        sizes = []
        for _ in range(3):
            page = await served.stub.ListTasks(pb.ListTasksRequest(split="train", offset=sum(sizes)))
            sizes.append(len(page.tasks))
        assert sizes == [3, 3, 3]  # a fourth task would pass 4 MiB
        assert page.ByteSize() < wire.MAX_MESSAGE_BYTES


async def test_statuses_of_refusals_reach_the_client():
    async with serving(Script(), catalog(), settings(capacity=1)) as served:
        await served.stub.Open(open_request("a"))
        assert await status_of(served.stub.Open(open_request("b"))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "all 1 sessions are in use",
        )
        assert (await status_of(served.stub.Step(step_request("a", 3))))[0] == grpc.StatusCode.FAILED_PRECONDITION
        assert (await status_of(served.stub.Step(step_request("zzz"))))[0] == grpc.StatusCode.NOT_FOUND
        bad = pb.OpenRequest(session_id="c", task=pb.TaskMessage(domain="script", id="x", payload_json="{"))
        code, words = await status_of(served.stub.Open(bad))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "payload of task x is not JSON" in words
        call = pb.ToolCallMessage(id="7", name="move", arguments_json="{")
        code, words = await status_of(
            served.stub.Step(pb.StepRequest(session_id="a", action=pb.ActionMessage(tool_calls=[call])))
        )
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "arguments of call 7" in words
        assert [(await served.stub.Close(pb.CloseRequest(session_id="a"))).existed for _ in range(2)] == [True, False]
        renewed = await served.stub.Renew(pb.RenewSessionsRequest(session_ids=["a"]))
        assert (list(renewed.lost), renewed.open_sessions, renewed.capacity, renewed.draining) == (["a"], 0, 1, False)


async def test_083_an_error_of_the_environment_is_internal_also_with_a_huge_message():
    class Shouting(Script):
        def reference(self, task):
            raise RuntimeError("ü" * 100_000)

    async with serving(Shouting(), catalog(), settings()) as served:
        request = open_request("a")
        request.with_reference = True
        code, words = await status_of(served.stub.Open(request))
        assert code == grpc.StatusCode.INTERNAL
        assert words.startswith("script reset: RuntimeError: üüü")
        assert len(served.server.sessions) == 0


async def test_077_a_client_whose_deadline_passes_gets_the_same_answer_later():
    domain = Script()
    async with serving(domain, catalog(), settings()) as served:
        await served.stub.Open(open_request("a", HANG))
        code, _ = await status_of(served.stub.Step(step_request("a"), timeout=0.2))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        retries = [served.stub.Step(step_request("a")) for _ in range(3)]
        await asyncio.to_thread(domain.running.acquire)
        domain.gate.set()
        answers = [(await retry).observation.messages[0].text for retry in retries]
        assert answers == ["work done"] * 3
        assert domain.count("step") == 1
        assert (await served.stub.Step(step_request("a", 1, "next"))).observation.metrics["taken"] == 2


async def test_081_vanished_clients_free_their_slots_and_a_live_one_keeps_its_own_through_a_long_call():
    domain = Script()
    async with serving(domain, catalog(), settings(capacity=5, lease_s=0.5)) as served:
        async with wire.aio_channel(served.address) as channel:
            for name in "abcd":
                await pb_grpc.EnvServiceStub(channel).Open(open_request(name))
        await served.stub.Open(open_request("live", HANG))
        long_call = asyncio.create_task(_call(served.stub.Step(step_request("live"))))
        assert (await status_of(served.stub.Open(open_request("fifth"))))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        while True:  # the heartbeat of the live client; it ends when the others' leases have
            renewed = await served.stub.Renew(pb.RenewSessionsRequest(session_ids=["live"]))
            assert list(renewed.lost) == []
            if renewed.open_sessions == 1:
                break
            await asyncio.sleep(0.05)
        await served.stub.Open(open_request("fifth"))
        domain.gate.set()
        assert (await long_call).observation.messages[0].text == "work done"


async def _call(call):
    return await call


async def test_084_64_blocking_steps_run_together_and_heartbeats_are_answered_meanwhile():
    domain = Script()
    async with serving(domain, catalog(), settings(capacity=64, threads=64)) as served:
        names = [f"s{i}" for i in range(64)]
        await asyncio.gather(*(_call(served.stub.Open(open_request(name, HANG))) for name in names))
        steps = [served.stub.Step(step_request(name)) for name in names]
        for _ in names:  # all of them are inside their call at once
            await asyncio.to_thread(domain.running.acquire)
        assert (await served.stub.Renew(pb.RenewSessionsRequest(session_ids=names))).lost == []
        assert (await served.stub.Close(pb.CloseRequest(session_id="s0"))).existed
        assert (await status_of(steps[0]))[0] == grpc.StatusCode.ABORTED
        domain.gate.set()
        assert len([await step for step in steps[1:]]) == 63


async def test_draining_refuses_new_sessions_waits_for_open_ones_and_says_so():
    domain = Script()
    server = EnvServer(domain, catalog(), settings(drain_s=60.0))
    await server.start()
    async with wire.aio_channel(f"127.0.0.1:{server.port}") as channel:
        stub, health = pb_grpc.EnvServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await stub.Open(open_request("a"))
        drained = asyncio.create_task(server.drain())
        await eventually(lambda: server.sessions.draining)
        code, words = await status_of(stub.Open(open_request("b")))
        assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "this env server is draining; open the session on another one")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await stub.Renew(pb.RenewSessionsRequest(session_ids=["a"]))).draining
        assert (await stub.Step(step_request("a"))).observation.messages[0].text == "work done"
        assert not drained.done()
        await stub.Close(pb.CloseRequest(session_id="a"))
        await drained


async def test_draining_ends_although_sessions_stay_open_and_a_call_hangs():
    domain = Script()
    server = EnvServer(domain, catalog(), settings(drain_s=0.05))
    await server.start()
    async with wire.aio_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.EnvServiceStub(channel)
        await stub.Open(open_request("a", HANG))
        step = stub.Step(step_request("a"))
        await asyncio.to_thread(domain.running.acquire)
        await server.drain()
        assert (await status_of(step))[0] in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
    domain.gate.set()
    await eventually(lambda: domain.count("close") == 1)


async def test_reflection_lists_the_service():
    async with serving(Script(), catalog(), settings()) as served:

        def names():
            with wire.channel(served.address) as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert SERVICE in await asyncio.to_thread(names)


async def test_a_busy_port_is_one_clear_line():
    async with serving(Script(), catalog(), settings()) as served:
        with pytest.raises(wire.PortBusy, match=f"cannot listen on {served.address}"):
            EnvServer(Script(), catalog(), settings(address=served.address))


async def test_082_two_servers_answer_alike():
    tasks = [script_task("train-0", pay={"solve": 1.0}), script_task("heldout-0", pay={"solve": 1.0})]
    replies = []
    for _ in range(2):
        domain = Script(tasks=tasks)
        async with serving(domain, build_catalog(domain, dict.fromkeys(SPLITS, 5), -1), settings()) as served:
            replies.append(
                [await served.stub.Open(open_request("a", tasks[0])), await served.stub.Step(step_request("a", 0, "solve"))]
            )
    assert replies[0] == replies[1]
    assert replies[0][0].task_id == "train-0"
