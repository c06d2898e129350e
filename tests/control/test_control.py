"""Dispatch and deliveries, with the clock set by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.convert import trajectory_bytes
from common.types import ContextKind, ContextPolicy, Sampling, Source, Status, StepKind, Task, VersionRun, ids_array, spans_of
from common.validate import RecordError
from learner.assignments import EveryRolloutFails, check_assignment
from learner.inbox import frames
from learner.rollouts import Kind
from tests.control.scripted import (
    Clock,
    engine,
    failed,
    hand_in,
    lease,
    make_control,
    publish,
    started,
    step,
    trajectory,
    unsampled,
)

# ---- dispatch --------------------------------------------------------------------------------------------


def test_nothing_is_handed_out_without_a_ready_engine_with_young_weights(tmp_path):
    control = make_control(tmp_path, Clock())
    control.start_rl()
    assert lease(control) == []  # no engine at all
    control.set_engines([engine(1)])
    assert lease(control) == []  # 096: an engine with weights that this timeline never published
    publish(control, 1, 0)
    control.set_engines([engine(1, "updating")])
    assert lease(control) == []
    control.set_engines([engine(1)])
    assert len(lease(control, 5)) == 5
    assert len(lease(control)) == 3  # (max_lag 1 + 1) * 2 groups * 2 members = 8


def test_weights_beyond_max_lag_serve_no_training(tmp_path):
    control, _, _ = started(tmp_path)
    for _ in range(2):
        for a in lease(control):
            hand_in(control, trajectory(a))
        batch = control.take(0)
        assert batch is not None
        control.commit(batch)
    assert control.ledger.lag(1) == 2
    assert lease(control) == []
    publish(control, 2, 2)
    control.set_engines([engine(2)])
    assert len(lease(control)) == 4  # one update is left: 2 groups


def test_an_assignment_says_all_that_an_actor_needs(tmp_path):
    control, _, _ = started(
        tmp_path,
        domains=[
            {
                "name": "toy",
                "train_tasks": 6,
                "heldout_tasks": 4,
                "limits": {"max_turns": 3, "max_tokens": 64},
                "context": {"observation_tokens": 9},
            }
        ],
    )
    a, b = lease(control, 2)
    assert (a.rollout_id, a.attempt, a.group_id, a.source, a.purpose) == ("1-g000000-0", 1, "1-g000000", Source.POLICY, "train")
    assert (a.limits.max_turns, a.limits.max_tokens, a.sampling.temperature) == (3, 64, 1.0)
    assert (a.context.name, a.context.options["observation_tokens"]) == ("append", 9)
    assert a.task.id == b.task.id
    assert a.sampling.seed != b.sampling.seed


def test_the_reply_says_when_to_come_back(tmp_path):
    control, _, _ = started(tmp_path)
    assert control.lease("a", 4).retry_after_s == 0
    assert 0 < control.lease("a", 100).retry_after_s <= 0.2
    control.finish()
    over = control.lease("a", 4)
    assert (over.assignments, over.no_more) == ([], True)


def test_warm_rollouts_need_no_engine_and_come_as_references(tmp_path):
    control = make_control(tmp_path, Clock(), warm={"updates": 1, "rollouts_per_update": 3})
    control.start_warm()
    assigned = lease(control)
    assert [a.source for a in assigned] == [Source.REFERENCE] * 3
    assert [hand_in(control, trajectory(a)) for a in assigned] == ["STORED"] * 3
    batch = control.take(0)
    assert batch is not None
    assert (batch.kind, len(batch.trajectories), batch.live_tokens, batch.lag.max) == (Kind.WARM, 3, 6, 0)
    control.commit(batch)
    assert lease(control) == []  # one warm update is all
    assert control.counts()["trained"] == 3
    assert control.dispatch.sampler.statistics["toy"] == {}  # references say nothing about the policy
    assert control.tokens == {"sampled": 0, "trained": 0}


def test_references_that_are_open_when_rl_starts_are_cancelled(tmp_path):
    control = make_control(tmp_path, Clock(), warm={"updates": 2, "rollouts_per_update": 3})
    control.start_warm()
    out = lease(control)
    control.start_rl()
    assert control.counts(Kind.WARM)["cancelled"] == 6
    assert hand_in(control, trajectory(out[0])) == "SUPERSEDED"


# ---- deliveries ---------------------------------------------------------------------------------------------


def test_077_one_row_however_often_it_is_sent(tmp_path):
    control, _, _ = started(tmp_path)
    a, b = lease(control, 2)
    assert [hand_in(control, trajectory(a)) for _ in range(3)] == ["STORED", "DUPLICATE", "DUPLICATE"]
    assert hand_in(control, trajectory(b)) == "STORED"
    assert control.deliveries == {"stored": 2, "duplicate": 2}
    paths = list((tmp_path / "inbox").glob("*.spool"))
    assert [len(list(frames(path))) for path in paths] == [2]


def test_077_two_copies_read_at_the_same_time_are_one_row(tmp_path):
    """Both were EXPECTED when they arrived; the second to take the lock is a duplicate, a late one superseded."""
    control, _, _ = started(tmp_path)
    a, b = lease(control, 2)
    data = trajectory_bytes(trajectory(a))
    assert [control.deliver(1, (a.rollout_id, 1), data).status for _ in range(2)] == ["STORED", "DUPLICATE"]
    control.finish()
    assert control.deliver(1, (b.rollout_id, 1), trajectory_bytes(trajectory(b))).status == "SUPERSEDED"


def test_deliveries_of_an_older_incarnation_are_superseded(tmp_path):
    control, _, _ = started(tmp_path)
    a = lease(control, 1)[0]
    assert hand_in(control, trajectory(a), incarnation=7) == "SUPERSEDED"
    assert hand_in(control, trajectory(a)) == "STORED"


def test_002_unequal_arrays_are_refused_by_name_and_nothing_is_stored(tmp_path):
    control, _, events = started(tmp_path)
    a = lease(control, 1)[0]
    bad = step([3, 4, 5, 6], [(0, 1)])
    object.__setattr__(bad, "action_logprobs", np.full(5, -1.0, np.float32))
    assert hand_in(control, trajectory(a, steps=(bad,))) == "REFUSED"
    assert list((tmp_path / "inbox").glob("*.spool")) == []
    assert len(list(frames(tmp_path / "inbox" / "quarantine"))) == 1
    assert events.of("rollout_failed") == [
        {
            "rollout": a.rollout_id,
            "attempt": 1,
            "actor": "actor-0",
            "reason": "refused:equal_lengths",
            "detail": "step 0: 4 action ids, 5 logprobs, 4 expected",
            "again": True,
        }
    ]
    again = lease(control, 1)[0]
    assert (again.rollout_id, again.attempt) == (a.rollout_id, 2)
    assert hand_in(control, trajectory(again, steps=(bad,))) == "REFUSED"
    assert control.reasons()["failed"] == {"refused:equal_lengths": 1}


def turns(count, kind=StepKind.ACT):
    """Appended turns of one token each."""
    made, length = [], 0
    for n in range(count):
        made.append(replace(step([3], [(0, 1)], context=[1]), parent=n - 1, prefix_len=length, kind=kind))
        length += 2
    return tuple(made)


def tail(length):
    return spans_of([(length, ContextKind.OBSERVATION)])


def test_helpers_and_summaries_have_limits_of_their_own(tmp_path):
    """As many summaries as turns, sub-agents' turns as options allow; turns of the policy itself count alone."""
    control, _, _ = started(tmp_path)
    options = {"subagent_turns": 2, "subagent_calls": 3, "summary_tokens": 1}
    asked = replace(lease(control, 1)[0], context=ContextPolicy("summary", options))
    kinds = [StepKind.ACT] * 10 + [StepKind.SUBAGENT] * 6 + [StepKind.SUMMARY] * 16

    def made(*more):
        steps = zip(turns(32 + len(more)), (*kinds, *more), strict=True)
        return trajectory(asked, steps=tuple(replace(step, kind=kind) for step, kind in steps))

    check_assignment(made(), asked)
    for kind, why in (("ACT", "11 turns, "), ("SUBAGENT", "7 turns of sub-agents"), ("SUMMARY", "17 summaries")):
        with pytest.raises(RecordError, match=why):
            check_assignment(made(StepKind[kind]), asked)
    foreign = replace(asked, context=ContextPolicy("summary", options | {"summary_url": "http://x"}))
    with pytest.raises(RecordError, match="16 summaries, allowed are 0"):  # another model writes them
        check_assignment(made(), foreign)
    longer = replace(step([3, 4], [(0, 1)], context=[1]), kind=StepKind.SUMMARY, parent=0, prefix_len=2)
    root = replace(step([3], [(0, 1)], context=[1]), kind=StepKind.SUBAGENT)
    for wrong, why in (
        (longer, r"step 1 \(SUMMARY\) has 2 sampled tokens, allowed are 1"),
        (root, r"step 1 \(SUBAGENT\) continues no"),
    ):
        with pytest.raises(RecordError, match=why):
            check_assignment(trajectory(asked, steps=(*turns(1), wrong)), asked)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group_id": "1-g000077"}, "assignment: group_id"),
        ({"attempt": 5}, "assignment: attempt"),
        ({"task": Task("toy", "train-99", 0, {})}, "assignment: task"),
        ({"source": Source.EXTERNAL, "steps": (unsampled(),)}, "assignment: source"),
        ({"steps": (step([3], [(0, 9)]),)}, "version_exists"),
        ({"steps": (step([95], [(0, 1)]),)}, "ids_in_vocabulary"),
        ({"sampling": Sampling(0.5, 32)}, "assignment: sampling"),
        ({"steps": (step(list(range(40)) * 8, [(0, 1)]),)}, "limits: 322 tokens, allowed are 320"),
        ({"steps": turns(11)}, "limits: 11 turns, allowed are 10"),
        ({"steps": (step([3] * 33, [(0, 1)]),)}, "limits: step 0 (ACT) has 33 sampled tokens, allowed are 32"),
        ({"steps": turns(1, StepKind.SUBAGENT)}, "limits: 1 turns of sub-agents, allowed are 0"),
        ({"steps": turns(1, StepKind.SUMMARY)}, "limits: 1 summaries, allowed are 0"),
        ({"status": Status.TRUNCATED, "tail_ids": ids_array([1] * 317), "tail_spans": tail(317)}, "limits: 321 tokens"),
    ],
)
def test_what_was_not_asked_for_is_refused(tmp_path, change, rule):
    control, _, _ = started(tmp_path)
    a = lease(control, 1)[0]
    answer = control.deliver(1, (a.rollout_id, 1), trajectory_bytes(trajectory(a, **change)))
    assert answer.status == "REFUSED"
    assert answer.reason.startswith(rule)


def test_bytes_that_are_no_record_are_refused(tmp_path):
    control, _, _ = started(tmp_path)
    a = lease(control, 1)[0]
    assert control.deliver(1, (a.rollout_id, 1), b"\xff\xff\xff").reason.startswith("parse: ")
    assert control.reasons() == {}  # it is tried again


def test_042_failed_and_empty_rollouts_are_no_rows_and_no_statistics(tmp_path):
    control, _, _ = started(tmp_path)
    a, b, *_ = lease(control, 4)
    assert hand_in(control, failed(a)) == "STORED"
    assert hand_in(control, failed(a)) == "DUPLICATE"
    empty = step([], [])
    object.__setattr__(empty, "finish", 2)
    assert hand_in(control, trajectory(b, steps=(empty,), status=3)) == "STORED"
    assert control.dispatch.sampler.statistics["toy"] == {}
    again = lease(control, 2)
    assert [(x.rollout_id, x.attempt) for x in again] == [(a.rollout_id, 2), (b.rollout_id, 2)]
    for x in again:
        hand_in(control, failed(x, "no_replica"))
    assert control.reasons() == {"failed": {"no_replica": 2}}
    assert control.counts()["failed"] == 2


def test_a_run_whose_every_rollout_fails_ends_with_the_reason(tmp_path):
    control, _, _ = started(tmp_path, learner={"max_attempts": 1})
    for item in lease(control, 1):  # one that is scored interrupts the streak
        hand_in(control, failed(item))
    for _ in range(255):
        for item in lease(control, 1):
            hand_in(control, failed(item, "env said no"))
    assert control.counts()["failed"] == 256
    with pytest.raises(EveryRolloutFails, match="the last 256 rollouts all failed, the newest with: env said no"):
        control.take(0)
    for item in lease(control, 1):
        hand_in(control, trajectory(item))
    assert control.take(0) is None


def test_a_silent_actors_rollouts_go_to_another(tmp_path):
    control, clock, events = started(tmp_path)
    mine = lease(control, 2)
    clock.now = 5.0
    assert control.renew("actor-0", [(mine[0].rollout_id, 1)], [], {}) == []
    clock.now = 12.0
    theirs = lease(control, 1, "actor-1")
    assert (theirs[0].rollout_id, theirs[0].attempt) == (mine[1].rollout_id, 2)
    assert events.of("leases_expired") == [{"actor": "actor-0", "rollouts": 1, "oldest": mine[1].rollout_id}]
    assert control.renew("actor-0", [(x.rollout_id, 1) for x in mine], [], {}) == [(mine[1].rollout_id, 1)]
    assert hand_in(control, trajectory(mine[1])) == "SUPERSEDED"


def test_a_failures_reason_is_told_in_full(tmp_path):
    control, _, events = started(tmp_path)
    (a, *_) = lease(control)
    why = "RolloutError: a turn of the reference takes 16 tokens, limits.max_new_tokens is 12; that is more than 80 characters"
    hand_in(control, failed(a, why))
    assert [event["reason"] for event in events.of("rollout_failed")] == [why]


# ---- unproven weights --------------------------------------------------------------------------------------


def test_tokens_of_an_engine_that_is_not_proven_wait_at_the_door(tmp_path):
    control, _, _ = started(tmp_path)
    control.published(2, 0)
    control.proofs.began("engine-0", 2)
    mine = lease(control, 2)
    assert hand_in(control, trajectory(mine[0], version=2)) == "UNPROVEN"
    assert hand_in(control, trajectory(mine[1])) == "STORED"  # of version 1
    assert control.counts()["open"] == 2
    control.proofs.passed("engine-0", 2)
    assert hand_in(control, trajectory(mine[0], version=2)) == "STORED"


def test_tokens_of_weights_that_failed_their_canary_are_never_trained_and_the_rollout_is_played_again(tmp_path):
    control, clock, events = started(tmp_path)
    control.published(2, 0)
    control.proofs.began("engine-0", 2)
    mine = lease(control, 1)[0]
    clock.now += 1
    control.proofs.failed("engine-0", 2, "its canary differs")
    control.proofs.began("engine-0", 2)
    control.proofs.passed("engine-0", 2)  # at the second try: what was sampled before is nobody's
    clock.now += 1
    assert hand_in(control, trajectory(mine, version=2)) == "STORED"  # the actor may forget it
    assert [(e["reason"], e["detail"], e["again"]) for e in events.of("rollout_failed")] == [
        ("unproven_weights", "version 2 on engine-0: its canary differs", True)
    ]
    again = lease(control, 1)[0]
    assert (again.rollout_id, again.attempt) == (mine.rollout_id, 2)
    assert hand_in(control, trajectory(again, version=2)) == "STORED"
    assert control.counts()["failed"] == 0


def test_tokens_of_an_engine_that_nobody_updated_are_not_trained(tmp_path):
    control, _, _ = started(tmp_path)
    first = lease(control, 1)[0]
    strange = replace(step([3, 4], [(0, 1)]), versions=(VersionRun(0, 1, "engine-9", "main"),))
    assert hand_in(control, trajectory(first, steps=(strange,))) == "STORED"
    assert control.counts()["open"] > 0
    assert lease(control, 1)[0].attempt == 2
