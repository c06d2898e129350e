"""Advantages against hand-computed numbers, slow definitions and identities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import gae, grpo, place_rewards, whiten

finite = st.floats(-3, 3, allow_nan=False, width=32)


def slow_gae(rewards, values, bootstrap, gamma, lam):
    """The definition, O(A²): Â_a = Σ_k (γλ)^k δ_{a+k}."""
    following = [*values[1:], bootstrap]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return np.array([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[a:])) for a in range(len(deltas))])


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=12), finite, st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_gae_is_its_definition(tokens, bootstrap, gamma, lam):
    rewards, values = map(list, zip(*tokens, strict=True))
    advantages, returns = gae(np.array(rewards), np.array(values), bootstrap, gamma, lam)
    np.testing.assert_allclose(advantages, slow_gae(rewards, values, bootstrap, gamma, lam), atol=1e-9)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-12)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=12), finite, st.floats(0, 1))
@settings(deadline=None)
def test_gae_with_lambda_1_is_return_minus_value(tokens, bootstrap, gamma):
    rewards, values = (np.array(x) for x in zip(*tokens, strict=True))
    advantages, returns = gae(rewards, values, bootstrap, gamma, 1.0)
    discounted = [sum(gamma**k * r for k, r in enumerate([*rewards[a:], bootstrap])) for a in range(len(rewards))]
    np.testing.assert_allclose(returns, discounted, atol=1e-9)
    np.testing.assert_allclose(advantages, np.array(discounted) - values, atol=1e-9)


def test_gae_with_lambda_0_is_the_one_step_error():
    advantages, _ = gae(np.array([0.0, 1.0]), np.array([0.3, 0.5]), 0.0, 0.9, 0.0)
    np.testing.assert_allclose(advantages, [0.9 * 0.5 - 0.3, 1.0 - 0.5])


def test_gae_on_compact_tokens_golden():
    """γ .9, λ .95, values .5 .4 .3 .2, reward 1 at the end. δ: -.14 -.13 -.12 .8."""
    advantages, _ = gae(np.array([0, 0, 0, 1.0]), np.array([0.5, 0.4, 0.3, 0.2]), 0.0, 0.9, 0.95)
    np.testing.assert_allclose(advantages, [0.161148, 0.352220, 0.564000, 0.800000], atol=5e-7)
    advantages, _ = gae(np.array([0, 0, 0, 1.0]), np.array([0.5, 0.4, 0.3, 0.2]), 0.0, 1.0, 1.0)
    np.testing.assert_allclose(advantages, [0.5, 0.6, 0.7, 0.8])


def test_gae_of_nothing_is_nothing():
    advantages, returns = gae(np.zeros(0), np.zeros(0), 0.7, 1.0, 0.95)
    assert advantages.shape == returns.shape == (0,)


def test_034_truncated_and_finished_rollouts_golden():
    advantages, _ = gae(np.zeros(3), np.array([0.2, 0.3, 0.4]), 0.7, 1.0, 1.0)
    np.testing.assert_allclose(advantages, [0.5, 0.4, 0.3])
    advantages, _ = gae(np.array([0, 0, 0, 0, 1.0]), np.array([0.1, 0.2, 0.3, 0.4, 0.5]), 0.0, 1.0, 1.0)
    np.testing.assert_allclose(advantages, [0.9, 0.8, 0.7, 0.6, 0.5])


def test_grpo_golden():
    rewards = np.array([1.0, 0, 0, 1])
    half = 0.5 / (1 / np.sqrt(3) + 1e-6)  # mean .5, sample std sqrt(1/3)
    np.testing.assert_allclose(grpo(rewards, ddof=1), [half, -half, -half, half])
    np.testing.assert_allclose(grpo(rewards, ddof=1), [0.866024, -0.866024, -0.866024, 0.866024], atol=5e-7)
    np.testing.assert_allclose(grpo(rewards, ddof=0), [0.999998, -0.999998, -0.999998, 0.999998], atol=5e-7)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(("reward", "count"), [(0.7, 7), (0.1, 7), (0.3, 6), (1 / 3, 7), (0.0, 4), (-2e9, 3)])
def test_038_equal_rewards_give_exactly_zero(reward, count, ddof):
    for dtype in (np.float32, np.float64):
        assert (grpo(np.full(count, reward, dtype), ddof) == 0).all()
    almost = reward + np.arange(count) * 1e-10 * abs(reward)
    assert (grpo(almost, ddof) == 0).all()


@pytest.mark.parametrize("ddof", [0, 1])
def test_037_a_group_of_one_gives_zero(ddof):
    assert grpo(np.array([0.7]), ddof).tolist() == [0.0]
    assert grpo(np.zeros(0), ddof).tolist() == []


@given(st.lists(finite, min_size=2, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_grpo_sums_to_zero_and_follows_a_permutation(rewards, random):
    own = grpo(np.array(rewards), 1)
    assert abs(own.sum()) < 1e-6
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_allclose(grpo(np.array(rewards)[order], 1), own[order], atol=1e-6)


def test_032_rewards_stand_on_the_last_token_of_their_step():
    step_of = np.array([0, 0, 1, 3, 3, 3])
    assert place_rewards(np.array([0.5, 0.25, 0.0, 1.0]), step_of).tolist() == [0, 0.5, 0.25, 0, 0, 1.0]
    # the reward of a step without tokens stands on the last token before it, or the first of all
    assert place_rewards(np.array([0.0, 0.0, 2.0, 1.0]), step_of).tolist() == [0, 0, 2.0, 0, 0, 1.0]
    assert place_rewards(np.array([1.0, 0.0]), np.array([1, 1])).tolist() == [1.0, 0.0]
    assert place_rewards(np.array([1.0]), np.zeros(0, int)).tolist() == []


def test_043_whitening_golden():
    root = np.sqrt(1.5)  # [1, 2, 3]: mean 2, population std sqrt(2/3)
    np.testing.assert_allclose(whiten(np.array([1.0, 2, 3])), [-root, 0, root], atol=1e-6)
    assert whiten(np.full(3, 0.7)).tolist() == [0, 0, 0]
    assert whiten(np.zeros(0)).tolist() == []
