"""Credit over turns, segments and groups."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config_algorithm import AlgorithmConfig
from common.record import segments
from common.types import Finish, Status
from common.validate import RecordError, Vocabulary, check
from learner.credit import last_segment, of_batch, place_rewards
from learner.rows import Rollout
from tests.learner_math.build import as_reference, chain, rollout, turn


def plain(trajectory, **scores):
    parts = segments(trajectory)
    return Rollout(trajectory, parts, [segment.mask for segment in parts], **scores)


def of_group(group, ddof):
    """GRPO."""
    return of_batch([[plain(trajectory) for trajectory in group]], AlgorithmConfig(std_ddof=ddof))[0]


def of_rollout(trajectory, values, after=np.nan, gamma=1.0, lam=0.95, **more):
    """GAE."""
    algorithm = AlgorithmConfig(advantage="gae", critic="shared", gamma=gamma, gae_lambda=lam, **more)
    return of_batch([[plain(trajectory, values=values, after=after)]], algorithm)[0][0]


def spread(segment, compact):
    """Values at sampled tokens; elsewhere something that must never be read."""
    values = np.full(len(segment.ids), np.nan, np.float32)
    values[segment.mask] = compact
    return values


def credit_of(trajectory, compact, after=np.nan, gamma=1.0, lam=0.95):
    (segment,) = segments(trajectory)
    (credit,) = of_rollout(trajectory, [spread(segment, compact)], after, gamma, lam)
    assert (credit.advantages[~segment.mask] == 0).all()
    assert (credit.returns[~segment.mask] == 0).all()
    return credit.advantages[segment.mask], credit.returns[segment.mask]


def test_029_gae_skips_observation_tokens():
    """Mask 1 1 0 0 1 1 after a prompt. Backwards: 1-.6 = .4; .99·.6-.4 + .9405·.4 = .5702; and so on."""
    trajectory = rollout(chain([([1], [2, 3], 0.0), ([4, 5], [6, 7], 1.0)]))
    advantages, returns = credit_of(trajectory, [0.1, 0.2, 0.4, 0.6], gamma=0.99)
    np.testing.assert_allclose(advantages, [0.786703, 0.732273, 0.570200, 0.400000], atol=1e-6)
    np.testing.assert_allclose(returns, [0.886703, 0.932273, 0.970200, 1.000000], atol=1e-6)
    advantages, _ = credit_of(trajectory, [0.1, 0.2, 0.4, 0.6], gamma=1.0)
    np.testing.assert_allclose(advantages, [0.813450, 0.751000, 0.580000, 0.400000], atol=1e-6)


def test_030_a_finished_rollout_bootstraps_nothing():
    """.5 = 1 - .5; .675 = .5 - .3 + .95·.5. What the critic says after the end (40) is not read."""
    trajectory = rollout(chain([([1], [2, 3], 1.0)]), tail=[4])
    advantages, _ = credit_of(trajectory, [0.3, 0.5], after=40.0)
    np.testing.assert_allclose(advantages, [0.675, 0.500], atol=1e-6)


def test_031_returns_run_through_observations():
    trajectory = rollout(chain([([1], [2, 3], 0.0), ([4, 5], [6], 1.0)]))
    _, returns = credit_of(trajectory, [0, 0, 0], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns, [0.25, 0.5, 1.0])
    trajectory = rollout(chain([([1], [2, 3], 0.2), ([4, 5], [6], 1.0)]))
    _, returns = credit_of(trajectory, [0, 0, 0], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns, [0.35, 0.7, 1.0], atol=1e-6)


def test_032_an_outcome_counts_although_the_rollout_ends_with_an_observation():
    trajectory = rollout(chain([([1], [2, 3], 1.0)]), tail=[4, 5])
    advantages, _ = credit_of(trajectory, [0.2, 0.3], gamma=0.0)
    np.testing.assert_allclose(advantages, [-0.2, 0.7], atol=1e-6)
    advantages, _ = credit_of(trajectory, [0.2, 0.3], gamma=0.9, lam=0.9)
    np.testing.assert_allclose(advantages, [0.9 * 0.3 - 0.2 + 0.81 * 0.7, 0.7], atol=1e-6)
    np.testing.assert_allclose(advantages, [0.637, 0.7], atol=1e-6)


@pytest.mark.parametrize("tail", [[], [9], [9] * 11])
def test_034_the_status_says_truncated_and_no_length_does(tail):
    cut = rollout(chain([([1], [2, 3, 4], 0.0)]), status=Status.TRUNCATED, tail=tail)
    advantages, _ = credit_of(cut, [0.2, 0.3, 0.4], after=0.7, lam=1.0)
    np.testing.assert_allclose(advantages, [0.5, 0.4, 0.3], atol=1e-6)
    ended = rollout(chain([([1], [2, 3, 4, 5, 6], 1.0)]), tail=tail)
    advantages, _ = credit_of(ended, [0.1, 0.2, 0.3, 0.4, 0.5], after=0.6, lam=1.0)
    np.testing.assert_allclose(advantages, [0.9, 0.8, 0.7, 0.6, 0.5], atol=1e-6)


def test_a_cut_off_rollout_is_over_where_limits_belong_to_the_task():
    """Without a bootstrap: -.4 at the end, then -.3 and -.2, as for a rollout that ended with nothing."""
    cut = rollout(chain([([1], [2, 3, 4], 0.0)]), status=Status.TRUNCATED, tail=[9])
    (segment,) = segments(cut)
    (credit,) = of_rollout(cut, [spread(segment, [0.2, 0.3, 0.4])], 0.7, lam=1.0, bootstrap_truncated=False)
    np.testing.assert_allclose(credit.advantages[segment.mask], [-0.2, -0.3, -0.4], atol=1e-6)
    np.testing.assert_allclose(credit.returns[segment.mask], 0.0, atol=1e-6)


@pytest.mark.parametrize(("turns", "reason", "sampled"), itertools.product([1, 2], [Finish.STOP, Finish.LENGTH], [True, False]))
def test_036_the_last_reason_decides_in_the_record(turns, reason, sampled):
    steps = chain([([1], [2], 0.0)] * turns)
    steps[-1] = replace(steps[-1], finish=reason)
    for status in (Status.TERMINATED, Status.TRUNCATED):
        trajectory = rollout(steps, status=status)
        record = trajectory if sampled else as_reference(trajectory)
        if reason == Finish.LENGTH and status == Status.TERMINATED:
            with pytest.raises(RecordError, match="finish_and_status"):
                check(record, Vocabulary(16, 16))
            continue
        check(record, Vocabulary(16, 16))
        advantages, _ = credit_of(trajectory, [0.0] * turns, after=1.0, lam=1.0)
        assert advantages.tolist() == [1.0 if status == Status.TRUNCATED else 0.0] * turns


def test_037_a_group_that_failures_left_alone_gets_zero():
    alone = rollout(chain([([1], [2, 3], 0.7)]))
    ((credit,),) = of_group([alone], ddof=1)
    assert (credit.advantages == 0).all()


def test_039_groups_are_what_was_planned_whatever_the_prompts_say():
    def score(rewards, prompts):
        group = [rollout(chain([(prompt, [5], reward)])) for reward, prompt in zip(rewards, prompts, strict=True)]
        return [credit.advantages[-1] for (credit,) in of_group(group, 0)]

    same = [[1, 2], [1, 2]]
    assert score([0.0, 0.0], same) == [0, 0]  # two seeds of one environment with the same opening: two groups
    assert score([1.0, 1.0], same) == [0, 0]
    np.testing.assert_allclose(score([1.0, 0.0], [[1, 2], [1, 3]]), [1, -1], atol=1e-5)  # a path in the prompt differs


def test_grpo_counts_rollouts_not_segments():
    """A rollout in three segments has one vote: rewards 1, 0 give ±1 (population std .5)."""
    split = rollout([turn([1, 2], [3]), turn([4], [5], 0.0, 0, 1), turn([6], [7], 1.0, 1, 2)])
    whole = rollout(chain([([1], [2], 0.0)]))
    parts = [segments(split), segments(whole)]
    assert [len(p) for p in parts] == [3, 1]
    credits = of_group([split, whole], ddof=0)
    for own, expected in zip(credits, [1, -1], strict=True):
        for segment, credit in zip(segments(split) if len(own) == 3 else segments(whole), own, strict=True):
            np.testing.assert_allclose(credit.advantages, np.where(segment.mask, expected, 0), atol=1e-5)


@st.composite
def dialogues(draw):
    """(turns as (context, action, reward), for each later turn how much of the parent stays visible)."""
    size = draw(st.integers(1, 5))
    turns, kept, length = [], [], 0
    for _ in range(size):
        kept.append(draw(st.integers(0, length)) if draw(st.booleans()) else length)
        context, action = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        turns.append(([1] * context, [2] * action, draw(st.floats(-1, 1, width=32))))
        length = kept[-1] + context + action
    return turns, kept


@given(dialogues(), st.integers(0, 2**16), st.sampled_from([Status.TERMINATED, Status.TRUNCATED]))
@settings(max_examples=60, deadline=None)
def test_gae_of_a_rollout_cut_into_segments_is_that_of_the_whole(dialogue, seed, status):
    turns, kept = dialogue
    whole = rollout(chain(turns), status=status)
    steps = [turn(c, a, r, i - 1, kept[i] if i else 0) for i, (c, a, r) in enumerate(turns)]
    cut = rollout(steps, status=status)
    rng = np.random.default_rng(seed)
    by_step = [rng.normal(size=len(action)).astype(np.float32) for _, action, _ in turns]

    def values(segment):
        return spread(segment, np.concatenate([by_step[step] for step in segment.steps]))

    (one,) = segments(whole)
    many = segments(cut)
    (expected,) = of_rollout(whole, [values(one)], 0.6, 0.9, 0.8)
    got = of_rollout(cut, [values(segment) for segment in many], 0.6, 0.9, 0.8)
    for name in ("advantages", "returns", "old_values"):
        compact = np.concatenate([getattr(credit, name)[s.mask] for s, credit in zip(many, got, strict=True)])
        np.testing.assert_array_equal(compact, getattr(expected, name)[one.mask])
    assert many[last_segment(cut, many)].steps[-1] == len(turns) - 1


def test_branches_are_credited_in_the_order_of_their_steps():
    """Step 1 continues step 0's segment, step 2 branches off at step 0, step 3 continues step 1: segments 0,1,3 | 2."""
    steps = [turn([1], [2]), turn([3], [4], 0.0, 0, 2), turn([3], [5], 0.0, 0, 1), turn([6], [7], 1.0, 1, 4)]
    trajectory = rollout(steps)
    parts = segments(trajectory)
    assert [s.steps for s in parts] == [(0, 1, 3), (2,)]
    values = [spread(parts[0], [0.1, 0.2, 0.4]), spread(parts[1], [0.3])]
    first, second = of_rollout(trajectory, values, lam=0.0)
    np.testing.assert_allclose(first.advantages[parts[0].mask], [0.1, 0.1, 0.6], atol=1e-6)  # .2-.1, .3-.2, 1-.4
    np.testing.assert_allclose(second.advantages[parts[1].mask], [0.1], atol=1e-6)  # .4-.3
    assert last_segment(trajectory, parts) == 0


def test_050_a_rollout_without_a_sampled_token_passes_through():
    empty = rollout([turn([1, 2], [], 1.0, finish=Finish.LENGTH)], status=Status.TRUNCATED)
    (credit,) = of_rollout(empty, [np.full(2, np.nan)], 0.5)
    assert credit.advantages.tolist() == [0, 0]
    other = rollout(chain([([1], [2], 0.0)]))
    credits = of_group([empty, other], ddof=0)
    assert credits[0][0].advantages.tolist() == [0, 0]
    np.testing.assert_allclose(credits[1][0].advantages, [0, -1], atol=1e-5)  # its reward of 1 counts in the group


def test_032_rewards_stand_on_the_last_token_of_their_step():
    step_of = np.array([0, 0, 1, 3, 3, 3])
    assert place_rewards(np.array([0.5, 0.25, 0.0, 1.0]), step_of).tolist() == [0, 0.5, 0.25, 0, 0, 1.0]
    # the reward of a step without tokens stands on the last token before it, or the first of all
    assert place_rewards(np.array([0.0, 0.0, 2.0, 1.0]), step_of).tolist() == [0, 0, 2.0, 0, 0, 1.0]
    assert place_rewards(np.array([1.0, 0.0]), np.array([1, 1])).tolist() == [1.0, 0.0]
    assert place_rewards(np.array([1.0]), np.zeros(0, int)).tolist() == []
