"""Losses of single tokens, and the log-probabilities they are made of. Pure; arrays of any shape, one loss per entry.

Sums, weights and masks are the caller's: a loss here knows nothing of its neighbours. Every log-probability of the
policy is of softmax(logits / temperature), with the temperature that the token was sampled at; values never are.

Dimension key: B rows, T tokens of a row, D hidden, N tokens, V vocabulary; *N is any shape.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from learner.shapes import shaped

LOG_RATIO_BOUND = 20.0  # exp(20) is 4.9e8: far outside every clip, and still finite
SEQUENCE_LOG_RATIO_BOUND = 10.0  # of GSPO, as in verl
CHUNK = 512  # trained tokens whose logits exist at one time

Head = Callable[[jax.Array], jax.Array]  # hidden [N, D] -> logits [N, V], float32 as the temperature


@shaped
def before(x: Float[Array, " B T *D"]) -> Float[Array, " B T *D"]:
    """`x[:, t-1]` in place t, 0 in place 0: what was known before token t. The one shift of the repository."""
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


@shaped
def token_logprobs(
    head: Head,
    hidden: Float[Array, " B T D"],
    ids: Int[Array, " B T"],
    mask: Bool[Array, " B T"],
    temperature: Float[Array, " B T"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, " B T"], Float[Array, " B T"]]:
    """`log p(ids[t] | ids[<t])` and the entropy of that distribution where `mask` is set, 0 elsewhere.

    Logits are made for `chunk` masked tokens at a time and made again for the gradient. Chunks without a masked token
    are skipped at run time, so the cost follows the number of trained tokens while the compiled shape stays the same.
    The first token of a row has nothing before it and must not be masked in.
    """
    count = mask.size
    padded = -(-count // chunk) * chunk
    trained = jnp.nonzero(mask.reshape(-1), size=padded, fill_value=count)[0]  # ascending, then out of range

    def gather(x: jax.Array, fill: int) -> jax.Array:
        flat = x.reshape(count, *x.shape[2:])
        return flat.at[trained].get(mode="fill", fill_value=fill).reshape(-1, chunk, *x.shape[2:])

    @jax.checkpoint
    def evaluate(states: jax.Array, targets: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head(states) / temperature[:, None]
        total = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return picked - total, total - jnp.sum(jax.nn.softmax(logits) * logits, axis=-1)

    def skip(states: jax.Array, targets: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(temperature), jnp.zeros_like(temperature)

    def step(carry: None, xs: tuple) -> tuple[None, tuple[jax.Array, jax.Array]]:
        first, *arguments = xs
        return carry, jax.lax.cond(first < count, evaluate, skip, *arguments)

    chunks = (trained[::chunk], gather(before(hidden), 0), gather(ids, 0), gather(temperature, 1))
    _, found = jax.lax.scan(step, None, chunks)
    logprobs, entropies = (jnp.zeros(count).at[trained].set(x.reshape(-1), mode="drop").reshape(mask.shape) for x in found)
    return logprobs, entropies


@shaped
def log_ratio(logprobs: Float[Array, " *N"], old: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`log(π/π_old)` of each token, held within ±20; there is no gradient beyond, and none in the old policy, which is data."""
    return jnp.clip(logprobs - jax.lax.stop_gradient(old), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@shaped
def sequence_log_ratio(
    logprobs: Float[Array, " T"], log_ratios: Float[Array, " T"], sequences: Int[Array, " T"], mask: Bool[Array, " T"]
) -> Float[Array, " T"]:
    """`log s = sg[mean over the sequence of log(π/π_old)] + log π − sg[log π]`, held below 10 (GSPO-token, arXiv 2507.18071).

    GSPO's ratio at each token: its value is that of the token's sequence, its gradient that of the token's own logprob.
    `sequences` numbers the sequences of a row from 0, below T.

    Turns: a sequence is a segment, what was sampled in one context, in however many turns; a rollout whose context was rewritten
    has several.
    """
    kept = jnp.where(mask, log_ratios, 0)
    count = jax.ops.segment_sum(mask.astype(kept.dtype), sequences, len(mask))
    mean = jax.ops.segment_sum(kept, sequences, len(mask)) / jnp.maximum(count, 1)
    own = jnp.where(mask, logprobs, 0)
    value = jax.lax.stop_gradient(mean[sequences] - own) + own
    return jnp.where(mask, jnp.minimum(value, SEQUENCE_LOG_RATIO_BOUND), 0)


@shaped
def reinforce(logprobs: Float[Array, " *N"], advantages: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`−A·log π` (REINFORCE, Williams 1992).

    Turns: each token by itself.
    """
    return -jax.lax.stop_gradient(advantages) * logprobs


@shaped
def ppo_clip(
    ratios: Float[Array, " *N"], advantages: Float[Array, " *N"], clip_low: float, clip_high: float
) -> Float[Array, " *N"]:
    """`max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high))` (PPO, arXiv 1707.06347 eq. 7; bounds apart: DAPO, arXiv 2503.14476).

    Turns: each token by itself.
    """
    advantages = jax.lax.stop_gradient(advantages)
    return jnp.maximum(-advantages * ratios, -advantages * jnp.clip(ratios, 1 - clip_low, 1 + clip_high))


@shaped
def dual_clip(losses: Float[Array, " *N"], advantages: Float[Array, " *N"], bound: float) -> Float[Array, " *N"]:
    """`min(L, −A·c)` where A < 0: a ratio far above 1 cannot make the loss of a bad token huge (arXiv 1912.09729).

    Turns: each token by itself.
    """
    advantages = jax.lax.stop_gradient(advantages)
    return jnp.where(advantages < 0, jnp.minimum(losses, -advantages * bound), losses)


@shaped
def cispo(
    logprobs: Float[Array, " *N"],
    ratios: Float[Array, " *N"],
    advantages: Float[Array, " *N"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, " *N"]:
    """`−sg[clip(ρ, 1 − low, 1 + high)]·A·log π`: a clipped token keeps its gradient (MiniMax-M1, arXiv 2506.13585).

    Turns: each token by itself.
    """
    return reinforce(logprobs, advantages * jnp.clip(ratios, 1 - clip_low, 1 + clip_high))


@shaped
def double_sided(
    logprobs: Float[Array, " *N"],
    ratios: Float[Array, " *N"],
    advantages: Float[Array, " *N"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, " *N"]:
    """`−sg[ρ if 1 − low < ρ < 1 + high else 0]·A·log π`: tokens outside have no gradient, whatever the sign of A.

    GLM-5's asynchronous loss (arXiv 2602.15763), with ρ = π over what sampled the token. The bounds are not published.

    Turns: each token by itself.
    """
    inside = (ratios > 1 - clip_low) & (ratios < 1 + clip_high)
    return reinforce(logprobs, advantages * jnp.where(inside, ratios, 0))


@shaped
def value_loss(
    values: Float[Array, " *N"], old_values: Float[Array, " *N"], returns: Float[Array, " *N"], clip: float
) -> Float[Array, " *N"]:
    """`½·max((v − R)², (v_clipped − R)²)` with v held within `clip` of the old value; clip 0 is the plain square.

    Source: PPO's code (arXiv 1707.06347), verl. The old value is the critic's when the update began.

    Turns: the policy's tokens alone; values of other tokens are not trained.
    """
    returns, old_values = jax.lax.stop_gradient((returns, old_values))
    loss = jnp.square(values - returns)
    if clip > 0:
        near = old_values + jnp.clip(values - old_values, -clip, clip)
        loss = jnp.maximum(loss, jnp.square(near - returns))
    return 0.5 * loss


@shaped
def cross_entropy(logprobs: Float[Array, " *N"]) -> Float[Array, " *N"]:
    """`−log p`: supervised loss of tokens that somebody else wrote; of the environment's it is ECHO's (arXiv 2605.24517).

    Turns: ECHO's targets are the answers of all turns, without notices of the agent loop.
    """
    return -logprobs


@shaped
def clipped_mae(logprobs: Float[Array, " *N"], bound: float) -> Float[Array, " *N"]:
    """`1 − min(p, bound)`: a noise-tolerant loss of the environment's answers (PaW, arXiv 2606.02388, from summaries of it).

    Confirmed: it is an absolute error, not a cross-entropy, and a token whose probability passes the bound (0.2 there) is
    optimised no further. Not confirmed: the exact algebra. PaW's weight by the reward of the group is left out: its form is not
    published, and neither is how it ranks turns by entropy to leave the most certain ones out.

    Turns: as ECHO's.
    """
    return 1 - jnp.minimum(jnp.exp(logprobs), bound)
