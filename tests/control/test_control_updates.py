"""From delivered rollouts to updates, with the clock set by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner import assignments
from tests.control.scripted import (
    engine,
    hand_in,
    in_background,
    lease,
    make_control,
    publish,
    started,
    step,
    trajectory,
)
from tests.processes import until


def test_the_batch_masks_over_age_tokens_and_keeps_rewards_of_stale_rollouts(tmp_path):
    """Update 2 with max_lag 1: tokens of version 1 (lag 2) are out, of 2 (lag 1) and 3 (lag 0) in."""
    control, _, events = started(tmp_path)
    control.ledger.update = 2
    publish(control, 2, 1)
    publish(control, 3, 2)
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
    assert (batch.live_tokens, batch.stale, batch.lag.max) == (6, 1, 1)
    assert batch.lag.mean == 0.5  # (1 + 0 + 2 * 1 + 2 * 0) / 6
    assert batch.success == {"toy": 0.5}
    assert events.of("stale")[0]["rollouts"] == 1
    control.commit(batch)
    counts = control.counts()
    assert (counts["trained"], counts["stale"], counts["open"]) == (3, 1, 0)
    assert control.tokens == {"sampled": 9, "trained": 6}


CROSS_POLICY = {"engine": {"count": 2}, "cross_policy": {"engines": 1, "share": 0.3, "refresh": 2, "max_lag": 3}}


def test_the_batch_measures_the_lag_of_each_pool(tmp_path):
    """Update 3, max_lag 1 in main and 3 in the stale pool: version 1 (lag 3) is live where the stale pool sampled it."""
    control, _, _ = started(tmp_path, **CROSS_POLICY | {"learner": {"updates": 6, "max_lag": 1, "max_attempts": 2}})
    control.ledger.update = 3
    for version in (2, 3, 4):
        publish(control, version, version - 1)
    control.set_engines([engine(4)])
    one, two, three, four = lease(control, 4)
    assert one.stale_share == 0.3
    hand_in(control, trajectory(one, steps=(step([3, 4, 5], [(0, 1), (1, 1, "stale"), (2, 4)], 1.0),)))
    hand_in(control, trajectory(two, steps=(step([3, 4, 5], [(0, 2, "stale")]),)))
    hand_in(control, trajectory(three, version=3))
    hand_in(control, trajectory(four, version=1))
    batch = control.take(0)
    assert batch is not None
    assert [batch.live[x.rollout_id][0].tolist() for x in (one, two, three, four)] == [
        [False, True, True],
        [True, True, True],
        [True, True],
        [False, False],
    ]
    assert (batch.lag.tokens, batch.lag.mean, batch.lag.max) == (3, 2 / 3, 1)  # lags 0, 1, 1
    assert (batch.stale_lag.tokens, batch.stale_lag.mean, batch.stale_lag.max) == (4, 9 / 4, 3)  # lags 3, 2, 2, 2
    assert (batch.live_tokens, batch.stale) == (7, 1)
    assert [batch.lags[x.rollout_id] for x in (one, two, three, four)] == [3, 2, 1, 3]  # over all their tokens


def test_only_training_rollouts_of_the_policy_use_the_stale_pool(tmp_path):
    control = make_control(tmp_path, **CROSS_POLICY | {"warm": {"updates": 1, "rollouts_per_update": 3}})
    publish(control, 1, 0)
    control.set_engines([engine(1)])
    control.start_warm()
    assert [a.stale_share for a in lease(control, 1)] == [0.0]
    result = in_background(control.evaluate, "warm", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    held_out = lease(control, 3)
    assert [(a.purpose, a.stale_share) for a in held_out] == [("eval", 0.0)] * 3
    wrong = trajectory(held_out[0], steps=(step([3, 4], [(0, 1, "stale")]),))
    assert hand_in(control, wrong) == "REFUSED"
    for a in held_out[1:] + lease(control, 1):
        assert hand_in(control, trajectory(a)) == "STORED"
    assert [entry["n"] for entry in result()] == [3]


def test_a_token_of_a_pool_that_was_not_assigned_is_refused(tmp_path):
    control, _, events = started(tmp_path)  # without cross-policy sampling
    (a,) = lease(control, 1)
    assert hand_in(control, trajectory(a, steps=(step([3, 4], [(0, 1), (1, 1, "stale")]),))) == "REFUSED"
    detail = "version 1 sampled it in pool 'stale', assigned was main"
    assert [(e["reason"], e["detail"]) for e in events.of("rollout_failed")] == [("refused:assignment", detail)]


def test_engines_of_the_stale_pool_alone_start_nothing(tmp_path):
    control, _, _ = started(tmp_path, **CROSS_POLICY)
    control.set_engines([engine(1, pool="stale"), engine(1, "updating")])
    assert lease(control) == []
    assert not assignments.serves(control.engines, 1)
    control.set_engines([engine(1, pool="stale"), engine(1)])
    assert len(lease(control, 2)) == 2


def test_078_siblings_that_chance_cannot_make_equal_are_named(tmp_path):
    """Two samples agree with the probability of their ids. Four rollouts: fewer than 4² = 16 pairs, so that an alarm needs
    exp(logprob) * 16 < 1e-6, a logprob below ln(1e-6 / 16) = -16.6."""
    groups = {}
    for logprob in (-16.5, -16.7):  # two tokens of half of it each
        control, _, _ = started(tmp_path / str(logprob), algorithm={"group_size": 4, "groups_per_update": 1})
        one, two, three, four = lease(control, 4)
        equal = replace(step([3, 4], [(0, 1)]), action_logprobs=np.full(2, logprob / 2, np.float32))
        other = replace(step([3, 5], [(0, 1)]), action_logprobs=np.full(2, logprob / 2, np.float32))
        for a, steps in ((one, (equal,)), (two, (other,)), (three, (equal,)), (four, (equal, equal_after(equal)))):
            assert hand_in(control, trajectory(a, steps=steps)) == "STORED"
        groups[logprob] = control.take(0).identical, (one.rollout_id, three.rollout_id)
    assert groups[-16.5][0] == []
    assert groups[-16.7][0] == [groups[-16.7][1]]


def equal_after(first):
    """One more step with the same ids: another rollout than the first step alone."""
    return replace(first, parent=0, prefix_len=len(first.context_ids) + len(first.action_ids))


def test_drop_leaves_out_whole_rollouts_and_keeps_their_rewards(tmp_path):
    control, _, _ = started(tmp_path, learner={"on_stale": "drop"})
    control.ledger.update = 2
    publish(control, 3, 2)
    control.set_engines([engine(3)])
    assigned = lease(control, 4)
    for i, a in enumerate(assigned):
        hand_in(control, trajectory(a, steps=(step([3, 4], [(0, 1), (1, 3)] if i == 0 else [(0, 3)], float(i)),)))
    batch = control.take(0)
    assert [t.total_reward for t in batch.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [int(batch.live[a.rollout_id][0].sum()) for a in assigned] == [0, 2, 2, 2]
    assert batch.lags[assigned[0].rollout_id] == 2
    assert (batch.lag.max, batch.live_tokens, batch.stale) == (0, 6, 1)


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
    publish(control, 1, 0)
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
    publish(control, 1, 0)
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
