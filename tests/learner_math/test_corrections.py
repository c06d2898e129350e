"""Off-policy corrections and KL estimators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner import kl
from learner.corrections import importance, masked, rejected, rejected_sequence, truncated, truncated_sequence
from learner.losses import log_ratio, ppo_clip

pytestmark = pytest.mark.usefixtures("x64")

RATIOS = np.array([0.4, 0.8, 1.0, 1.5, 3.0])
ALL = np.ones(5, bool)


def test_weights_golden():
    """π_old/μ of five tokens, whose product is 1.44 and geometric mean 1.0757."""
    logs = jnp.asarray(np.log(RATIOS))
    for found, wanted in (
        (importance(logs, jnp.asarray(ALL)), [0.4, 0.8, 1.0, 1.5, 3.0]),
        (truncated(logs, jnp.asarray(ALL), 0.5, 2.0), [0.5, 0.8, 1.0, 1.5, 2.0]),
        (truncated_sequence(logs, jnp.asarray(ALL), 0.0, 2.0), [1.44] * 5),
        (truncated_sequence(logs, jnp.asarray(ALL), 0.0, 1.2), [1.2] * 5),
        (masked(logs, jnp.asarray(ALL), 0.5, 2.0), [0, 0.8, 1.0, 1.5, 0]),
        (rejected(logs, jnp.asarray(ALL), 0.5, 2.0), [0, 1, 1, 1, 0]),
        (rejected_sequence(logs, jnp.asarray(ALL), 0.9, 1.1), [1] * 5),
        (rejected_sequence(logs, jnp.asarray(ALL), 0.999, 1.001), [0] * 5),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_054_the_weight_is_of_the_old_policy_and_has_no_gradient():
    """Recorded -1.5, old -1.0, current -.7: min(e^.5, 2) = 1.648721; of the current policy it would be min(e^.8, 2) = 2."""
    one = jnp.ones(1, bool)
    found = truncated(jnp.asarray([-1.0 + 1.5]), one, 0.0, 2.0)
    np.testing.assert_allclose(found, [1.648721], atol=5e-7)
    wrong = truncated(jnp.asarray([-0.7 + 1.5]), one, 0.0, 2.0)
    np.testing.assert_allclose(wrong, [2.0])
    for method in (truncated, truncated_sequence, masked, rejected, rejected_sequence):
        gradient = jax.grad(lambda x, method=method: method(x, one, 0.0, 2.0).sum())(jnp.asarray([0.5]))
        assert gradient.tolist() == [0]
    assert jax.grad(lambda x: importance(x, one).sum())(jnp.asarray([0.5])).tolist() == [0]


def test_decoupled_ppo():
    """`−min(r·A, clip(r)·A)·w` with r = π/π_old, w = π_old/μ; where π_old is μ, it is PPO; without a clip, π/μ in all."""
    rng = np.random.default_rng(0)
    current, old, behaviour = (jnp.asarray(rng.normal(size=5) * 0.1 - 1) for _ in range(3))
    gains = jnp.asarray(rng.normal(size=5))

    def decoupled(old, low, high):
        weights = importance(old - behaviour, jnp.asarray(ALL))
        return weights * ppo_clip(jnp.exp(log_ratio(current, old)), gains, low, high)

    def plain(low, high):
        return ppo_clip(jnp.exp(log_ratio(current, behaviour)), gains, low, high)

    np.testing.assert_array_equal(decoupled(behaviour, 0.05, 0.05), plain(0.05, 0.05))
    np.testing.assert_allclose(decoupled(old, 1.0, 1e9), plain(1.0, 1e9), rtol=1e-12)
    r, w = np.exp(current - old), np.exp(old - behaviour)
    wanted = -np.minimum(r * gains, np.clip(r, 0.95, 1.05) * gains) * w
    np.testing.assert_allclose(decoupled(old, 0.05, 0.05), wanted, rtol=1e-12)
    # a weight multiplies a loss as it multiplies the advantage
    np.testing.assert_allclose(ppo_clip(jnp.asarray(r), jnp.asarray(w) * gains, 0.05, 0.05), wanted, rtol=1e-12)


@pytest.mark.parametrize("poison", [1e6, np.nan])
def test_043_056_what_stands_outside_of_the_mask_changes_no_bit(poison):
    """A sentinel of 1 against 0 would be a ratio of e^-1 = .367879; it is no token and weighs 0."""
    mask = jnp.asarray([1, 0, 1, 1, 0], bool)
    assert float(importance(jnp.asarray([0.0 - 1.0]), jnp.zeros(1, bool))[0]) == 0
    logs = jnp.asarray(np.log(RATIOS))
    sick = jnp.where(mask, logs, poison)
    for method in (truncated, truncated_sequence, masked, rejected, rejected_sequence):
        own, other = (np.asarray(method(x, mask, 0.5, 2.0)) for x in (logs, sick))
        assert own.tobytes() == other.tobytes()
        assert (own[~np.asarray(mask)] == 0).all()
    assert np.asarray(importance(logs, mask)).tobytes() == np.asarray(importance(sick, mask)).tobytes()
    np.testing.assert_allclose(truncated_sequence(logs, mask, 0.0, 9.0)[0], 0.4 * 1.0 * 1.5)


def test_a_band_holds_its_bounds_and_a_weight_is_finite():
    """A weight of 1 is in [1, 9] and in [.1, 1]; log-weights end at ±20."""
    zero, one = jnp.zeros(1), jnp.ones(1, bool)
    for method in (masked, rejected, rejected_sequence):
        assert [method(zero, one, 1.0, 9.0).tolist(), method(zero, one, 0.1, 1.0).tolist()] == [[1.0], [1.0]]
    np.testing.assert_allclose(importance(jnp.asarray([99.0, -99.0]), jnp.ones(2, bool)), np.exp([20.0, -20.0]))


def test_what_is_not_in_the_mask_is_not_counted():
    """One token of weight 4 of two: its geometric mean is 4, not 2."""
    logs, mask = jnp.log(jnp.asarray([4.0, 1.0])), jnp.asarray([1, 0], bool)
    assert rejected_sequence(logs, mask, 0.0, 3.0).tolist() == [0, 0]
    assert rejected_sequence(logs, mask, 0.0, 5.0).tolist() == [1, 0]
    assert rejected(logs, mask, 0.0, 5.0).tolist() == [1, 0]


# ---- KL --------------------------------------------------------------------------------------------------------------------

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.25, 0.5])
TRUE_SLOPE = [0.237568, -0.010707, -0.226861]  # of KL(p, q) by p's logits
OTHER_SLOPE = [0.25, 0.05, -0.30]  # of KL(q, p)


def slope(loss):
    """Expected on-policy gradient of a loss of log-ratios, by the logits of p: sum over tokens, p fixed as the sampler."""
    return jax.grad(lambda z: jnp.sum(P * loss(jax.nn.log_softmax(z) - jnp.log(Q))))(jnp.log(P))


def test_052_estimators_golden():
    logs = jnp.log(P / Q)
    for method, values, mean in (
        (kl.k1, [0.693147, 0.182322, -0.916291], 0.218012),
        (kl.k2, [0.240227, 0.016621, 0.419794], 0.209058),
        (kl.k3, [0.193147, 0.015655, 0.583709], 0.218012),
    ):
        np.testing.assert_allclose(method(logs), values, atol=1e-6)
        assert float((P * method(logs)).sum()) == pytest.approx(mean, abs=1e-6)


def test_052_what_is_right_in_value_can_be_wrong_in_gradient():
    np.testing.assert_allclose(slope(kl.k1), [0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(slope(kl.k2), TRUE_SLOPE, atol=5e-7)
    np.testing.assert_allclose(slope(kl.k3), OTHER_SLOPE, atol=1e-12)
    exact = jax.grad(lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - jnp.log(Q))))(jnp.log(P))
    np.testing.assert_allclose(exact, TRUE_SLOPE, atol=5e-7)


def test_052_a_penalty_has_the_value_of_one_and_the_gradient_of_another():
    logs = jnp.log(P / Q)
    for value, gradient in (("k3", "k2"), ("k1", "k2"), ("k1", "k3")):
        np.testing.assert_allclose(kl.penalty(logs, value, gradient), kl.ESTIMATORS[value](logs), rtol=1e-12)
        own = slope(lambda x, value=value, gradient=gradient: kl.penalty(x, value, gradient))
        np.testing.assert_allclose(own, slope(kl.ESTIMATORS[gradient]), atol=1e-12)


def test_052_in_the_reward_it_is_subtracted():
    """The policy gradient of r − k1 is minus the slope of KL(p, q): E[−k1·∇log p]."""
    own = jax.grad(lambda z: jnp.sum(P * -kl.k1(jnp.log(P / Q)) * jax.nn.log_softmax(z)))(jnp.log(P))
    np.testing.assert_allclose(own, -np.array(TRUE_SLOPE), atol=5e-7)
