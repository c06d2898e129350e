"""What Polyturn answers: learner's own functions on the batches that peers get. Shapes as in tools/math_peers/batches.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.config_algorithm import AlgorithmConfig, KlConfig
from learner import advantages, corrections, kl, losses, objective, temporal
from learner.pack import Aggregation, Example, Microbatch, token_weights
from tools.math_peers import batches as b
from tools.math_peers.batches import Batch

Arrays = tuple[np.ndarray, np.ndarray]


@jax.jit
def _gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, bootstrap: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(partial(temporal.gae, gamma=b.GAMMA, lam=b.LAMBDA))(rewards, values, mask, bootstrap)


def gae(batch: Batch, mask: np.ndarray | None = None, bootstrap: np.ndarray | None = None) -> Arrays:
    """Advantages and returns [B, T]."""
    mask = batch.mask if mask is None else mask
    found = _gae(batch.rewards, batch.values, mask, batch.bootstrap if bootstrap is None else bootstrap)  # pyright: ignore[reportArgumentType]
    return np.asarray(found[0]), np.asarray(found[1])


@jax.jit
def _returns(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.vmap(partial(temporal.discounted_returns, gamma=b.GAMMA))(rewards, mask)


def returns(batch: Batch, mask: np.ndarray | None = None) -> np.ndarray:
    """[B, T]."""
    return np.asarray(_returns(batch.rewards, batch.mask if mask is None else mask))  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnames="lam")
def _vtrace(*arrays: jax.Array, lam: float) -> tuple[jax.Array, jax.Array]:
    def one(rewards: jax.Array, values: jax.Array, logs: jax.Array, mask: jax.Array, bootstrap: jax.Array) -> Any:
        return temporal.vtrace(rewards, values, logs, mask, bootstrap, b.GAMMA, temporal.Bounds(lam=lam))

    return jax.vmap(one)(*arrays)


def vtrace(
    batch: Batch,
    mask: np.ndarray | None = None,
    lam: float = b.LAMBDA,
    rewards: np.ndarray | None = None,
    log_weights: np.ndarray | None = None,
) -> Arrays:
    """Advantages and targets [B, T]; what is not given is the batch's."""
    rewards = batch.rewards if rewards is None else rewards
    log_weights = batch.log_weights if log_weights is None else log_weights
    mask = batch.mask if mask is None else mask
    found = _vtrace(rewards, batch.values, log_weights, mask, batch.bootstrap, lam=lam)  # pyright: ignore[reportArgumentType]
    return np.asarray(found[0]), np.asarray(found[1])


def vtrace_errors(batch: Batch, mask: np.ndarray | None = None, rewards: np.ndarray | None = None) -> np.ndarray:
    """[B, T]: targets less values, 0 outside of the mask."""
    mask = batch.mask if mask is None else mask
    return np.where(mask, vtrace(batch, mask, rewards=rewards)[1] - batch.values, 0)


def following(x: np.ndarray, batch: Batch) -> np.ndarray:
    """[B, T]: of each of the policy's tokens, x at the policy's next one; the bootstrap value at the last."""
    out = np.zeros_like(x)
    for row, mask in enumerate(batch.mask):
        at = np.flatnonzero(mask)
        out[row, at] = np.append(x[row, at[1:]], batch.bootstrap[row])
    return out


@partial(jax.jit, static_argnames=("function", "more"))
def _grouped(rows: jax.Array, function: Callable[..., jax.Array], more: tuple[tuple[str, Any], ...]) -> jax.Array:
    return jax.vmap(partial(function, **dict(more)))(rows, jnp.ones(rows.shape, bool))


def grouped(function: Callable[..., jax.Array], scores: np.ndarray, **more: Any) -> np.ndarray:
    """[B] advantages by comparison in each group."""
    rows = scores.reshape(b.GROUPS, b.MEMBERS)
    return np.asarray(_grouped(rows, function=function, more=tuple(more.items()))).ravel()  # pyright: ignore[reportArgumentType]


def spread(batch: Batch, rows: np.ndarray) -> np.ndarray:
    """[B, T]: a rollout's advantage at each of its tokens."""
    return np.where(batch.mask, rows[:, None], 0)


_whiten = jax.jit(advantages.whiten)


def whiten(batch: Batch, x: np.ndarray) -> np.ndarray:
    """[B, T]."""
    return np.asarray(_whiten(jnp.asarray(x.ravel()), jnp.asarray(batch.mask.ravel()))).reshape(x.shape)


@partial(jax.jit, static_argnames=("value", "gradient"))
def _penalty(logprobs: jax.Array, reference: jax.Array, value: str, gradient: str) -> tuple[jax.Array, jax.Array]:
    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = kl.penalty(losses.log_ratio(x, reference), value, gradient)
        return found.sum(), found

    slope, found = jax.grad(total, has_aux=True)(logprobs)
    return found, slope


def penalty(batch: Batch, value: str, gradient: str) -> Arrays:
    """Of KL(policy, reference) at each token, and its gradient by the policy's logprobs: [B, T] each."""
    found = _penalty(jnp.asarray(batch.logprobs), jnp.asarray(batch.reference), value, gradient)
    return np.where(batch.mask, found[0], 0), np.where(batch.mask, found[1], 0)


@partial(jax.jit, static_argnames=("name", "bounds"))
def _correction(logs: jax.Array, mask: jax.Array, name: str, bounds: tuple[float, ...]) -> jax.Array:
    return jax.vmap(lambda x, live: getattr(corrections, name)(x, live, *bounds))(logs, mask)


def correction(batch: Batch, name: str, *bounds: float) -> np.ndarray:
    """[B, T] weights."""
    return np.asarray(_correction(batch.log_weights, batch.mask, name, bounds))  # pyright: ignore[reportArgumentType]


def logprobs(batch: Batch) -> Arrays:
    """Of the policy's tokens, and the entropies there: [B, T] float32 each."""
    return _token_logprobs(batch.logits, batch)


def ratios(batch: Batch) -> np.ndarray:
    """[B, T] float32: of the policy to that of `old_logits`."""
    both = [jnp.asarray(_token_logprobs(logits, batch)[0]) for logits in (batch.logits, batch.old_logits)]
    return np.asarray(jnp.exp(losses.log_ratio(both[0], both[1])))


@jax.jit
def _plain_logprobs(logits: jax.Array, ids: jax.Array, mask: jax.Array, heat: jax.Array) -> tuple[jax.Array, jax.Array]:
    return losses.token_logprobs(lambda x: x, logits, ids, mask, heat)


def _token_logprobs(logits: np.ndarray, batch: Batch) -> Arrays:
    found = _plain_logprobs(logits, batch.ids, batch.mask, np.ones(batch.ids.shape, np.float32))  # pyright: ignore[reportArgumentType]
    return np.float32(found[0]), np.float32(found[1])  # pyright: ignore[reportReturnType]


def exact_kl(batch: Batch, name: str) -> np.ndarray:
    """[N] float32: an estimator of KL(policy, policy of old_logits), averaged over all tokens instead of those sampled."""
    both = [np.roll(x, 1, axis=1) for x in (batch.logits, batch.old_logits)]
    policy, old = (jax.nn.log_softmax(jnp.asarray(batch.picked(x))) for x in both)
    return np.float32((jnp.exp(policy) * kl.ESTIMATORS[name](losses.log_ratio(policy, old))).sum(-1))  # pyright: ignore[reportReturnType]


@jax.jit
def _clip(ratios: jax.Array, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda x: losses.ppo_clip(x, advantage, b.CLIP_LOW, b.CLIP_LOW).mean())(ratios)


@jax.jit
def _reinforce(logits: jax.Array, ids: jax.Array, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(logits: jax.Array) -> jax.Array:
        hidden = jnp.concatenate([logits, logits[-1:]])[None]  # those at t-1 predict token t
        row = jnp.concatenate([ids[:1], ids])[None]
        found, _ = _plain_logprobs(hidden, row, jnp.arange(row.size)[None] > 0, jnp.ones(row.shape, jnp.float32))
        return losses.reinforce(found[0, 1:], advantage).mean()

    return jax.value_and_grad(loss)(logits)


def clipped(batch: Batch) -> Arrays:
    """PPO's loss, a mean over picked tokens, and its gradient [N] by their ratios."""
    ratios = np.exp(batch.picked(batch.logprobs - batch.old_logprobs))
    value, gradient = _clip(ratios, batch.picked(batch.advantages))  # pyright: ignore[reportArgumentType]
    return np.asarray(value), np.asarray(gradient)


def reinforced(batch: Batch) -> Arrays:
    """REINFORCE's loss, a mean over picked tokens, and its gradient [N, V] by their logits; float32."""
    logits = batch.picked(np.roll(batch.logits, 1, axis=1))
    value, gradient = _reinforce(logits, batch.picked(batch.ids), batch.picked(batch.advantages))  # pyright: ignore[reportArgumentType]
    return np.float32(value), np.float32(gradient)  # pyright: ignore[reportReturnType]


def weights(batch: Batch, aggregation: str, divisor: float = 0.0) -> np.ndarray:
    """[B, T]: of token losses, a row being a rollout."""
    names = ("behaviour", "old_logprobs", "reference", "advantages", "returns", "old_values")
    zeros = dict.fromkeys(names, np.zeros(b.LENGTH, np.float32))
    more = {"versions": np.zeros(b.LENGTH, np.int64), "observed": np.zeros(b.LENGTH, bool), "answers": 0, "temperature": 1.0}
    examples = [Example(str(row), batch.ids[row], mask, **zeros, **more) for row, mask in enumerate(batch.mask)]
    of_row = token_weights(examples, Aggregation(aggregation, divisor))  # pyright: ignore[reportArgumentType]
    return spread(batch, np.asarray(of_row))


def aggregated(batch: Batch, aggregation: str, divisor: float = 0.0) -> np.ndarray:
    """[]: of the batch's losses of single tokens."""
    return (weights(batch, aggregation, divisor) * batch.losses).sum()


@partial(jax.jit, static_argnames="name")
@partial(jax.value_and_grad, argnums=0)
def _policy_loss(logs: jax.Array, x: dict, name: str) -> jax.Array:
    own = losses.log_ratio(logs, x["old_logprobs"])
    if name == "gspo":
        sequence = jax.vmap(losses.sequence_log_ratio)(logs, own, x["segments"], x["mask"])
        found = losses.ppo_clip(jnp.exp(sequence), x["advantages"], b.GSPO_LOW, b.GSPO_HIGH)
    elif name == "cispo":
        found = losses.cispo(logs, jnp.exp(own), x["advantages"], b.CLIP_LOW, b.CLIP_HIGH)
    else:
        found = losses.ppo_clip(jnp.exp(own), x["advantages"], b.CLIP_LOW, b.CLIP_HIGH)
        found = losses.dual_clip(found, x["advantages"], b.DUAL_CLIP)
    return jnp.sum(jnp.where(x["mask"], found, 0)) / x["mask"].sum()


def policy_loss(batch: Batch, name: str, **other: np.ndarray) -> Arrays:
    """Token mean of "ppo" with dual clip, "gspo" or "cispo"; and its gradient [B, T] with respect to the logprobs."""
    names = ("old_logprobs", "segments", "mask", "advantages")
    x = {key: jnp.asarray(other.get(key, getattr(batch, key))) for key in names}
    value, gradient = _policy_loss(jnp.asarray(batch.logprobs), x, name)
    return np.asarray(value), np.asarray(gradient)


@jax.jit
def _value_loss(new: jax.Array, old: jax.Array, target: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda x: jnp.sum(weight * losses.value_loss(x, old, target, b.VALUE_CLIP)))(new)


def value_loss(batch: Batch) -> Arrays:
    """Token mean, and its gradient [B, T] with respect to the new values."""
    value, gradient = _value_loss(batch.new_values, batch.values, batch.returns, weights(batch, "token_mean"))  # pyright: ignore[reportArgumentType]
    return np.asarray(value), np.asarray(gradient)


def square(batch: Batch) -> np.ndarray:
    """[N]: the unclipped value loss of picked tokens."""
    new, old, target = (jnp.asarray(batch.picked(x)) for x in (batch.new_values, batch.values, batch.returns))
    return np.asarray(losses.value_loss(new, old, target, 0.0))


class Given:
    """A network whose logits are its parameters."""

    critic = "none"

    def logprobs(self, params: jax.Array, batch: Microbatch, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return *losses.token_logprobs(lambda x: x, params, batch.ids, wanted, batch.temperature), params


@cache
def _objective(settings: tuple[tuple[str, Any], ...]) -> Callable:
    keys = {"clip_low": b.CLIP_LOW, "clip_high": b.CLIP_HIGH, **dict(settings)}
    if estimator := keys.pop("kl", None):  # peers have value and gradient of one
        keys["kl"] = KlConfig(where="loss", coefficient=b.KL, value=estimator, gradient=estimator)
    algorithm = AlgorithmConfig.model_validate(keys)
    loss = objective.policy(Given(), algorithm)  # pyright: ignore[reportArgumentType]
    return jax.jit(jax.value_and_grad(lambda logits, batch: loss(logits, batch)[0]))


def update_loss(batch: Batch, per_token: bool, aggregation: str = "token_mean", divisor: float = 0.0, **settings: Any) -> Arrays:
    """The loss of learner/objective.py as an update computes it, and its gradient [B, T, V] with respect to the logits.

    `per_token` says which advantages: of tokens, or one per rollout. `settings` are keys of `[algorithm]`, and `segments` others
    than the batch's; `kl` is an estimator.
    """
    segments = settings.pop("segments", batch.segments)
    floats = {name: np.float32(getattr(batch, name)) for name in ("old_logprobs", "reference", "returns")}
    zeros = np.zeros(batch.ids.shape, np.float32)
    given = Microbatch(
        ids=batch.ids, positions=np.zeros_like(batch.ids), segment_ids=segments + 1,
        domain=np.zeros_like(batch.ids), mask=batch.mask,
        observed=np.zeros_like(batch.mask), **floats,
        advantages=np.float32(batch.advantages if per_token else spread(batch, batch.row_advantages)),
        old_values=zeros, temperature=zeros + 1, weights=np.float32(weights(batch, aggregation, divisor)),
        value_weights=zeros, observed_weights=zeros,
    )  # fmt: skip
    more = {"aggregation": aggregation, "constant_divisor": divisor} if divisor else {"aggregation": aggregation}
    value, gradient = _objective(tuple((more | settings).items()))(batch.logits, given)
    return np.float32(value), np.float32(gradient)  # pyright: ignore[reportReturnType]
