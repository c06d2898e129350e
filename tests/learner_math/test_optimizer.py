"""One optimizer step: AdamW, the schedule's only argument, and steps that are not taken."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from common.config import OptimizerConfig
from learner.optimizer import TrainState, initial, make_apply, schedule

SCHEDULED = jnp.float32(-1)


def leaves(state):
    return [np.array(x) for x in jax.tree.leaves(state)]


def test_091_the_rate_is_a_function_of_the_step_stored_once():
    """Warm-up 10 to 1e-3, cosine to 0 at 100. After 40 steps: ½(1 + cos(π·30/90)) = .75."""
    config = OptimizerConfig(lr=1e-3, schedule="cosine", warmup=10, decay_steps=100, clip_norm=0.0)
    apply = jax.jit(make_apply(config))
    state = initial(config, {"x": jnp.ones((2, 2))})
    gradient = {"x": jnp.ones((2, 2))}
    for _ in range(40):
        state, _ = apply(state, gradient, SCHEDULED)
    restored = jax.tree.unflatten(jax.tree.structure(state), leaves(state))
    _, other = apply(restored, {"x": jnp.full((2, 2), jnp.nan)}, SCHEDULED)  # a skipped step does not count
    assert not other.taken
    state, report = apply(restored, gradient, SCHEDULED)
    assert float(report.lr) == pytest.approx(7.5e-4, rel=1e-5)
    assert float(apply(state, gradient, SCHEDULED)[1].lr) == pytest.approx(7.347358e-4, rel=1e-5)
    assert int(state.step) == 41


def test_schedules_at_their_ends():
    rate = schedule(OptimizerConfig(lr=1e-3, warmup=4))
    assert [float(rate(s)) for s in (0, 2, 4, 1000)] == pytest.approx([0, 5e-4, 1e-3, 1e-3])
    assert float(schedule(OptimizerConfig(lr=1e-3))(0)) == pytest.approx(1e-3)
    rate = schedule(OptimizerConfig(lr=1e-3, schedule="cosine", decay_steps=10))
    assert [float(rate(s)) for s in (0, 5, 10, 99)] == pytest.approx([1e-3, 5e-4, 0, 0], abs=1e-9)


def test_supervised_steps_have_their_own_rate_and_leave_the_schedule_alone():
    config = OptimizerConfig(lr=1e-3, warmup=10)
    apply, gradient = jax.jit(make_apply(config)), {"x": jnp.ones(2)}
    state = initial(config, {"x": jnp.ones(2)})
    for _ in range(3):
        state, report = apply(state, gradient, jnp.float32(0.5))
        assert (float(report.lr), int(state.step)) == (0.5, 0)
    for count in range(3):  # the schedule begins at its beginning, the moments do not
        state, report = apply(state, gradient, SCHEDULED)
        assert float(report.lr) == pytest.approx(1e-4 * count)
    assert (int(state.step), int(state.adam.count)) == (3, 6)


def test_a_step_is_optax_adamw_with_clipping():
    config = OptimizerConfig(lr=1e-2, b1=0.8, b2=0.9, weight_decay=0.1, clip_norm=0.5)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "norm": jnp.asarray(rng.normal(size=2), jnp.float32)}
    reference = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, 0.8, 0.9, weight_decay=0.1, mask={"w": True, "norm": False})
    )
    expected, moments = params, reference.init(params)
    state = initial(config, params)
    apply = jax.jit(make_apply(config))
    for _ in range(5):
        gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        before = state.params
        state, report = apply(state, gradient, SCHEDULED)
        change, moments = reference.update(gradient, moments, expected)
        expected = optax.apply_updates(expected, change)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)
        assert float(report.grad_norm) == pytest.approx(float(optax.global_norm(gradient)), rel=1e-5)
        moved = optax.global_norm(jax.tree.map(jnp.subtract, state.params, before))
        assert float(report.update_norm) == pytest.approx(float(moved), rel=1e-3)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_051_093_no_signal_and_sick_gradients_change_no_bit(value):
    """m .1, v .01, 5 steps taken, lr .01: with gradient 0 plain Adam would move by -.00148672; here t stays 5."""
    config = OptimizerConfig(lr=0.01, b1=0.9, b2=0.999, weight_decay=0.1)
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(3)}
    tree = jax.tree.map
    adam = optax.ScaleByAdamState(jnp.int32(5), tree(lambda x: x * 0.1, params), tree(lambda x: x * 0.01, params))
    state = TrainState(params, adam, jnp.int32(5))  # type: ignore[arg-type]
    gradient = {"a": jnp.zeros((2, 2)).at[0, 1].set(value), "b": jnp.zeros(3)}
    after, report = jax.jit(make_apply(config))(state, gradient, SCHEDULED)
    assert not report.taken
    assert bool(report.finite) == np.isfinite(value)
    assert report.update_norm == 0
    for old, new in zip(leaves(state), leaves(after), strict=True):
        assert old.tobytes() == new.tobytes()


def test_095_masters_keep_updates_that_bfloat16_would_swallow():
    """100 updates of 1e-4: the master arrives at .99, its bfloat16 copy at .98828125; bfloat16 alone would stay at 1."""
    config = OptimizerConfig(lr=1e-4, b1=0.0, b2=0.0, clip_norm=0.0)
    apply, state = jax.jit(make_apply(config)), initial(config, {"x": jnp.ones(4)})
    alone = jnp.ones(4, jnp.bfloat16)
    for _ in range(100):
        state, _ = apply(state, {"x": jnp.ones(4)}, SCHEDULED)
        alone = alone - jnp.bfloat16(1e-4)
    np.testing.assert_allclose(state.params["x"], 0.99, atol=1e-5)
    assert (state.params["x"].astype(jnp.bfloat16) == 0.98828125).all()
    assert (alone == 1).all()
