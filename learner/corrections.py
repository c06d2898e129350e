"""Off-policy corrections: weights of tokens that another policy sampled than the one that the loss's ratio is taken against.

`log_weights[t] = log(π_old / μ)`: the proximal policy, as it was when the update began, over the behaviour policy, whose
logprobs were recorded. A weight multiplies the token's loss and has no gradient. The current policy has no part in it: that is
the loss's own ratio, and the product of both is the whole (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).

Pure, of one rollout, for `jit` and `vmap`; 0 outside of `mask`, which is never read. Denominators stay those of the mask: tokens
of weight 0 shrink the gradient.

Dimension key: T tokens of a rollout, of all turns and segments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from learner.losses import LOG_RATIO_BOUND
from learner.shapes import shaped


@shaped
def importance(log_weights: Float[Array, " T"], mask: Bool[Array, " T"]) -> Float[Array, " T"]:
    """`w = π_old/μ`, unbounded: decoupled PPO as published (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    Turns: each token by itself.
    """
    return _exp(log_weights, mask)


@shaped
def truncated(log_weights: Float[Array, " T"], mask: Bool[Array, " T"], low: float, high: float) -> Float[Array, " T"]:
    """`clip(w, low, high)` (token-level TIS; slime, verl; low is 0 there, high 2 to 5).

    Turns: each token by itself.
    """
    return jnp.where(mask, jnp.clip(_exp(log_weights, mask), low, high), 0)


@shaped
def truncated_sequence(log_weights: Float[Array, " T"], mask: Bool[Array, " T"], low: float, high: float) -> Float[Array, " T"]:
    """`clip(Π w, low, high)`, the same for all tokens (sequence-level TIS; verl; high 2 to 10).

    Turns: the product is over the policy's tokens of all turns, and of no other token.
    """
    total = jnp.full_like(log_weights, jnp.sum(jnp.where(mask, log_weights, 0)))
    return jnp.where(mask, jnp.clip(_exp(total, mask), low, high), 0)


@shaped
def masked(log_weights: Float[Array, " T"], mask: Bool[Array, " T"], low: float, high: float) -> Float[Array, " T"]:
    """`w if low ≤ w ≤ high else 0` (masked importance sampling; IcePop's band is 1/β to β, GLM-5's β 2, arXiv 2602.15763).

    Turns: each token by itself.
    """
    weights = _exp(log_weights, mask)
    return jnp.where((weights >= low) & (weights <= high), weights, 0)


@shaped
def rejected(log_weights: Float[Array, " T"], mask: Bool[Array, " T"], low: float, high: float) -> Float[Array, " T"]:
    """`1 if low ≤ w ≤ high else 0`: a token is taken as it is or not at all (token-level rejection, as verl's).

    verl's "token_k1" has its bounds on 1/w: its `low_high` is 1/high, 1/low here.

    Turns: each token by itself.
    """
    weights = _exp(log_weights, mask)
    return jnp.where(mask & (weights >= low) & (weights <= high), 1.0, 0.0).astype(log_weights.dtype)


@shaped
def rejected_sequence(log_weights: Float[Array, " T"], mask: Bool[Array, " T"], low: float, high: float) -> Float[Array, " T"]:
    """`1 if low ≤ (Π w)^(1/n) ≤ high else 0`: the rollout or nothing, by its geometric mean (verl's geometric rejection).

    verl's "seq_mean_k1" has its bounds on the inverse, as "token_k1".

    Turns: the mean is over the policy's tokens of all turns.
    """
    count = jnp.maximum(mask.sum(), 1)
    mean = jnp.full_like(log_weights, jnp.sum(jnp.where(mask, log_weights, 0)) / count)
    return rejected(mean, mask, low, high)


def _exp(log_weights: jax.Array, mask: jax.Array) -> jax.Array:
    """`exp`, 0 outside of the mask, finite and without a gradient."""
    bounded = jnp.clip(jax.lax.stop_gradient(log_weights), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.where(mask, jnp.exp(jnp.where(mask, bounded, 0)), 0)
