"""Credit over time: returns, GAE and its relatives, V-trace. Pure functions of one rollout, for `jit` and `vmap`.

Each runs right to left over the tokens of `mask`, the policy's own. All others pass the state of the recursion on as it is: they
have no reward, no value and no decay, so an answer of the environment of any length changes nothing, and neither does padding.
What stands there is never read: not even NaN changes a bit. A reward must stand on a token of the mask, or it is lost.

`values[t]` values the state before token t; `bootstrap` values the one after the last token of the mask: 0 where the task ended.
The precision is that of the arrays.

Dimension key: T tokens of a rollout, in the order in which the policy sampled them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from learner.shapes import shaped


@shaped
def discounted_returns(rewards: Float[Array, " T"], mask: Bool[Array, " T"], gamma: float) -> Float[Array, " T"]:
    """`Rₜ = rₜ + γ·Rₜ₊₁`: what REINFORCE++ whitens over the batch (arXiv 2501.03262).

    Turns: the return runs through the environment's answers. (verl's reset it at each of them until August 2026, so that an
    outcome reached the last turn only.)
    """

    def step(running: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array]:
        running = reward + gamma * running
        return running, running

    return _backwards(step, jnp.zeros((), rewards.dtype), mask, rewards)


@shaped
def gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    mask: Bool[Array, " T"],
    bootstrap: Float[Array, ""],
    gamma: float,
    lam: float,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Advantages `δₜ = rₜ + γ·vₜ₊₁ − vₜ,  Âₜ = δₜ + γλ·Âₜ₊₁` and returns `Â + v` (GAE, arXiv 1506.02438 eq. 16).

    Turns: t + 1 is the policy's next token, wherever it stands: the last token of a turn bootstraps from the value in which the
    next turn begins, and nothing decays in between.
    """

    def step(state: tuple, reward: jax.Array, value: jax.Array) -> tuple[tuple, tuple]:
        following, running = state
        running = reward + gamma * following - value + gamma * lam * running
        return (value, running), (running, running + value)

    return _backwards(step, (bootstrap, jnp.zeros_like(bootstrap)), mask, rewards, values)


@shaped
def bilevel_gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    ends: Bool[Array, " T"],
    mask: Bool[Array, " T"],
    bootstrap: Float[Array, ""],
    gammas: tuple[float, float],
    lam: float,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """GAE over turns, then over the tokens of each turn (Bi-level GAE, VAGEN, arXiv 2510.16907).

    `gammas` are γ, of tokens, and γ_turn. High level, over the turn ends e: `δₖ = Rₖ + γ_turn·v(eₖ₊₁) − v(eₖ),  Âₖ = δₖ +
    γ_turn·λ·Âₖ₊₁`. Low level, in each turn: GAE with γ and λ whose only reward is `Âₖ + v(eₖ)`, at eₖ, with nothing after it. λ
    is the same on both.

    Turns: `ends` marks the last token of each; a turn's reward is the sum of its tokens' (a KL may be in all of them). (RAGEN
    takes ends to be where the reward is not 0: turns that are paid nothing vanish.) Tokens after the last end make a turn that
    goes on at `bootstrap`, in which each token has its own reward.
    """
    gamma, gamma_turn = gammas
    ends = mask & ends
    turn = jnp.cumsum(ends) - ends  # how many ended before the token
    earned = jax.ops.segment_sum(jnp.where(mask, rewards, 0), turn, len(mask))[turn]
    _, targets = gae(earned, values, ends, bootstrap, gamma_turn, lam)
    paid = jnp.where(ends, targets, jnp.where(turn == ends.sum(), rewards, 0))

    def step(state: tuple, end: jax.Array, value: jax.Array, reward: jax.Array) -> tuple[tuple, tuple]:
        following, running = (jnp.where(end, 0, x) for x in state)
        running = reward + gamma * following - value + gamma * lam * running
        return (value, running), (running, running + value)

    return _backwards(step, (bootstrap, jnp.zeros_like(bootstrap)), mask, ends, values, paid)


@shaped
def step_gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    starts: Bool[Array, " T"],
    mask: Bool[Array, " T"],
    bootstrap: Float[Array, ""],
    gamma: float,
    lam: float,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """GAE with turns as actions: `Âₖ = Rₖ + γ·v(sₖ₊₁) − v(sₖ) + γλ·Âₖ₊₁`, each token has its turn's (Agent-R1's code).

    Turns: `starts` marks the first token sₖ of each, whose value is the turn's; Rₖ is the sum of the rewards in it; γ and λ count
    turns. Agent-R1 whitens over turns afterwards, and gives every token of a turn its return `Âₖ + v(sₖ)`, as is done here.
    """
    first = mask & starts

    def total(running: jax.Array, start: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array]:
        running = running + reward
        return jnp.where(start, 0, running), running

    earned = _backwards(total, jnp.zeros((), rewards.dtype), mask, starts, rewards)
    found = gae(earned, values, first, bootstrap, gamma, lam)
    turn = jax.lax.cummax(jnp.where(first, jnp.arange(len(mask)), 0))  # where the turn of each token starts
    advantages, returns = (jnp.where(mask, x[turn], 0) for x in found)
    return advantages, returns


class Bounds(NamedTuple):
    """Of V-trace's ratios, 1 each in IMPALA, and its λ."""

    rho: float = 1.0  # ρ̄: which policy's values are learnt
    c: float = 1.0  # c̄: how fast
    policy: float = 1.0  # ρ̄ of the policy gradient
    lam: float = 1.0


@shaped
def vtrace(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    log_ratios: Float[Array, " T"],
    mask: Bool[Array, " T"],
    bootstrap: Float[Array, ""],
    gamma: float,
    bounds: Bounds = Bounds(),
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Off-policy advantages for the policy gradient, and the targets of the critic (V-trace, IMPALA, arXiv 1802.01561 eq. 1).

    With ratios ρₜ = exp(log_ratios) of the policy to what sampled the token:
    `targetₜ = vₜ + min(ρ̄, ρₜ)·(rₜ + γ·vₜ₊₁ − vₜ) + γλ·min(c̄, ρₜ)·(targetₜ₊₁ − vₜ₊₁)` and
    `Âₜ = min(ρ̄_policy, ρₜ)·(rₜ + γ·targetₜ₊₁ − vₜ)`. The advantage is weighted already: no further correction belongs to it.

    Turns: as in `gae`, t + 1 is the policy's next token. (rlax's has a mask, and still takes the value of the neighbouring
    entry; with λ below 1 its advantages take λ·target + (1 − λ)·v there.)
    """

    def step(state: tuple, reward: jax.Array, value: jax.Array, log_ratio: jax.Array) -> tuple[tuple, tuple]:
        following, target = state
        ratio = jnp.exp(log_ratio)
        advantage = jnp.minimum(bounds.policy, ratio) * (reward + gamma * target - value)
        error = jnp.minimum(bounds.rho, ratio) * (reward + gamma * following - value)
        target = value + error + gamma * bounds.lam * jnp.minimum(bounds.c, ratio) * (target - following)
        return (value, target), (advantage, target)

    return _backwards(step, (bootstrap, bootstrap), mask, rewards, values, log_ratios)


def _backwards(step: Callable, state: Any, mask: jax.Array, *xs: jax.Array) -> Any:
    """`step(state, *x) -> (state, out)` right to left where `mask` is set; elsewhere the state stays and out is 0."""

    def masked(state: Any, entry: tuple) -> tuple[Any, Any]:
        live, *x = entry
        moved, out = step(state, *x)
        kept = jax.tree.map(lambda new, old: jnp.where(live, new, old), moved, state)
        return kept, jax.tree.map(lambda value: jnp.where(live, value, 0), out)

    return jax.lax.scan(masked, state, (mask, *xs), reverse=True)[1]
