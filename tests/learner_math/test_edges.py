"""Pure functions at their borders: what a bound takes in, what has no gradient, how near two rewards may be to be equal."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner import kl
from learner.advantages import dr_grpo, erpo, gigpo, grpo, rloo, task_normalize, whiten
from learner.corrections import importance, masked, rejected, rejected_sequence, truncated, truncated_sequence
from learner.losses import (
    cispo,
    double_sided,
    dual_clip,
    log_ratio,
    ppo_clip,
    reinforce,
    sequence_log_ratio,
    token_logprobs,
    value_loss,
)
from learner.temporal import bilevel_gae, gae, step_gae

pytestmark = pytest.mark.usefixtures("x64")


# ---- equal rewards ---------------------------------------------------------------------------------------------------------


def compared(name):
    """An advantage as a function of one group's rewards."""

    def zeros(x):
        return jnp.zeros(len(x), int)

    def full(x):
        return jnp.ones(len(x), bool)

    return {
        "grpo": lambda x: grpo(x, full(x), 1),
        "dr_grpo": lambda x: dr_grpo(x, full(x)),
        "rloo": lambda x: rloo(x, full(x)),
        "erpo": lambda x: erpo(x, zeros(x), zeros(x), full(x), 1),
        "gigpo": lambda x: gigpo(jnp.zeros_like(x), x, zeros(x), full(x), 1.0, True),
        "whiten": lambda x: whiten(x, full(x)),
        "task_normalize": lambda x: task_normalize(x, zeros(x), full(x), 1),
    }[name]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "erpo", "gigpo", "whiten", "task_normalize"])
@pytest.mark.parametrize("reward", [0.1, 1.0, -0.7, 1023.5])
def test_038_rewards_within_four_units_of_the_last_place_are_equal(name, reward):
    """In float32, where a sum in another order is one or two off: 1 and its next number would else be ±.7 after GRPO's division,
    or ±1. Nine units are a difference."""
    x = np.float32(reward)
    near = [x]
    for _ in range(9):
        near.append(np.nextafter(near[-1], np.float32(np.inf)))
    for steps in (1, 2, 3, 4):
        for pair in ([x, near[steps]], [near[steps], x, x]):
            assert not np.asarray(compared(name)(jnp.asarray(pair))).any()
    assert np.asarray(compared(name)(jnp.asarray([x, near[9]]))).all()


# ---- what has no gradient --------------------------------------------------------------------------------------------------

LOGPROBS, OLD = jnp.log(jnp.array([0.3, 0.5, 0.2])), jnp.log(jnp.array([0.29, 0.4, 0.31]))
GAINS = jnp.array([1.0, -2.0, 0.5])


def losses_of(name, logprobs, old, gains):
    logs = log_ratio(logprobs, old)
    if name == "gspo":
        logs = sequence_log_ratio(logprobs, logs, jnp.zeros(3, int), jnp.ones(3, bool))
    ratios = jnp.exp(logs)
    match name:
        case "reinforce":
            return reinforce(logprobs, gains)
        case "cispo" | "double_sided":
            return {"cispo": cispo, "double_sided": double_sided}[name](logprobs, ratios, gains, 0.2, 0.3)
        case "dual_clip":
            return dual_clip(ppo_clip(ratios, gains, 0.2, 0.3), gains, 1.1)
        case _:
            return ppo_clip(ratios, gains, 0.2, 0.3)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "double_sided", "reinforce", "dual_clip"])
def test_054_neither_advantages_nor_the_old_policy_are_trained(name):
    """Whatever comes from a network that is trained (a critic's advantages, scores of the same parameters) is data here."""
    for argument in (1, 2):
        xs = [LOGPROBS, OLD, GAINS]

        def total(x, xs=xs, argument=argument):
            return losses_of(name, *xs[:argument], x, *xs[argument + 1 :]).sum()

        assert jax.grad(total)(xs[argument]).tolist() == [0, 0, 0]
    assert np.asarray(jax.grad(lambda x: losses_of(name, x, OLD, GAINS).sum())(LOGPROBS)).any()


def test_058_neither_returns_nor_old_values_are_trained():
    values, old, returns = jnp.array([0.9, 0.4]), jnp.array([0.5, 0.5]), jnp.array([0.0, 1.0])
    slopes = jax.grad(lambda *x: value_loss(*x, 0.2).sum(), (0, 1, 2))(values, old, returns)
    np.testing.assert_allclose(slopes[0], [0.9, -0.6])
    assert [x.tolist() for x in slopes[1:]] == [[0, 0], [0, 0]]


def test_gspo_moves_each_token_by_itself():
    """Two tokens, log-ratios .1 and .3: the loss of the first, exp(.2), has its slope at the first token alone; the plain mean
    would give each token half of it. (Summed over a sequence with one advantage, the two are the same.)"""
    own, mask, of = OLD + jnp.array([0.1, 0.3, 9.0]), jnp.array([True, True, False]), jnp.array([2, 2, 0])

    def ratios(x):
        return jnp.exp(sequence_log_ratio(x, log_ratio(x, OLD), of, mask))

    slopes = jax.jacobian(ratios)(own)
    np.testing.assert_allclose(slopes, np.diag([np.exp(0.2), np.exp(0.2), 0]), rtol=1e-12)
    uneven = jax.grad(lambda x: ppo_clip(ratios(x), GAINS, 1.0, 9.0).sum())(own)
    np.testing.assert_allclose(uneven, [-np.exp(0.2), 2 * np.exp(0.2), 0], rtol=1e-12)


def test_gspo_holds_its_ratio_below_exp_10_and_has_no_slope_beyond():
    own = OLD + 15.0

    def logs(x):
        return sequence_log_ratio(x, log_ratio(x, OLD), jnp.zeros(3, int), jnp.ones(3, bool))

    assert logs(own).tolist() == [10, 10, 10]
    assert jax.grad(lambda x: logs(x).sum())(own).tolist() == [0, 0, 0]
    np.testing.assert_allclose(logs(OLD - 15.0), [-15] * 3)  # there is no bound below


# ---- what a bound takes in -------------------------------------------------------------------------------------------------

ONES = jnp.ones(3, bool)


def test_a_correction_keeps_weights_at_its_bounds():
    """exp(0) is 1, exactly."""
    one = jnp.zeros(3)
    for method in (masked, rejected, rejected_sequence):
        for low, high in ((1.0, 1.0), (1.0, 2.0), (0.5, 1.0)):
            assert method(one, ONES, low, high).tolist() == [1, 1, 1], method
        for low, high in ((1.0 + 1e-9, 2.0), (0.5, 1.0 - 1e-9)):
            assert method(one, ONES, low, high).tolist() == [0, 0, 0], method


@pytest.mark.parametrize("method", [truncated, truncated_sequence, masked, rejected, rejected_sequence])
def test_a_correction_without_a_lower_bound_leaves_other_tokens_at_0(method):
    """Outside of the mask the weight is 0, and 0 is within bounds that begin there."""
    mask = jnp.array([True, False, True])
    assert method(jnp.zeros(3), mask, 0.0, 2.0).tolist() == [1, 0, 1]
    assert method(jnp.full(3, jnp.nan), jnp.zeros(3, bool), 0.0, 2.0).tolist() == [0, 0, 0]


def test_the_mean_of_a_rejected_sequence_is_over_its_own_tokens():
    """Weights 4 and 1, and a token of somebody else: the geometric mean is 2 (over all three places it would be 1.587)."""
    logs, mask = jnp.log(jnp.array([4.0, 1.0, 1.0])), jnp.array([True, True, False])
    assert rejected_sequence(logs, mask, 1.9, 2.1).tolist() == [1, 1, 0]
    assert rejected_sequence(logs, mask, 1.5, 1.7).tolist() == [0, 0, 0]


METHODS = {
    "importance": importance,
    **{f.__name__: partial(f, low=0.0, high=1e30) for f in (truncated, truncated_sequence, masked)},
    **{f.__name__: partial(f, low=0.0, high=1e30) for f in (rejected, rejected_sequence)},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_is_finite_and_of_the_precision_of_its_logs(name):
    """A policy that moved far away: e^20, not infinity."""
    for dtype in (jnp.float32, jnp.float64):
        found = METHODS[name](jnp.asarray([1000.0, -1000.0, 0.0], dtype), ONES)
        assert found.dtype == dtype
        assert np.isfinite(found).all()
    assert float(importance(jnp.asarray([1000.0]), jnp.ones(1, bool))[0]) == pytest.approx(np.exp(20), rel=1e-12)


def test_double_sided_masking_leaves_its_bounds_out():
    """1 - .5 < ρ < 1 + .5, with numbers that binary fractions hold exactly."""
    ratios = jnp.array([0.5, 0.75, 1.25, 1.5])
    slopes = jax.grad(lambda x: double_sided(x, ratios, jnp.ones(4), 0.5, 0.5).sum())(jnp.zeros(4))
    assert slopes.tolist() == [0, -0.75, -1.25, 0]


# ---- turns that do not end -------------------------------------------------------------------------------------------------


def test_tokens_after_the_last_turn_end_go_on_at_the_bootstrap():
    """A turn that a limit cut off: GAE with γ .9 and λ .95 from the value behind it, .7: .9·.7 - .2 = .43; the turn before ends
    for itself, with the bootstrap as the next turn end's value: 1 + .8·.7 - .3 = 1.26, whose target is 1.56."""
    rewards, values = jnp.array([0, 1.0, 0, 0]), jnp.array([0.5, 0.3, 0.1, 0.2])
    ends, mask, after = jnp.array([False, True, False, False]), jnp.ones(4, bool), jnp.asarray(0.7)
    found, returns = bilevel_gae(rewards, values, ends, mask, after, (0.9, 0.8), 0.95)
    cut, _ = gae(jnp.zeros(2), values[2:], jnp.ones(2, bool), after, 0.9, 0.95)
    first = 0.9 * 0.3 - 0.5 + 0.9 * 0.95 * 1.26
    np.testing.assert_allclose(found, [first, 1.26, *cut], rtol=1e-12)
    np.testing.assert_allclose(found[3], 0.9 * 0.7 - 0.2)
    np.testing.assert_allclose(returns, found + values)
    whole, _ = step_gae(rewards, values, jnp.array([True, False, False, False]), mask, after, 0.9, 0.95)
    np.testing.assert_allclose(whole, [1 + 0.9 * 0.7 - 0.5] * 4)  # one turn of four tokens, paid 1


# ---- temperatures ----------------------------------------------------------------------------------------------------------


def test_059_the_first_ratio_is_1_at_the_temperature_that_sampled_and_at_no_other():
    """Logits 2 1 0. Taken at 1 what was sampled at .5: exp(2.142932 - 1.407606) = 2.086161 for token 1, .767456 for token 0."""
    hidden, ids, mask = (
        jnp.tile(jnp.array([2.0, 1, 0], jnp.float32), (1, 3, 1)),
        jnp.array([[2, 1, 0]]),
        jnp.array([[False, True, True]]),
    )

    def logprobs(heat):
        return token_logprobs(lambda x: x, hidden, ids, mask, jnp.full((1, 3), heat, jnp.float32), 2)[0][0]

    for heat in (0.5, 0.7, 1.0):
        assert jnp.exp(log_ratio(logprobs(heat), logprobs(heat))).tolist() == [1, 1, 1]
    wrong = jnp.exp(log_ratio(logprobs(1.0), logprobs(0.5)))
    np.testing.assert_allclose(wrong, [1, 2.086161, 0.767456], atol=1e-6)


def test_062_the_logprob_is_of_the_sampled_token_and_not_of_the_likeliest():
    """Probabilities .9 and .1 of ids 3 and 5; 5 was sampled."""
    logits = jnp.full((1, 2, 8), -1e9, jnp.float32).at[0, 0, 3].set(jnp.log(0.9)).at[0, 0, 5].set(jnp.log(0.1))
    heat = jnp.ones((1, 2), jnp.float32)
    for sampled, chance in ((5, 0.1), (3, 0.9)):
        found, _ = token_logprobs(lambda x: x, logits, jnp.array([[0, sampled]]), jnp.array([[False, True]]), heat, 2)
        assert float(found[0, 1]) == pytest.approx(np.log(chance), rel=1e-6)


def test_052_k2_and_k3_are_never_negative_and_k1_may_be():
    logs = jnp.linspace(-20, 20, 401)
    for name, estimate in kl.ESTIMATORS.items():
        assert bool((estimate(logs) >= 0).all()) == (name != "k1"), name
        assert float(estimate(jnp.zeros(1))[0]) == 0
