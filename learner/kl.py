"""Estimators of KL(π, reference) from the tokens that π sampled (J. Schulman, "Approximating KL divergence").

An estimator has two uses that must not be mixed up, since what is right in value can be wrong in gradient:

| | value | gradient, as a loss, on-policy |
|---|---|---|
| k1 = log π − log ref | unbiased, may be negative | 0 on average: it regularises nothing |
| k2 = ½·k1² | biased, never negative | that of KL(π, reference) |
| k3 = ref/π − 1 + k1 | unbiased, never negative | that of KL(reference, π), the other direction |

So a loss names both: `penalty` has the value of one and the gradient of another. In the reward a value alone counts: `r − β·k1`
at the policy's own tokens, whose policy gradient is right.

Of any shape. `log_ratios = log(π/reference)`, held within ±20 by `losses.log_ratio`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from learner.shapes import shaped


@shaped
def k1(log_ratios: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`log(π/reference)`."""
    return log_ratios


@shaped
def k2(log_ratios: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`½·log²(π/reference)`."""
    return 0.5 * jnp.square(log_ratios)


@shaped
def k3(log_ratios: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`reference/π − 1 − log(reference/π)`."""
    return jnp.expm1(-log_ratios) + log_ratios


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@shaped
def penalty(log_ratios: Float[Array, " *N"], value: str, gradient: str) -> Float[Array, " *N"]:
    """A loss with the value of one estimator and the gradient of another."""
    slope = ESTIMATORS[gradient](log_ratios)
    return jax.lax.stop_gradient(ESTIMATORS[value](log_ratios) - slope) + slope
