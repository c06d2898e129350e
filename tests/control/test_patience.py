"""A Lease that would bring nothing waits for work: without a wire where the clock is real, and on the wire's side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.proto import rl_pb2 as pb
from learner.service import LEASES_WAITING, LearnerService
from tests.control.scripted import engine, hand_in, in_background, make_control, publish, trajectory
from tests.processes import until

LONG_S = 60.0  # the wait that a change must end; in_background gives up before


@dataclass
class Caller:
    """What a handler is told of its call."""

    there: bool = True

    def is_active(self) -> bool:
        return self.there


def waiting(tmp_path, patience_s: float = LONG_S, there: Callable[[], bool] = lambda: True):
    """A control plane without engines, and the answer to a Lease that waits for them."""
    control = make_control(tmp_path)
    publish(control, 1, 0)
    control.start_rl()
    answer = in_background(control.lease, "actor-0", 4, patience_s, there)
    until(lambda: control.actors, "the lease")
    return control, answer


def test_a_lease_waits_for_an_engine(tmp_path):
    control, answer = waiting(tmp_path)
    control.set_engines([engine(1)])
    assert [a.rollout_id for a in answer().assignments] == ["1-g000000-0", "1-g000000-1", "1-g000001-0", "1-g000001-1"]


def test_a_lease_waits_for_the_room_that_an_update_leaves(tmp_path):
    """max_lag 0: a batch is all that may be open."""
    control = make_control(tmp_path, learner={"max_lag": 0})
    publish(control, 1, 0)
    control.set_engines([engine(1)])
    control.start_rl()
    for a in control.lease("actor-0", 4).assignments:
        hand_in(control, trajectory(a))
    batch = control.take(0)
    answer = in_background(control.lease, "actor-1", 4, LONG_S)
    until(lambda: "actor-1" in control.actors, "the lease")
    control.commit(batch)
    control.published(1, 1)  # the same weights: no engine has to be told
    assert len(answer().assignments) == 4


def test_the_end_of_the_run_ends_the_wait(tmp_path):
    control, answer = waiting(tmp_path)
    control.finish()
    leased = answer()
    assert (leased.assignments, leased.no_more) == ([], True)


def test_an_impatient_lease_comes_back_later_a_patient_one_has_waited(tmp_path):
    control = make_control(tmp_path)
    assert control.lease("actor-0", 1).retry_after_s > 0
    begun = time.monotonic()
    assert control.lease("actor-0", 1, 0.2).retry_after_s == 0
    assert time.monotonic() - begun >= 0.2


def test_who_has_gone_gets_nothing(tmp_path):
    control, answer = waiting(tmp_path, patience_s=0.5, there=lambda: False)
    control.set_engines([engine(1)])
    assert answer().assignments == []
    assert control.counts()["dispatched"] == 0


def test_the_wire_tells_who_has_gone(tmp_path):
    control = make_control(tmp_path)
    publish(control, 1, 0)
    control.start_rl()
    service, request = LearnerService(control), pb.LeaseRequest(actor_id="actor-0", capacity=4)
    answer = in_background(service.Lease, request, Caller(there=False))
    until(lambda: control.actors, "the lease")
    control.set_engines([engine(1)])
    assert list(answer().assignments) == []
    assert len(service.Lease(request, Caller()).assignments) == 4


def test_only_so_many_leases_wait(tmp_path):
    """Others come back later. One that has its answer makes room for the next."""
    control = make_control(tmp_path)
    service, calls = LearnerService(control, LONG_S), []

    def lease(name: str) -> pb.LeaseReply:
        return service.Lease(pb.LeaseRequest(actor_id=name, capacity=4), Caller())

    for index in range(LEASES_WAITING):
        calls.append(in_background(lease, f"actor-{index}"))
        until(lambda index=index: f"actor-{index}" in control.actors, "the lease")
    assert lease("late").retry_after_s > 0
    control.finish()
    assert [call().retry_after_s for call in calls] == [0.0] * LEASES_WAITING
    assert [lease("late").retry_after_s for _ in range(LEASES_WAITING + 1)] == [0.0] * (LEASES_WAITING + 1)
