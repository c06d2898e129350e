"""The control plane in one process, with the clock set by hand."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from common.convert import trajectory_bytes
from common.types import Assignment, Source, Task
from learner.assignments import EveryRolloutFails
from learner.inbox import frames
from learner.rollouts import Kind
from tests.control.scripted import Clock, EventLog, engine, failed, hand_in, make_control, step, trajectory


def started(folder, **tables):
    """A control plane in the RL phase, with version 1 on a ready engine."""
    clock, events = Clock(), EventLog()
    control = make_control(folder, clock, events, **tables)
    control.published(1, 0)
    control.set_engines([engine(1)])
    control.start_rl()
    return control, clock, events


def lease(control, capacity=100, actor="actor-0") -> list[Assignment]:
    return control.lease(actor, capacity).assignments


def in_background(function, *args):
    """Run `function` on a thread; returns a function that waits for its result."""
    box = []
    thread = threading.Thread(target=lambda: box.append(function(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(20)
        assert not thread.is_alive()
        return box[0]

    return result


def unsampled():
    """A step without logprobs and versions."""
    return replace(step([3], []), action_logprobs=np.zeros(0, np.float32))


def wait_until(true):
    for _ in range(2000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


# ---- dispatch --------------------------------------------------------------------------------------------


def test_nothing_is_handed_out_without_a_ready_engine_with_young_weights(tmp_path):
    control = make_control(tmp_path, Clock())
    control.start_rl()
    assert lease(control) == []  # no engine at all
    control.set_engines([engine(1)])
    assert lease(control) == []  # 096: an engine with weights that this timeline never published
    control.published(1, 0)
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
    control.published(2, 2)
    control.set_engines([engine(2)])
    assert len(lease(control)) == 4  # one update is left: 2 groups


def test_an_assignment_says_all_that_an_actor_needs(tmp_path):
    control, _, _ = started(
        tmp_path, domains=[{"name": "toy", "train_tasks": 6, "heldout_tasks": 4, "limits": {"max_turns": 3, "max_tokens": 64}}]
    )
    a, b = lease(control, 2)
    assert (a.rollout_id, a.attempt, a.group_id, a.source, a.purpose) == ("1-g000000-0", 1, "1-g000000", Source.POLICY, "train")
    assert (a.limits.max_turns, a.limits.max_tokens, a.sampling.temperature) == (3, 64, 1.0)
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
    assert (batch.kind, len(batch.trajectories), batch.live_tokens, batch.lag_max) == (Kind.WARM, 3, 6, 0)
    control.commit(batch)
    assert lease(control) == []  # one warm update is all
    assert control.counts()["trained"] == 3
    assert control.sampler.statistics["toy"] == {}  # references say nothing about the policy
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


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group_id": "1-g000077"}, "assignment: group_id"),
        ({"attempt": 5}, "assignment: attempt"),
        ({"task": Task("toy", "train-99", 0, {})}, "assignment: task"),
        ({"source": Source.EXTERNAL, "steps": (unsampled(),)}, "assignment: source"),
        ({"steps": (step([3], [(0, 9)]),)}, "version_exists"),
        ({"steps": (step([95], [(0, 1)]),)}, "ids_in_vocabulary"),
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
    assert control.sampler.statistics["toy"] == {}
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


# ---- updates -------------------------------------------------------------------------------------------------


def test_the_batch_masks_over_age_tokens_and_keeps_rewards_of_stale_rollouts(tmp_path):
    """Update 2 with max_lag 1: tokens of version 1 (lag 2) are out, of 2 (lag 1) and 3 (lag 0) in."""
    control, _, events = started(tmp_path)
    control.ledger.update = 2
    control.published(2, 1)
    control.published(3, 2)
    control.set_engines([engine(3)])
    one, two, three, four = lease(control, 4)
    hand_in(control, trajectory(one, steps=(step([3, 4, 5], [(0, 1), (1, 2), (2, 3)], 1.0),)))
    hand_in(control, trajectory(two, version=1, reward=0.25))
    hand_in(control, trajectory(three, version=2, reward=0.0))
    hand_in(control, trajectory(four, version=3))
    batch = control.take(0)
    assert batch is not None
    assert [[t.rollout_id for t in group] for group in batch.groups] == [
        [one.rollout_id, two.rollout_id],
        [three.rollout_id, four.rollout_id],
    ]
    assert [batch.live[x.rollout_id][0].tolist() for x in (one, two, three, four)] == [
        [False, True, True],
        [False, False],
        [True, True],
        [True, True],
    ]
    assert [batch.lags[x.rollout_id] for x in (one, two, three, four)] == [2, 2, 1, 0]
    assert (batch.live_tokens, batch.stale, batch.lag_max) == (6, 1, 1)
    assert batch.lag_mean == 0.5  # (1 + 0 + 2 * 1 + 2 * 0) / 6
    assert batch.success == {"toy": 0.5}
    assert events.of("stale")[0]["rollouts"] == 1
    control.commit(batch)
    counts = control.counts()
    assert (counts["trained"], counts["stale"], counts["open"]) == (3, 1, 0)
    assert control.tokens == {"sampled": 9, "trained": 6}


def test_drop_leaves_out_whole_rollouts_and_keeps_their_rewards(tmp_path):
    control, _, _ = started(tmp_path, learner={"on_stale": "drop"})
    control.ledger.update = 2
    control.published(3, 2)
    control.set_engines([engine(3)])
    assigned = lease(control, 4)
    for i, a in enumerate(assigned):
        hand_in(control, trajectory(a, steps=(step([3, 4], [(0, 1), (1, 3)] if i == 0 else [(0, 3)], float(i)),)))
    batch = control.take(0)
    assert [t.total_reward for t in batch.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [int(batch.live[a.rollout_id][0].sum()) for a in assigned] == [0, 2, 2, 2]
    assert batch.lags[assigned[0].rollout_id] == 2
    assert (batch.lag_max, batch.live_tokens, batch.stale) == (0, 6, 1)


def test_039_equal_prompts_do_not_merge_groups(tmp_path):
    """Two groups with identical prompt ids and rewards [0, 0] and [1, 1]: each has zero spread. Merged they would not."""
    control, _, _ = started(tmp_path)
    for a, reward in zip(lease(control, 4), (0.0, 0.0, 1.0, 1.0), strict=True):
        hand_in(control, trajectory(a, reward=reward))
    batch = control.take(0)
    assert batch is not None
    rewards = [[t.total_reward for t in group] for group in batch.groups]
    assert rewards == [[0.0, 0.0], [1.0, 1.0]]
    assert all(len({t.group_id for t in group}) == 1 for group in batch.groups)


def test_take_waits_for_the_last_member(tmp_path):
    control = make_control(tmp_path)
    control.published(1, 0)
    control.set_engines([engine(1)])
    control.start_rl()
    assigned = lease(control, 4)
    for a in assigned[:3]:
        hand_in(control, trajectory(a))
    assert control.take(0) is None
    result = in_background(control.take, 20.0)
    hand_in(control, trajectory(assigned[3]))
    batch = result()
    with pytest.raises(RuntimeError, match="while an update is running"):
        control.take(0)
    control.abandon(batch, "non_finite")
    assert control.reasons() == {"filtered": {"non_finite": 4}}
    with pytest.raises(RuntimeError, match="not the running update"):
        control.commit(batch)


def test_071_finish_wakes_the_waiting_and_every_open_rollout_is_cancelled(tmp_path):
    control = make_control(tmp_path)
    control.published(1, 0)
    control.set_engines([engine(1)])
    control.start_rl()
    out = lease(control)
    taken, evaluated = in_background(control.take, 60.0), in_background(control.evaluate, "rl", 1)
    control.finish()
    assert taken() is None
    assert evaluated() == []
    assert control.evaluation.results == []
    counts = control.counts()
    assert counts == {"dispatched": 8, "open": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0, "cancelled": 8}
    assert len(control.renew("actor-0", [(a.rollout_id, a.attempt) for a in out], [], {})) == 8


def test_a_wait_names_what_it_waits_for(tmp_path):
    control, clock, events = started(tmp_path)
    assert control.take(0) is None
    assert control.status()["sentence"] == "learner waits for 2 groups of any domain: no actor has called"
    assigned = lease(control, 4)
    clock.now = 6.5
    assert control.take(0) is None
    assert control.take(0) is None  # told once, not at every look
    status = control.status()
    assert status["sentence"] == "learner waits for 2 groups of toy: oldest rollout 1-g000000-0 on actor-0 for 6.5 s"
    on = "2 groups of toy: oldest rollout 1-g000000-0 on actor-0 for 6.5 s"
    assert status["waits"][0] == {"owner": "learner", "name": "take", "on": on, "seconds": 6.5, "deadline": 5.0}  # stall_s
    assert [event["why"] for event in events.of("stall")] == [status["sentence"]]
    wait = {"owner": assigned[0].rollout_id, "name": "env.step", "on": "toy-0", "seconds": 4.0, "deadline": 30.0}
    control.renew("actor-0", [(a.rollout_id, 1) for a in assigned], [wait], {})
    clock.now = 7.0
    assert control.status()["waits"][1] == wait | {"seconds": 4.5}
    control.set_engines([engine(1, "quarantined", "canary")])
    for a in assigned:
        hand_in(control, trajectory(a))
    batch = control.take(0)
    assert control.status()["sentence"] == "learner trains update 1 on 2 groups"
    control.commit(batch)
    control.take(0)
    assert control.status()["sentence"].endswith(
        "no engine has young enough weights: engine-0 is quarantined at version 1 (canary)"
    )
    assert json.loads(json.dumps(control.status()))["rollouts"]["trained"] == 4


# ---- evaluation ----------------------------------------------------------------------------------------------


def test_097_evaluation_goes_first_and_leaves_training_untouched(tmp_path):
    control, _, _ = started(tmp_path / "with")
    plain, _, _ = started(tmp_path / "without")
    result = in_background(control.evaluate, "rl", 1, ["greedy", "sampled"])
    wait_until(lambda: control.evaluation.open)
    assigned = lease(control, 6)
    assert {a.purpose for a in assigned} == {"eval"}
    assert {a.sampling.temperature for a in assigned} == {0.0, 1.0}
    assert sorted({a.task.id for a in assigned}) == ["heldout-0", "heldout-1", "heldout-2"]
    for a in assigned[:5]:
        assert hand_in(control, trajectory(a, reward=float(a.task.id != "heldout-2"))) == "STORED"
    assert hand_in(control, failed(assigned[5])) == "STORED"
    assert hand_in(control, failed(lease(control, 1)[0])) == "STORED"  # tried again first; then out of attempts
    greedy, sampled = result()
    assert (greedy["mode"], greedy["n"], greedy["success"]) == ("greedy", 3, 2 / 3)
    assert (sampled["mode"], sampled["n"], sampled["success"]) == ("sampled", 2, 1.0)
    assert set(greedy) == {"phase", "version", "split", "mode", "domain", "success", "n", "ci95"}
    assert control.state()["sampler"] == plain.state()["sampler"]
    assert control.counts() == plain.counts()
    a, b = lease(control), lease(plain)
    assert [(x.rollout_id, x.sampling.seed, x.task.id) for x in a] == [(x.rollout_id, x.sampling.seed, x.task.id) for x in b]
    assert control.counts(Kind.EVAL)["evaluated"] == 5


def test_097_a_held_out_rollout_sent_to_training_is_refused(tmp_path):
    control, _, _ = started(tmp_path)
    result = in_background(control.evaluate, "rl", 1)
    wait_until(lambda: control.evaluation.open)
    held = lease(control, 1)
    assert held[0].purpose == "eval"
    train = next(a for a in lease(control) if a.purpose == "train")
    disguised = trajectory(held[0], rollout_id=train.rollout_id, group_id=train.group_id)
    assert hand_in(control, disguised) == "REFUSED"
    sampled_greedily = trajectory(train, sampling=held[0].sampling)
    assert control.standing(1, (train.rollout_id, 1)).status == "DUPLICATE"
    again = [a for a in lease(control) if a.rollout_id == train.rollout_id]
    assert hand_in(control, trajectory(again[0], sampling=sampled_greedily.sampling)) == "REFUSED"
    assert control.reasons()["failed"] == {"refused:assignment": 1}
    control.finish()
    result()


def test_evaluation_waits_for_its_version_and_gives_up_at_its_deadline(tmp_path):
    control, clock, events = started(tmp_path)
    control.set_engines([engine(1)])
    result = in_background(control.evaluate, "rl", 2)
    wait_until(lambda: control.evaluation.open)
    assert all(a.purpose == "train" for a in lease(control))
    assert "no engine serves version 2: engine-0 is ready at version 1" in control.status()["sentence"]
    control.published(2, 0)
    control.set_engines([engine(2)])
    held = [a for a in lease(control) if a.purpose == "eval"]
    assert len(held) == 3
    hand_in(control, trajectory(held[0], version=2))
    hand_in(control, trajectory(held[1], version=1))  # of other weights: tried again
    clock.now = 31.0
    control.set_engines([engine(2)])
    (entry,) = result()
    assert (entry["n"], entry["success"], entry["version"]) == (1, 1.0, 2)
    assert events.of("evaluation")[0]["failed"] == 2
    assert events.of("evaluation_incomplete")[0]["rollouts"] == 2
    assert events.of("rollout_failed")[0]["reason"] == "other_version"
    assert hand_in(control, trajectory(held[2], version=2)) == "SUPERSEDED"


def test_evaluation_gives_up_on_rollouts_of_actors_that_vanish(tmp_path):
    control, clock, events = started(tmp_path, learner={"max_attempts": 1})
    result = in_background(control.evaluate, "rl", 1)
    wait_until(lambda: control.evaluation.open)
    held = lease(control, 3)
    hand_in(control, trajectory(held[0]))
    clock.now = 11.0  # the lease is 10 s, the deadline of the evaluation 30 s
    control.set_engines([engine(1)])
    (entry,) = result()
    assert (entry["n"], events.of("evaluation")[0]["failed"]) == (1, 2)
    assert events.of("evaluation_incomplete") == []
    assert control.reasons(Kind.EVAL) == {"failed": {"lease_expired": 2}}


def test_a_stopped_evaluation_records_nothing(tmp_path):
    control, _, events = started(tmp_path)
    stop = threading.Event()
    result = in_background(control.evaluate, "rl", 1, (), stop.is_set)
    wait_until(lambda: control.evaluation.open)
    stop.set()
    control.set_engines([engine(1)])
    assert result() == [] == control.evaluation.results
    assert control.counts(Kind.EVAL)["cancelled"] == 3
    assert events.of("evaluation_incomplete")[0]["rollouts"] == 3


# ---- checkpoints ---------------------------------------------------------------------------------------------


def test_resume_keeps_waiting_rollouts_and_issues_again_what_was_leased(tmp_path):
    control, _, _ = started(tmp_path)
    assigned = lease(control)
    for i, a in enumerate(assigned[:5]):
        hand_in(control, trajectory(a, reward=float(i)))
    saved = json.loads(json.dumps(control.state()))
    control.committed(saved)
    hand_in(control, trajectory(assigned[5]))  # after the checkpoint: of the lost timeline

    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert events.of("restored") == [{"update": 0, "waiting": 5, "rollouts": control.counts()}]
    assert hand_in(again, trajectory(assigned[6]), incarnation=1) == "SUPERSEDED"
    again.start_rl()
    again.set_engines([engine(1, "updating")])
    assert lease(again) == []  # 096: nothing starts before the restored weights serve
    again.published(2, 0)
    again.set_engines([engine(2)])
    reissued = lease(again)
    assert [(a.rollout_id, a.sampling.seed) for a in reissued] == [(a.rollout_id, a.sampling.seed) for a in assigned[5:]]
    for a in reissued:
        assert hand_in(again, trajectory(a, version=2)) == "STORED"
    batch = again.take(0)
    assert [t.total_reward for t in batch.trajectories] == [0.0, 1.0, 2.0, 3.0]
    again.commit(batch)
    batch = again.take(0)
    again.commit(batch)
    assert again.counts()["trained"] == 8 == again.counts()["dispatched"]
    again.published(3, 2)
    again.set_engines([engine(3)])
    assert {a.rollout_id.split("-")[0] for a in lease(again)} == {"2"}


def test_a_rollout_whose_spooled_bytes_are_gone_is_issued_again(tmp_path):
    control, _, _ = started(tmp_path)
    for a in lease(control, 2):
        hand_in(control, trajectory(a))
    saved = control.state()
    for path in (tmp_path / "inbox").glob("*.spool"):
        path.unlink()
    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert len(events.of("spool_lost")) == 2
    again.start_rl()
    again.published(2, 0)
    again.set_engines([engine(2)])
    assert [a.rollout_id for a in lease(again, 2)] == ["1-g000000-0", "1-g000000-1"]


def test_spool_files_go_once_a_committed_checkpoint_does_not_need_them(tmp_path):
    control, _, _ = started(tmp_path, checkpoint={"keep": 1})
    spool = tmp_path / "inbox"

    def files():
        return sorted(path.name for path in spool.glob("*.spool"))

    for a in lease(control, 4):
        hand_in(control, trajectory(a))
    first = control.state()
    control.committed(first)
    assert files() == ["0001-000000.spool"]
    batch = control.take(0)
    control.commit(batch)
    control.committed(first)
    assert files() == ["0001-000000.spool"]  # finished, but the only checkpoint would read it
    control.published(2, 1)
    control.set_engines([engine(2)])
    for a in lease(control, 2):
        hand_in(control, trajectory(a, version=2))
    second = control.state()
    assert second["spool"] == ["0001-000001.spool"]
    assert len(files()) == 2  # saved, but not committed
    control.committed(first)
    assert len(files()) == 2  # the newer file holds rollouts that still wait
    control.committed(second)
    assert files() == ["0001-000001.spool"]


def test_090_changed_tasks_are_an_event(tmp_path):
    control, _, _ = started(tmp_path)
    saved = control.state()
    saved["sampler"]["domains"]["toy"]["fingerprint"] = "other"
    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert [event["domain"] for event in events.of("tasks_changed")] == ["toy"]


def test_a_long_run_holds_only_what_is_open(tmp_path):
    control, _, _ = started(tmp_path, learner={"updates": 40}, checkpoint={"keep": 1})
    for update in range(40):
        for a in lease(control):
            hand_in(control, trajectory(a, version=update + 1))
        batch = control.take(0)
        control.commit(batch)
        control.published(update + 2, update + 1)
        control.set_engines([engine(update + 2)])
        control.committed(control.state())
        assert len(control._stored) <= 8
        assert len(list((tmp_path / "inbox").iterdir())) <= 3
    assert control.counts() | {"open": 0} == control.counts()
    assert control.counts()["trained"] == 160
