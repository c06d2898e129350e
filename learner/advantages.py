"""Advantages by comparison: of the rollouts of a group, of the steps in one state, of all tokens of a task. Pure, for `jit` and
`vmap`.

`mask` says which entries take part. The others get 0 and are never read: padding, and rollouts without a valid reward. The
precision is that of the arrays.

Equal rewards give exactly 0, where the plain formulas divide rounding noise by rounding noise; so does an entry with nothing to
compare with.

Dimension key: G rollouts of a group, N rollouts of a batch, S steps, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from learner.shapes import shaped

EQUAL = 1e-8  # rewards that differ by no more than this share of their size, or by four units of their last place, are equal
EPSILON = 1e-6  # added to standard deviations: GRPO's


@shaped
def grpo(rewards: Float[Array, " G"], mask: Bool[Array, " G"], ddof: int) -> Float[Array, " G"]:
    """`(R − mean) / (std + 1e-6)` (GRPO, arXiv 2402.03300 eq. 2). `ddof` 1 is the code of verl, AgentRL and RAGEN, 0 population.

    Turns: one reward per rollout, the sum over its turns, and one advantage for all of its tokens.
    """
    own = _statistics(rewards, jnp.zeros(len(mask), int), mask, ddof, 1)
    return jnp.where(own.compared, own.centred / (own.std + EPSILON), 0)


@shaped
def dr_grpo(rewards: Float[Array, " G"], mask: Bool[Array, " G"]) -> Float[Array, " G"]:
    """`R − mean` (Dr. GRPO, arXiv 2503.20783). Its loss has a constant divisor: aggregation "constant".

    Turns: as GRPO's.
    """
    own = _statistics(rewards, jnp.zeros(len(mask), int), mask, 0, 1)
    return jnp.where(own.compared, own.centred, 0)


@shaped
def rloo(rewards: Float[Array, " G"], mask: Bool[Array, " G"]) -> Float[Array, " G"]:
    """`R − mean of the others = n/(n − 1)·(R − mean)` (RLOO, arXiv 2402.14740).

    Turns: as GRPO's.
    """
    own = _statistics(rewards, jnp.zeros(len(mask), int), mask, 0, 1)
    return jnp.where(own.compared, own.centred * own.count / jnp.maximum(own.count - 1, 1), 0)


@shaped
def erpo(
    rewards: Float[Array, " N"], question: Int[Array, " N"], environment: Int[Array, " N"], mask: Bool[Array, " N"], ddof: int
) -> Float[Array, " N"]:
    """`(R − mean of its question) / (std of its environment + 1e-6)` (ERPO, AutoForge, arXiv 2512.22857 eq. 2).

    `question` and `environment` number them from 0, below N. Rollouts with an error of the simulated user are masked out by the
    caller: they leave the loss and the statistics. Neither ddof nor ε is printed in what was read of the paper: 1e-6 is GRPO's.

    Turns: as GRPO's.
    """
    own = _statistics(rewards, question, mask, ddof, len(mask))
    wide = _statistics(rewards, environment, mask, ddof, len(mask))
    return jnp.where(own.compared, own.centred / (wide.std + EPSILON), 0)


@shaped
def gigpo(
    episode: Float[Array, " S"],
    returns: Float[Array, " S"],
    anchor: Int[Array, " S"],
    mask: Bool[Array, " S"],
    weight: float,
    std: bool,
) -> Float[Array, " S"]:
    """`A_episode + ω·(R − mean) [/ (std + 1e-6)]` over the steps that began in the same state (GiGPO, arXiv 2505.10978 eq. 7, 8).

    `episode` is the advantage of the step's rollout in its group, `returns` the discounted return from the step on, `anchor`
    numbers states from 0, below S: equal iff the steps are of one group and one state. A state that was seen once adds 0. `std`
    False is the authors' "mean_norm". Confirmed in copies of their code: both terms and their sum, ω 1, γ 0.95, unbiased std; it
    takes an episode's statistics over steps by default, so that long rollouts count more, where here each rollout counts once.
    The paper itself was not read.

    Turns: one advantage for all tokens of a turn. States are the environment's `state_key`.
    """
    own = _statistics(returns, anchor, mask, 1, len(mask))
    steps = jnp.where(own.compared, own.centred / (own.std + EPSILON if std else 1.0), 0)
    return jnp.where(mask, episode, 0) + weight * steps


@shaped
def task_normalize(
    advantages: Float[Array, " T"], task: Int[Array, " T"], mask: Bool[Array, " T"], tasks: int, ddof: int = 1
) -> Float[Array, " T"]:
    """`(A − mean) / (std + 1e-6)` over all tokens of a kind of task in the batch (AgentRL, arXiv 2510.04206 eq. 1).

    `task` numbers the kinds from 0, below `tasks`. It comes after the normalisation in groups, and weighs tokens: a long rollout
    counts more, and a small advantage may change its sign.

    Turns: over the policy's tokens of all turns.
    """
    own = _statistics(advantages, task, mask, ddof, tasks)
    return jnp.where(own.compared, own.centred / (own.std + EPSILON), 0)


@shaped
def whiten(advantages: Float[Array, " T"], mask: Bool[Array, " T"]) -> Float[Array, " T"]:
    """`(A − mean) / (std + 1e-8)`, population std, over the tokens of the mask.

    In place of masked_whiten of verl and tunix, which take the unbiased variance and have 1e-8 within the root.

    Turns: over the policy's tokens of all turns.
    """
    own = _statistics(advantages, jnp.zeros(len(mask), int), mask, 0, 1)
    return jnp.where(own.compared, own.centred / (own.std + 1e-8), 0)


class _Statistics(NamedTuple):
    """Of the set that each entry belongs to, at the entry."""

    centred: jax.Array  # the entry less the mean; 0 outside of the mask
    std: jax.Array
    count: jax.Array
    compared: jax.Array  # bool: in the mask, and the set has two entries that differ


def _statistics(x: jax.Array, of: jax.Array, mask: jax.Array, ddof: int, sets: int) -> _Statistics:
    """`of` numbers the set of each entry, 0 to `sets` - 1. One entry has std 0, not 0/0."""
    x = jnp.where(mask, x, 0)

    def total(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, of, sets)[of]

    count = total(mask.astype(x.dtype))
    highest = jax.ops.segment_max(jnp.where(mask, x, -jnp.inf), of, sets)[of]
    lowest = jax.ops.segment_min(jnp.where(mask, x, jnp.inf), of, sets)[of]
    scale = jnp.maximum(jnp.abs(highest), jnp.abs(lowest))
    # One entry does not differ from itself, and where there is none the highest is below the lowest.
    differ = highest - lowest > max(EQUAL, 4 * float(jnp.finfo(x.dtype).eps)) * scale
    centred = jnp.where(mask, x - total(x) / jnp.maximum(count, 1), 0)
    std = jnp.sqrt(total(jnp.square(centred)) / jnp.maximum(count - ddof, 1))
    return _Statistics(centred, std, count, mask & differ)
