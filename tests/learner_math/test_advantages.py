"""Advantages by comparison against hand-computed numbers, slow definitions, identities, and what must change nothing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import dr_grpo, erpo, gigpo, grpo, rloo, task_normalize, whiten

pytestmark = pytest.mark.usefixtures("x64")

finite = st.floats(-3, 3, allow_nan=False, width=32)
SIZE = 10  # of the padded arrays: one compiled program for all examples of a test

compiled = {
    "grpo": jax.jit(grpo, static_argnames="ddof"),
    "dr_grpo": jax.jit(dr_grpo),
    "rloo": jax.jit(rloo),
    "whiten": jax.jit(whiten),
    "erpo": jax.jit(erpo, static_argnames="ddof"),
    "gigpo": jax.jit(gigpo, static_argnames=("weight", "std")),
    "task_normalize": jax.jit(task_normalize, static_argnames=("tasks", "ddof")),
}


def run(method, xs, *more, **numbers):
    """On arrays padded to SIZE with NaN."""
    size = len(xs)
    mask = jnp.arange(SIZE) < size
    values = jnp.full(SIZE, jnp.nan, np.asarray(xs).dtype).at[:size].set(jnp.asarray(xs))
    found = compiled[method](values, *(jnp.zeros(SIZE, int).at[:size].set(jnp.asarray(x)) for x in more), mask, **numbers)
    assert (found[size:] == 0).all()
    return np.asarray(found[:size])


COMPARE = {  # as functions of one group's rewards
    "grpo": partial(run, "grpo", ddof=1),
    "grpo, population": partial(run, "grpo", ddof=0),
    "dr_grpo": partial(run, "dr_grpo"),
    "rloo": partial(run, "rloo"),
    "whiten": partial(run, "whiten"),
    "erpo": lambda xs: run("erpo", xs, np.zeros(len(xs), int), np.zeros(len(xs), int), ddof=1),
    "task_normalize": lambda xs: run("task_normalize", xs, np.zeros(len(xs), int), tasks=1),
}


# ---- golden numbers --------------------------------------------------------------------------------------------------------


def test_a_group_golden():
    """Rewards 1 0 0 1: mean .5, sample std √(1/3), population std .5; 4/3 · .5 against the mean of the other three."""
    signs = np.array([1, -1, -1, 1])
    for name, size in (("grpo", 0.866024), ("grpo, population", 0.999998), ("dr_grpo", 0.5), ("rloo", 0.666667)):
        np.testing.assert_allclose(COMPARE[name](np.array([1.0, 0, 0, 1])), size * signs, atol=5e-7, err_msg=name)
    np.testing.assert_allclose(COMPARE["grpo"](np.array([1.0, 0, 0, 1])), signs * 0.5 / (1 / np.sqrt(3) + 1e-6))
    ddof_0, ddof_1 = COMPARE["grpo, population"](np.array([1.0, 0, 0, 1])), COMPARE["grpo"](np.array([1.0, 0, 0, 1]))
    np.testing.assert_allclose(ddof_0 / ddof_1, 2 / np.sqrt(3), rtol=1e-5)  # what the wrong one costs: 15 %


REWARDS = np.array([1.0, 1, 1, 0, 0, 0, 1, 0])
QUESTION, SAME = np.repeat([0, 1], 4), np.zeros(8, int)


def test_erpo_golden():
    """Rewards 1 1 1 0 and 0 0 1 0, one environment: ±.25 and ∓.75 over its std .5 (population) or √(2/7)."""
    for ddof, one in ((1, 0.467707), (0, 0.5)):
        wanted = np.array([one] * 3 + [-3 * one, -one, -one, 3 * one, -one])
        np.testing.assert_allclose(run("erpo", REWARDS, QUESTION, SAME, ddof=ddof), wanted, atol=1e-5)
    apart = run("erpo", REWARDS, QUESTION, QUESTION, ddof=1)  # each question an environment of its own: GRPO in each
    np.testing.assert_allclose(apart, np.concatenate([COMPARE["grpo"](part) for part in (REWARDS[:4], REWARDS[4:])]))
    assert np.abs(apart - run("erpo", REWARDS, QUESTION, SAME, ddof=1)).min() > 0.02


def test_erpo_leaves_masked_rollouts_out_of_mean_and_std():
    """The last rollout of question 0 has an error of the simulated user: 1 1 1 are equal then, and the std is of seven."""
    mask = jnp.ones(8, bool).at[3].set(False)
    own = compiled["erpo"](jnp.asarray(REWARDS), jnp.asarray(QUESTION), jnp.asarray(SAME), mask, ddof=1)
    std = np.std(np.delete(REWARDS, 3), ddof=1)
    np.testing.assert_allclose(own, [0, 0, 0, 0, *(np.array([-0.25, -0.25, 0.75, -0.25]) / (std + 1e-6))])
    assert (own[:4] == 0).all()


def test_gigpo_golden():
    """Two rollouts of two steps; both began in state 0, then went apart. Returns .9 and 0 there: ±.45; ω 2 on ±1."""
    episode, returns = jnp.asarray([1.0, 1, -1, -1]), jnp.asarray([0.9, 1, 0, 0])
    anchor, mask = jnp.asarray([0, 1, 0, 2]), jnp.ones(4, bool)
    found = gigpo(episode, returns, anchor, mask, 2.0, False)
    np.testing.assert_allclose(found, [1.9, 1, -1.9, -1])
    found = gigpo(episode, returns, anchor, mask, 2.0, True)  # over the sample std .45·√2
    np.testing.assert_allclose(found, [1 + np.sqrt(2), 1, -1 - np.sqrt(2), -1], atol=1e-5)
    np.testing.assert_allclose(found[0], 1 + 2 * 0.45 / (0.45 * np.sqrt(2) + 1e-6), rtol=1e-12)


def test_task_normalisation_golden():
    """Task 0 has advantages 1 2 3 (mean 2, sample std 1), task 1 has 10 and 14 (mean 12, std √8), task 2 one."""
    own = run("task_normalize", np.array([1.0, 10, 2, 3, 14, 5]), [0, 1, 0, 0, 1, 2], tasks=3)
    np.testing.assert_allclose(own, [-1, -2 / np.sqrt(8), 0, 1, 2 / np.sqrt(8), 0], atol=2e-6)


def test_043_whitening_golden():
    """1 2 3: mean 2, population std √(2/3). A masked 99 would give -.601 -.577 -.553."""
    mask = jnp.asarray([1, 1, 1, 0], bool)
    wanted = [-1.224745, 0, 1.224745, 0]
    np.testing.assert_allclose(whiten(jnp.asarray([1.0, 2, 3, 99]), mask), wanted, atol=5e-7)
    leaky = whiten(jnp.asarray([1.0, 2, 3, 99]), jnp.ones(4, bool))
    np.testing.assert_allclose(leaky[:3], [-0.601, -0.577, -0.553], atol=5e-4)


def test_041_an_invalid_reward_leaves_the_group():
    """1, invalid, 0, 1: mean 2/3, population std √(2/9)."""
    for invalid in (np.nan, np.inf, -np.inf):
        rewards = jnp.asarray([1, invalid, 0, 1])
        own = compiled["grpo"](rewards, jnp.isfinite(rewards), ddof=0)
        np.testing.assert_allclose(own, [0.707107, 0, -1.414214, 0.707107], atol=5e-6)


# ---- nothing to compare ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPARE)
@pytest.mark.parametrize(("reward", "count"), [(0.7, 7), (0.1, 7), (0.3, 6), (1 / 3, 7), (0.0, 4), (-2e9, 3)])
def test_038_equal_rewards_give_exactly_zero(reward, count, name):
    for dtype in (np.float32, np.float64):
        assert (COMPARE[name](np.full(count, reward, dtype)) == 0).all()
    almost = reward + np.arange(count) * 1e-10 * abs(reward)
    assert (COMPARE[name](almost) == 0).all()
    sums = np.asarray([np.float32(reward) * 3, np.float32(reward) + np.float32(reward) + np.float32(reward)], np.float32)
    assert (COMPARE[name](sums) == 0).all()  # the same return, added up in another order


@pytest.mark.parametrize("name", COMPARE)
def test_037_a_group_of_one_gives_zero(name):
    assert COMPARE[name](np.array([0.7])).tolist() == [0.0]
    assert COMPARE[name](np.zeros(0)).tolist() == []
    assert COMPARE[name](np.array([0.7, 0.6])).all()


# ---- slow definitions and identities ---------------------------------------------------------------------------------------

groups = st.lists(finite, min_size=2, max_size=SIZE).filter(lambda xs: np.ptp(xs) > 1e-3)


@given(groups)
@settings(max_examples=50, deadline=None)
def test_each_is_its_definition(rewards):
    rewards = np.array(rewards)
    others = [np.mean(np.delete(rewards, i)) for i in range(len(rewards))]
    mean = np.mean(rewards)
    for name, wanted in {
        "grpo": (rewards - mean) / (np.std(rewards, ddof=1) + 1e-6),
        "grpo, population": (rewards - mean) / (np.std(rewards) + 1e-6),
        "dr_grpo": rewards - mean,
        "rloo": rewards - others,
        "whiten": (rewards - mean) / (np.std(rewards) + 1e-8),
        "erpo": (rewards - mean) / (np.std(rewards, ddof=1) + 1e-6),  # with one question ERPO is GRPO
        "task_normalize": (rewards - mean) / (np.std(rewards, ddof=1) + 1e-6),
    }.items():
        np.testing.assert_allclose(COMPARE[name](rewards), wanted, atol=1e-9, err_msg=name)


@given(groups, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_a_permutation_changes_nothing_and_advantages_sum_to_zero(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    for name, method in COMPARE.items():
        own = method(np.array(rewards))
        assert abs(own.sum()) < 1e-6, name
        np.testing.assert_allclose(method(np.array(rewards)[order]), own[order], atol=1e-9, err_msg=name)


@given(st.lists(st.tuples(finite, finite, st.integers(0, 3)), min_size=2, max_size=SIZE))
@settings(max_examples=50, deadline=None)
def test_gigpo_is_its_definition(steps):
    episode, returns, anchor = map(np.array, zip(*steps, strict=True))
    padding = SIZE - len(steps)
    xs = (jnp.asarray(np.append(x, np.full(padding, np.nan))) for x in (episode, returns))
    anchors = jnp.asarray(np.append(anchor, np.zeros(padding, int)))
    own = compiled["gigpo"](*xs, anchors, jnp.arange(SIZE) < len(steps), weight=0.5, std=False)
    wanted = []
    for i in range(len(steps)):
        same = returns[anchor == anchor[i]]
        wanted.append(episode[i] + 0.5 * (returns[i] - same.mean() if np.ptp(same) > 1e-7 else 0))
    np.testing.assert_allclose(own[: len(steps)], wanted, atol=1e-6)
    assert (own[len(steps) :] == 0).all()


def test_043_what_stands_outside_of_the_mask_changes_no_bit():
    """Anywhere, not at the end alone."""
    rng = np.random.default_rng(0)
    mask = jnp.asarray([1, 0, 1, 1, 0, 1, 1, 0, 1, 1], bool)
    rewards, of = rng.normal(size=SIZE), jnp.asarray(rng.integers(0, 2, SIZE))
    calls = {
        "grpo": lambda x, of: compiled["grpo"](x, mask, ddof=1),
        "dr_grpo": lambda x, of: compiled["dr_grpo"](x, mask),
        "rloo": lambda x, of: compiled["rloo"](x, mask),
        "whiten": lambda x, of: compiled["whiten"](x, mask),
        "erpo": lambda x, of: compiled["erpo"](x, of, of // 2, mask, ddof=1),
        "gigpo": lambda x, of: compiled["gigpo"](x, x, of, mask, weight=1.0, std=True),
        "task_normalize": lambda x, of: compiled["task_normalize"](x, of, mask, tasks=2),
    }
    for name, call in calls.items():
        wanted = np.asarray(call(jnp.asarray(rewards), of)).tobytes()
        for poison in (1e6, np.nan):
            sick = jnp.asarray(np.where(mask, rewards, poison))
            assert np.asarray(call(sick, jnp.where(mask, of, 1 - of))).tobytes() == wanted, name
