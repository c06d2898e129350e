"""AdamW on float32 masters, one optimizer step at a time, and the cases in which a step is not taken.

Three numbers are called "step" elsewhere and are one each here: `TrainState.step` counts policy updates' optimizer
steps and is the only argument of the learning-rate schedule; Adam's own `count` corrects the bias of its moments;
steps that are skipped count in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from common.config import OptimizerConfig

Params = Any  # a pytree of float32 arrays


class TrainState(NamedTuple):
    """All that an optimizer step changes."""

    params: Params
    adam: optax.ScaleByAdamState
    step: jax.Array  # int32


class StepReport(NamedTuple):
    """What one optimizer step did; scalars."""

    taken: jax.Array  # bool
    finite: jax.Array  # bool: so was the gradient
    lr: jax.Array
    grad_norm: jax.Array  # before clipping
    update_norm: jax.Array  # of the change of the parameters


Apply = Callable[[TrainState, Params, Any], tuple[TrainState, StepReport]]


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate as a function of the optimizer step: linear warm-up from 0, then constant or a cosine to 0."""
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.lr, config.decay_steps - config.warmup)
    else:
        after = optax.constant_schedule(config.lr)
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, config.warmup), after], [config.warmup])


def initial(config: OptimizerConfig, params: Params) -> TrainState:
    return TrainState(params, _adam(config).init(params), jnp.zeros((), jnp.int32))  # type: ignore[arg-type]


def make_apply(config: OptimizerConfig) -> Apply:
    """`apply(state, gradient, fixed_lr) -> (state, report)`, to be jitted with the state donated.

    A `fixed_lr` of 0 or more is used as it is and leaves `step` alone (the supervised warm start); below 0 the schedule
    rules.

    A gradient that is not finite, or is exactly zero, is no step: parameters, moments and counts stay as they are, bit
    for bit. (On a zero gradient Adam would go on along its momentum, and weight decay would pull.)
    """
    adam, rate = _adam(config), schedule(config)

    def apply(state: TrainState, gradient: Params, fixed_lr: jax.Array) -> tuple[TrainState, StepReport]:
        norm = optax.global_norm(gradient)
        taken = jnp.isfinite(norm) & (norm > 0)
        scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-12)) if config.clip_norm else 1.0
        direction, moments = adam.update(jax.tree.map(lambda g: g * scale, gradient), state.adam)
        lr = jnp.where(fixed_lr < 0, rate(state.step), fixed_lr)
        change = jax.tree.map(lambda d, p: -lr * (d + _decay(config, p) * p), direction, state.params)
        new = TrainState(
            params=jax.tree.map(jnp.add, state.params, change),
            adam=moments,  # type: ignore[arg-type]
            step=state.step + (fixed_lr < 0).astype(jnp.int32),
        )
        kept = jax.tree.map(lambda old, moved: jnp.where(taken, moved, old), state, new)
        moved = jnp.where(taken, optax.global_norm(change), 0.0)
        return kept, StepReport(taken, jnp.isfinite(norm), lr, norm, moved)

    return apply


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2)


def _decay(config: OptimizerConfig, parameter: jax.Array) -> float:
    """Weight decay is for matrices; norms and the value head's vector have none."""
    return config.weight_decay if parameter.ndim > 1 else 0.0
