"""What rlax and tunix answer. Runs in their environment (jax.txt, jax-bare.txt): `python -m tools.math_peers.in_jax IN OUT`.

rlax's functions are of one sequence without a mask. They get a rollout twice: the policy's tokens alone, and the row as it
stands, with the environment's answers among the steps ("whole row").
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rlax
from flax import nnx

from tools.math_peers import batches as b


def bare(name: str) -> None:
    """Let `name.module` be imported without running the package's own __init__, which wants far more than its mathematics."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)


bare("tunix")
from tunix.rl import algo_core, common  # noqa: E402

jax.config.update("jax_enable_x64", True)
warnings.simplefilter("ignore", PendingDeprecationWarning)  # rlax's of its categorical functions


def sequences(batch: b.Batch, where: np.ndarray) -> b.Answers:
    """What rlax's functions of a sequence read: [B, T] each, aligned to the right."""
    values = b.aligned(batch.values, where)
    return {
        "rewards": b.aligned(batch.rewards, where),
        "values": values,
        "following": np.concatenate([values[:, 1:], batch.bootstrap[:, None]], 1),
        "ratios": b.aligned(np.where(batch.mask, np.exp(batch.log_weights), 1), where),
        "sampled": b.aligned(batch.mask, where),
    }


@jax.jit
def temporal(x: dict) -> dict:
    r, v, after, rho = x["rewards"], x["values"], x["following"], x["ratios"]
    d = jnp.full_like(r, b.GAMMA)
    full = jnp.concatenate([v, after[:, -1:]], 1)

    def vtrace(lam: float) -> Any:
        return jax.vmap(lambda *given: rlax.vtrace_td_error_and_advantage(*given, lam))(v, after, r, d, rho)

    def masked(*given: jax.Array) -> jax.Array:
        return rlax.vtrace(*given[:5], b.LAMBDA, sample_mask=given[5])

    found = {
        "truncated_generalized_advantage_estimation": jax.vmap(
            lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, b.LAMBDA, v)
        )(r, d, full),
        "lambda_returns": jax.vmap(lambda *given: rlax.lambda_returns(*given, b.LAMBDA))(r, d, after),
        "discounted_returns": jax.vmap(lambda r, d: rlax.discounted_returns(r, d, 0.0))(r, d),
        "n_step_bootstrapped_returns": jax.vmap(lambda *given: rlax.n_step_bootstrapped_returns(*given, b.LENGTH))(r, d, after),
        "vtrace": jax.vmap(lambda *given: rlax.vtrace(*given, b.LAMBDA))(v, after, r, d, rho),
        "vtrace, sample_mask": jax.vmap(masked)(v, after, r, d, rho, x["sampled"]),
        "vtrace_td_error_and_advantage, errors": vtrace(b.LAMBDA).errors,
        "vtrace_td_error_and_advantage, λ < 1": vtrace(b.LAMBDA).pg_advantage,
        "vtrace_td_error_and_advantage, λ = 1": vtrace(1.0).pg_advantage,
    }
    return {name: jnp.where(x["sampled"], answer, 0) for name, answer in found.items()}


def picks(batch: b.Batch) -> b.Answers:
    """What rlax's losses read: [N, ...] each, and whole rows one behind the other."""
    before = {name: np.roll(getattr(batch, name), 1, axis=1) for name in ("logits", "old_logits")}  # what predicts each token
    names = ("ids", "advantages", "new_values", "returns")
    return {
        **{name: batch.picked(x) for name, x in before.items()},
        **{name: batch.picked(getattr(batch, name)) for name in names},
        "ratios": np.exp(batch.picked(batch.logprobs - batch.old_logprobs)),
        "row_logits": before["logits"].reshape(-1, b.WORDS),
        "row_ids": batch.ids.ravel(),
        "row_advantages": batch.advantages.ravel(),
        "row_mask": batch.mask.ravel().astype(float),
    }


@jax.jit
def losses(x: dict) -> dict:
    ids, advantages, ones = x["ids"], x["advantages"], jnp.ones(b.PICKED)

    def clipped(ratios: jax.Array) -> jax.Array:
        return rlax.clipped_surrogate_pg_loss(ratios, advantages, b.CLIP_LOW)

    def reinforce(logits: jax.Array) -> jax.Array:
        return rlax.policy_gradient_loss(logits, ids, advantages, ones)

    whole = (x["row_logits"], x["row_ids"], x["row_advantages"], x["row_mask"])
    return {
        "clipped_surrogate_pg_loss": clipped(x["ratios"]),
        "clipped_surrogate_pg_loss, gradient": jax.grad(clipped)(x["ratios"]),
        "policy_gradient_loss": reinforce(x["logits"]),
        "policy_gradient_loss, gradient": jax.grad(reinforce)(x["logits"]),
        "policy_gradient_loss, w = mask": rlax.policy_gradient_loss(*whole),
        "entropy_loss": rlax.entropy_loss(x["logits"], ones),
        "categorical_kl_divergence": rlax.categorical_kl_divergence(x["logits"], x["old_logits"]),
        "categorical_importance_sampling_ratios": rlax.categorical_importance_sampling_ratios(x["logits"], x["old_logits"], ids),
        "l2_loss": rlax.l2_loss(x["new_values"], x["returns"]),
    }


def rlax_answers(batch: b.Batch) -> b.Answers:
    own, row = (temporal(sequences(batch, where)) for where in (batch.mask, batch.span))
    whole = ("truncated_generalized_advantage_estimation", "lambda_returns", "discounted_returns", "vtrace")
    own["vtrace, sample_mask"] = row["vtrace, sample_mask"]  # without the environment's tokens there is nothing to mask
    return {**own, **{f"{name}, whole row": row[name] for name in whole}, **losses(picks(batch))}


class Fixed(nnx.Module):
    """A model whose output is its parameter, whatever it is asked."""

    def __init__(self, output: jax.Array):
        self.output = nnx.Param(output)

    def __call__(self, *_: object, **__: object) -> tuple[jax.Array, None]:
        return self.output[...], None


def example(batch: b.Batch, per_token: bool) -> dict:
    """The first token is the prompt."""
    return {
        "prompt_ids": batch.ids[:, :1],
        "completion_ids": batch.ids[:, 1:],
        "completion_mask": batch.mask[:, 1:].astype(np.int32),
        "advantages": np.float32(batch.advantages[:, 1:] if per_token else batch.row_advantages),
        "old_per_token_logps": np.float32(batch.old_logprobs)[:, 1:],
        "ref_per_token_logps": np.float32(batch.reference)[:, 1:],
        "old_values": np.float32(batch.values)[:, 1:],
        "returns": np.float32(batch.returns)[:, 1:],
    }


def settings() -> dict[str, tuple[Callable, dict]]:
    """What tunix's losses are asked for: name -> function and its configuration."""
    clip = {"epsilon": b.CLIP_LOW, "epsilon_low": b.CLIP_LOW, "epsilon_high": b.CLIP_HIGH}
    ppo = {**clip, "entropy_coef": 0.0, "epsilon_c": None, "kl_coef": 0.0}
    grpo = {**clip, "loss_algo": "grpo", "epsilon_c": None, "beta": 0.0, "temperature": 1.0, "kl_clamp_value": None}
    grpo |= {"kl_loss_mode": "low_var_kl", "loss_agg_mode": "token-mean"}
    sequence = {"loss_algo": "gspo-token", "epsilon": b.GSPO_LOW, "epsilon_high": b.GSPO_HIGH}
    modes = ("sequence-mean-token-mean", "seq-mean-token-sum", "sequence-mean-token-scale")
    of_ppo = {
        "ppo_policy_loss_fn": ppo,
        "ppo_policy_loss_fn, dual clip": {**ppo, "epsilon_c": b.DUAL_CLIP},
        "ppo_policy_loss_fn, entropy": {**ppo, "entropy_coef": b.ENTROPY},
    }
    of_grpo = {
        "grpo_loss_fn": grpo,
        "grpo_loss_fn, k3": {**grpo, "beta": b.KL},
        "grpo_loss_fn, k2": {**grpo, "beta": b.KL, "kl_loss_mode": "mse_kl"},
        "grpo_loss_fn, gspo-token": {**grpo, **sequence},
        **{f"grpo_loss_fn, {mode}": {**grpo, "loss_agg_mode": mode} for mode in modes},
    }
    return {name: (algo_core.ppo_policy_loss_fn, x) for name, x in of_ppo.items()} | {
        name: (algo_core.grpo_loss_fn, x) for name, x in of_grpo.items()
    }


def _loss(function: Callable, rest: tuple, output: jax.Array) -> jax.Array:
    return function(Fixed(output), *rest)[0]


@jax.jit
def tunix_losses(logits: jax.Array, values: jax.Array, per_token: dict, per_row: dict) -> dict:
    """The loss of a whole batch, and its gradient with respect to the model's output."""
    found = {}
    for name, (function, configuration) in settings().items():
        given = per_token if function is algo_core.ppo_policy_loss_fn else per_row

        rest = SimpleNamespace(**given), SimpleNamespace(**configuration), -1, -1
        loss = partial(_loss, function, rest)
        found[name], found[f"{name}, gradient"] = jax.value_and_grad(loss)(logits)

    def value_loss(output: jax.Array) -> jax.Array:
        after = jnp.concatenate([output[:, 1:], output[:, :1]], 1)  # it reads the output at t-1 for token t
        return algo_core.ppo_value_loss_fn(Fixed(after[..., None]), SimpleNamespace(**per_token), b.VALUE_CLIP, -1, -1)[0]

    found["ppo_value_loss_fn"], found["ppo_value_loss_fn, gradient"] = jax.value_and_grad(value_loss)(values)
    return found


def tunix_answers(batch: b.Batch) -> b.Answers:
    mask = batch.mask
    advantages, returns = algo_core.compute_gae_advantages(batch.rewards, batch.values, mask.astype(int), b.GAMMA, b.LAMBDA)
    logprobs = common.selective_log_softmax(jnp.asarray(batch.logits[:, :-1]), jnp.asarray(batch.ids[:, 1:]))
    entropies = algo_core.compute_entropy_from_logits(batch.logits[:, :-1])
    found = {
        "compute_gae_advantages, advantages": advantages,
        "compute_gae_advantages, returns": returns,
        "masked_whiten": algo_core.masked_whiten(batch.advantages, mask),
        "selective_log_softmax": np.pad(logprobs, ((0, 0), (1, 0))),
        "compute_entropy_from_logits": np.pad(entropies, ((0, 0), (1, 0))),
    }
    for method in ("kl", "mse_kl", "low_var_kl"):
        found[f"compute_kl_divergence, {method}"] = common.compute_kl_divergence(batch.logprobs, batch.reference, method)
    found = {name: np.where(mask, x, 0) for name, x in found.items()}
    float32 = np.float32(batch.scores)
    found |= {
        "compute_advantages": algo_core.compute_advantages(batch.scores, b.MEMBERS),
        "compute_advantages, float32": algo_core.compute_advantages(float32, b.MEMBERS),
        "compute_drgrpo_advantages": algo_core.compute_drgrpo_advantages(batch.scores, b.MEMBERS),
        "compute_rloo_advantages": algo_core.compute_rloo_advantages(batch.scores, b.MEMBERS),
    }
    given = np.float32(batch.logits), np.float32(batch.new_values), example(batch, True), example(batch, False)
    return found | tunix_losses(*given)


def answers(batch: b.Batch) -> b.Answers:
    found = {f"rlax {name}": x for name, x in rlax_answers(batch).items()}
    return found | {f"tunix {name}": x for name, x in tunix_answers(batch).items()}


if __name__ == "__main__":
    b.answer(answers)
