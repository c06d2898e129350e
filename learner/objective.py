"""What one micro-batch contributes to an optimizer step: its gradient and its metrics, as pure functions of parameters.

Everything is a sum or an extreme over tokens, so contributions add up in any order and grouping (learner/reducers.py). Entries
outside `mask` are replaced by zeros before anything reads them: whatever stood there, NaN included, changes no bit.

Dimension key: B rows, T tokens of a row, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import ModelConfig
from common.config_algorithm import AlgorithmConfig
from learner import kl
from learner.losses import (
    before,
    cispo,
    clipped_mae,
    cross_entropy,
    double_sided,
    dual_clip,
    log_ratio,
    ppo_clip,
    reinforce,
    sequence_log_ratio,
    token_logprobs,
    value_loss,
)
from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelSpec
from learner.optimizer import Params
from learner.pack import Microbatch
from learner.reducers import EffectiveSize, Largest, Mean, Measures, PerStep, Smallest, merge


class Contribution(NamedTuple):
    """Of one micro-batch, or of several added up."""

    gradient: Params
    measures: Measures


Objective = Callable[[Params, Microbatch], tuple[jax.Array, tuple[Measures, jax.Array]]]  # loss, measures, logprobs [B, T]


@dataclass(frozen=True, eq=False)
class Network:
    """The policy and its critic as functions of a parameter tree.

    `{"policy": trunk}` and, with a critic, `"value_head": {kernel [D], bias []}`; a separate critic has a trunk of its
    own under `"critic"`. Masters are float32; the trunk casts them to its compute dtype where it uses them.
    """

    graph: nnx.GraphDef
    spec: ModelSpec
    critic: Literal["none", "shared", "detached", "separate"]

    def initial(self, policy: nnx.State) -> Params:
        """Parameters around the weights of a policy. The critic starts as its copy and values everything 0."""
        head = {"kernel": jnp.zeros(self.spec.hidden_size), "bias": jnp.zeros(())}
        copy = jax.tree.map(lambda x: jnp.array(x, jnp.float32), policy)
        return {
            "none": {"policy": copy},
            "shared": {"policy": copy, "value_head": head},
            "detached": {"policy": copy, "value_head": head},
            "separate": {"policy": copy, "value_head": head, "critic": jax.tree.map(jnp.copy, copy)},
        }[self.critic]

    def logprobs(self, params: Params, batch: Microbatch, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logprob and entropy [B, T] at `wanted` tokens, and the policy's hidden states [B, T, D]."""
        policy, hidden = self._trunk(params["policy"], batch)
        return *token_logprobs(policy.logits, hidden, batch.ids, wanted, batch.temperature), hidden

    def values(self, params: Params, batch: Microbatch, hidden: jax.Array) -> jax.Array:
        """[B, T] float32: the value of the state *after* each token. `hidden` is the policy's, for a shared critic."""
        if self.critic == "separate":
            _, hidden = self._trunk(params["critic"], batch)
        elif self.critic == "detached":
            hidden = jax.lax.stop_gradient(hidden)
        head = params["value_head"]
        return hidden.astype(head["kernel"].dtype) @ head["kernel"] + head["bias"]

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
        return self.logprobs(params, batch, batch.mask)[0]


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
        logprobs, entropies, _ = network.logprobs(params, batch, batch.mask)
        loss = jnp.sum(batch.weights * cross_entropy(logprobs))
        tokens = batch.mask.sum(dtype=jnp.float32)
        return loss, ({"loss": PerStep(loss), "entropy": Mean(entropies.sum(), tokens)}, logprobs)

    return objective


def policy(network: Network, algorithm: AlgorithmConfig, domains: Mapping[int, str] = {}) -> Objective:
    """The policy's loss, less the entropy bonus, plus what is configured: a KL penalty, the critic's loss, one on observations.

    The ratio is taken against `old_logprobs`; off-policy corrections stand in the advantages. Measures are of all tokens, and
    again, as `NAME/DOMAIN`, of those of each of `domains` (number -> name).
    """

    def objective(params: Params, batch: Microbatch) -> Any:
        kept = partial(_kept, batch.mask)
        predicts = algorithm.observation.loss != "none"
        wanted = jnp.logical_or(batch.mask, batch.observed) if predicts else batch.mask
        found, entropies, hidden = network.logprobs(params, batch, wanted)
        logprobs, entropies = kept(found), kept(entropies)
        losses, seen = _policy_losses(algorithm, batch, logprobs)
        weights = kept(batch.weights)
        seen.sums["policy_loss"] = weights * losses
        seen.means["entropy"] = entropies
        whole = seen.sums["policy_loss"] - algorithm.entropy * weights * entropies
        if algorithm.kl.where != "none":
            logs = log_ratio(logprobs, kept(batch.reference))
            seen.means["reference_kl"] = kl.ESTIMATORS[algorithm.kl.value](logs)
            if algorithm.kl.where == "loss":
                penalty = kl.penalty(logs, algorithm.kl.value, algorithm.kl.gradient)
                whole += algorithm.kl.coefficient * weights * kept(penalty)
        if algorithm.critic != "none":
            values = before(network.values(params, batch, hidden))
            seen.sums["value_loss"], seen.means["value_clipped"] = _value_losses(algorithm, batch, values)
            whole += algorithm.value_coefficient * seen.sums["value_loss"]
        if predicts:
            own = _kept(batch.observed, found)
            paw = algorithm.observation.loss == "clipped_mae"
            errors = clipped_mae(own, algorithm.observation.bound) if paw else cross_entropy(own)
            whole += _kept(batch.observed, batch.observed_weights) * _kept(batch.observed, errors)
            seen.predicted["observation_loss"] = errors
        seen.sums["loss"] = whole
        return jnp.sum(whole), (seen.measures(domains), logprobs)

    return objective


def token_losses(network: Network, algorithm: AlgorithmConfig) -> Callable[[Params, Microbatch], tuple[jax.Array, jax.Array]]:
    """[B, T] each: the policy's loss of every trained token, times its weight, and its logprob."""

    def losses(params: Params, batch: Microbatch) -> tuple[jax.Array, jax.Array]:
        logprobs, *_ = network.logprobs(params, batch, batch.mask)
        found, _ = _policy_losses(algorithm, batch, logprobs)
        return _kept(batch.mask, batch.weights) * _kept(batch.mask, found), logprobs

    return losses


def _kept(mask: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(mask, x, 0.0)


@dataclass(frozen=True)
class _Seen:
    """What a micro-batch shows of its tokens, [B, T] each, before it is summed up."""

    batch: Microbatch
    ratios: jax.Array  # that the loss has
    own_ratios: jax.Array  # of single tokens, 0 outside mask
    means: dict[str, jax.Array]  # over trained tokens
    sums: dict[str, jax.Array] = field(default_factory=dict)  # terms of the step's loss, 0 where there is none
    predicted: dict[str, jax.Array] = field(default_factory=dict)  # over observed tokens

    def measures(self, domains: Mapping[int, str]) -> Measures:
        out = self._over(jnp.ones_like(self.batch.mask))
        for number, name in domains.items():
            out |= {f"{measure}/{name}": own for measure, own in self._over(self.batch.domain == number).items()}
        return out

    def _over(self, chosen: jax.Array) -> Measures:
        mask, observed = chosen & self.batch.mask, chosen & self.batch.observed
        tokens, own = mask.sum(dtype=jnp.float32), _kept(mask, self.own_ratios)
        return {
            **{name: PerStep(_kept(chosen, x).sum()) for name, x in self.sums.items()},
            **{name: Mean(_kept(mask, x).sum(), tokens) for name, x in self.means.items()},
            **{name: Mean(_kept(observed, x).sum(), observed.sum(dtype=jnp.float32)) for name, x in self.predicted.items()},
            "ratio_max": Largest(jnp.where(mask, self.ratios, -jnp.inf).max()),
            "ratio_min": Smallest(jnp.where(mask, self.ratios, jnp.inf).min()),
            "effective_sample": EffectiveSize(own.sum(), jnp.square(own).sum(), tokens),
        }


def _policy_losses(algorithm: AlgorithmConfig, batch: Microbatch, logprobs: jax.Array) -> tuple[jax.Array, _Seen]:
    """[B, T], and what the ratios say."""
    mask = batch.mask
    advantages = _kept(mask, batch.advantages)
    own = log_ratio(logprobs, _kept(mask, batch.old_logprobs))
    logs = jax.vmap(sequence_log_ratio)(logprobs, own, batch.segment_ids, mask) if algorithm.policy_loss == "gspo" else own
    ratios, low, high = jnp.exp(logs), algorithm.clip_low, algorithm.clip_high
    match algorithm.policy_loss:
        case "ppo" | "gspo":
            losses = ppo_clip(ratios, advantages, low, high)
            losses = dual_clip(losses, advantages, algorithm.dual_clip) if algorithm.dual_clip else losses
        case "cispo":
            losses = cispo(logprobs, ratios, advantages, low, high)
        case "double_sided":
            losses = double_sided(logprobs, ratios, advantages, low, high)
        case _:
            losses = reinforce(logprobs, advantages)
    either = algorithm.policy_loss in ("double_sided", "cispo")  # bounds hold whatever the sign
    means = {f"kl_{name}": estimate(-own) for name, estimate in kl.ESTIMATORS.items()}  # of KL(old, policy)
    if algorithm.policy_loss != "reinforce":
        means["clipped_low"] = (((advantages < 0) | either) & (ratios < 1 - low)).astype(jnp.float32)
        means["clipped_high"] = (((advantages > 0) | either) & (ratios > 1 + high)).astype(jnp.float32)
    return losses, _Seen(batch, ratios, _kept(mask, jnp.exp(own)), means)


def _value_losses(algorithm: AlgorithmConfig, batch: Microbatch, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, T] each: the weighted loss of trained tokens' values, and where they are held at the clip's bound."""
    values, old = _kept(batch.mask, values), _kept(batch.mask, batch.old_values)
    errors = value_loss(values, old, _kept(batch.mask, batch.returns), algorithm.value_clip)
    moved = (jnp.abs(values - old) > algorithm.value_clip) & (algorithm.value_clip > 0)
    return _kept(batch.mask, batch.value_weights) * errors, moved.astype(jnp.float32)


def contribution(objective: Objective) -> Callable[[Params, Microbatch], tuple[Contribution, jax.Array]]:
    """One micro-batch's contribution, and its logprobs [B, T]."""
    gradient = jax.value_and_grad(objective, has_aux=True)

    def contribute(params: Params, batch: Microbatch) -> tuple[Contribution, jax.Array]:
        (_, (measures, logprobs)), grads = gradient(params, batch)
        return Contribution(grads, measures), logprobs

    return contribute


def add(a: Contribution, b: Contribution) -> Contribution:
    return Contribution(jax.tree.map(jnp.add, a.gradient, b.gradient), merge(a.measures, b.measures))
