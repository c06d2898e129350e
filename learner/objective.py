"""What one micro-batch contributes to an optimizer step: its gradient and its metrics, as pure functions of parameters.

Everything is a sum or a maximum over trained tokens, so contributions add up in any order and grouping. Entries outside
`mask` are replaced by zeros before anything reads them: whatever stood there, NaN included, changes no bit.

Dimension key: B rows, T tokens of a row, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import AlgorithmConfig, ModelConfig
from learner.losses import before, cross_entropy, log_ratio, ppo_clip, token_logprobs, value_loss
from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelSpec
from learner.optimizer import Params
from learner.pack import Microbatch


class Contribution(NamedTuple):
    """Of one micro-batch, or of several added up."""

    gradient: Params
    sums: dict[str, jax.Array]  # scalars; `loss`, `policy_loss` and `value_loss` are weighted, the others count tokens
    maxima: dict[str, jax.Array]  # scalars, at least 0


Objective = Callable[[Params, Microbatch], tuple[jax.Array, tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]]]


@dataclass(frozen=True, eq=False)
class Network:
    """The policy and its critic as functions of a parameter tree.

    `{"policy": trunk}` and, with a critic, `"value_head": {kernel [D], bias []}`; a separate critic has a trunk of its
    own under `"critic"`. Masters are float32; the trunk casts them to its compute dtype where it uses them.
    """

    graph: nnx.GraphDef
    spec: ModelSpec
    critic: Literal["none", "shared", "separate"]

    def initial(self, policy: nnx.State) -> Params:
        """Parameters around the weights of a policy. The critic starts as its copy and values everything 0."""
        head = {"kernel": jnp.zeros(self.spec.hidden_size), "bias": jnp.zeros(())}
        copy = jax.tree.map(lambda x: jnp.array(x, jnp.float32), policy)
        return {
            "none": {"policy": copy},
            "shared": {"policy": copy, "value_head": head},
            "separate": {"policy": copy, "value_head": head, "critic": jax.tree.map(jnp.copy, copy)},
        }[self.critic]

    def logprobs(self, params: Params, batch: Microbatch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logprob and entropy [B, T] at trained tokens, and the policy's hidden states [B, T, D]."""
        policy, hidden = self._trunk(params["policy"], batch)
        return *token_logprobs(policy.logits, hidden, batch.ids, batch.mask, batch.temperature), hidden

    def values(self, params: Params, batch: Microbatch, hidden: jax.Array) -> jax.Array:
        """[B, T] float32: the value of the state *after* each token. `hidden` is the policy's, for a shared critic."""
        if self.critic == "separate":
            _, hidden = self._trunk(params["critic"], batch)
        head = params["value_head"]
        return hidden.astype(jnp.float32) @ head["kernel"] + head["bias"]

    def _trunk(self, state: nnx.State, batch: Microbatch) -> tuple[Qwen3, jax.Array]:
        model = nnx.merge(self.graph, state)
        return model, model(batch.ids, batch.positions, batch.segment_ids)

    def score_values(self, params: Params, batch: Microbatch) -> tuple[jax.Array, jax.Array]:
        """The critic's [B, T] value of the state before each token, and of the state after it."""
        hidden = jnp.zeros(()) if self.critic == "separate" else self._trunk(params["policy"], batch)[1]
        after = self.values(params, batch, hidden)
        return before(after), after

    def score_logprobs(self, params: Params, batch: Microbatch) -> jax.Array:
        """[B, T] at trained tokens, 0 elsewhere."""
        return self.logprobs(params, batch)[0]


def build_network(model: ModelConfig, algorithm: AlgorithmConfig, spec: ModelSpec) -> Network:
    abstract = nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0), dtype=jnp.dtype(model.dtype), remat=model.remat))
    return Network(nnx.split(abstract)[0], spec, algorithm.critic)


@partial(jax.jit, static_argnums=0)
def canary(graph: nnx.GraphDef[Qwen3], params: nnx.State, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of ids [N], by a model and its parameters: their [N] logprobs (0 for the first), and [V] logits after the last."""
    model = nnx.merge(graph, params)
    row = jnp.arange(len(ids))[None]
    logits = model.logits(model(ids[None], row, jnp.ones_like(row))[0])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), ids[1:, None], axis=1)[:, 0]
    return jnp.concatenate([jnp.zeros(1), chosen]), logits[-1]


def random_policy(spec: ModelSpec, seed: int) -> nnx.State:
    """Fresh float32 weights."""
    return jax.jit(lambda: nnx.split(Qwen3(spec, rngs=nnx.Rngs(seed)))[1])()


def supervised(network: Network) -> Objective:
    """Cross-entropy of trained tokens."""

    def objective(params: Params, batch: Microbatch) -> Any:
        logprobs, entropies, _ = network.logprobs(params, batch)
        loss = jnp.sum(batch.weights * cross_entropy(logprobs))
        sums = {"loss": loss, "tokens": batch.mask.sum(dtype=jnp.float32), "entropy": entropies.sum()}
        return loss, (sums, {}, logprobs)

    return objective


def policy(network: Network, algorithm: AlgorithmConfig) -> Objective:
    """PPO's clipped loss, less the entropy bonus, plus the critic's loss if there is a critic.

    The ratio is taken against the logprobs recorded when the tokens were sampled: they are the behaviour policy.
    """

    def objective(params: Params, batch: Microbatch) -> Any:
        def kept(x: jax.Array) -> jax.Array:
            return jnp.where(batch.mask, x, 0.0)

        logprobs, entropies, hidden = network.logprobs(params, batch)
        advantages = kept(batch.advantages)
        logs = log_ratio(logprobs, kept(batch.behaviour))
        ratios = jnp.exp(logs)
        weights = kept(batch.weights)
        policy_loss = jnp.sum(weights * ppo_clip(ratios, advantages, algorithm.clip_low, algorithm.clip_high))
        loss = policy_loss - algorithm.entropy * jnp.sum(weights * entropies)
        sums = {
            "policy_loss": policy_loss,
            "tokens": batch.mask.sum(dtype=jnp.float32),
            "entropy": entropies.sum(),
            "kl_k1": -logs.sum(),
            "kl_k3": kept(ratios - 1 - logs).sum(),
            "clipped_low": jnp.sum((advantages < 0) & (ratios < 1 - algorithm.clip_low), dtype=jnp.float32),
            "clipped_high": jnp.sum((advantages > 0) & (ratios > 1 + algorithm.clip_high), dtype=jnp.float32),
        }
        if network.critic != "none":
            values = kept(before(network.values(params, batch, hidden)))
            old = kept(batch.old_values)
            errors = value_loss(values, old, kept(batch.returns), algorithm.value_clip)
            sums["value_loss"] = jnp.sum(kept(batch.value_weights) * errors)
            moved = jnp.abs(values - old) > algorithm.value_clip
            sums["value_clipped"] = jnp.sum(moved & (algorithm.value_clip > 0), dtype=jnp.float32)
            loss += algorithm.value_coefficient * sums["value_loss"]
        return loss, ({"loss": loss, **sums}, {"ratio_max": kept(ratios).max()}, logprobs)

    return objective


def contribution(objective: Objective) -> Callable[[Params, Microbatch], tuple[Contribution, jax.Array]]:
    """One micro-batch's contribution, and its logprobs [B, T]."""
    gradient = jax.value_and_grad(objective, has_aux=True)

    def contribute(params: Params, batch: Microbatch) -> tuple[Contribution, jax.Array]:
        (_, (sums, maxima, logprobs)), grads = gradient(params, batch)
        return Contribution(grads, sums, maxima), logprobs

    return contribute


def add(a: Contribution, b: Contribution) -> Contribution:
    return Contribution(
        gradient=jax.tree.map(jnp.add, a.gradient, b.gradient),
        sums=jax.tree.map(jnp.add, a.sums, b.sums),
        maxima=jax.tree.map(jnp.maximum, a.maxima, b.maxima),
    )
