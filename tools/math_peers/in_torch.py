"""What verl answers. Runs in its environment (torch.txt, torch-bare.txt): `python -m tools.math_peers.in_torch IN OUT`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tools.math_peers import batches as b

spec = importlib.util.find_spec("verl")
assert spec is not None
sys.modules["verl"] = importlib.util.module_from_spec(spec)  # without its __init__, which wants the whole trainer
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value, and the gradient of its sum."""
    argument = torch.tensor(x, requires_grad=True)
    value = function(argument)
    value.sum().backward()
    assert argument.grad is not None
    return value.detach().numpy(), argument.grad.numpy()


def policy_losses(batch: b.Batch, mask: torch.Tensor) -> b.Answers:
    old, advantages = torch.tensor(batch.old_logprobs), torch.tensor(batch.advantages)
    found = {}
    for name, low, high in (
        ("vanilla", b.CLIP_LOW, b.CLIP_HIGH),
        ("gspo", b.GSPO_LOW, b.GSPO_HIGH),
        ("cispo", b.CLIP_LOW, b.CLIP_HIGH),
    ):
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high
        )
        key = f"compute_policy_loss_{name}"
        rest = {"advantages": advantages, "response_mask": mask, "loss_agg_mode": "token-mean", "config": config}
        loss = partial(getattr(core_algos, key), old, **rest)
        found[key], found[f"{key}, gradient"] = gradient(lambda x, loss=loss: loss(x)[0], batch.logprobs)
    return found


def corrections(batch: b.Batch, mask: torch.Tensor) -> b.Answers:
    logs = torch.tensor(batch.log_weights)
    weights, rejection = (
        rollout_corr_helper.compute_rollout_correction_weights,
        rollout_corr_helper.compute_rollout_rejection_mask,
    )
    band = f"{b.LOW}_{b.HIGH}"
    return {
        "compute_rollout_correction_weights, token": weights(logs, mask, "token", b.HIGH)[0],
        "compute_rollout_correction_weights, sequence": weights(logs, mask, "sequence", b.HIGH)[0],
        "compute_rollout_correction_weights, band": weights(logs, mask, "token", band)[0],
        "compute_rollout_rejection_mask, token_k1": rejection(logs, mask, "token_k1", band)[0],
        "compute_rollout_rejection_mask, seq_mean_k1": rejection(logs, mask, "seq_mean_k1", "0.9_1.2")[0],
    }


def answers(batch: b.Batch) -> b.Answers:
    mask = torch.tensor(batch.mask, dtype=torch.float64)
    rewards, values = torch.tensor(batch.rewards), torch.tensor(batch.values)
    index = batch.group
    gae, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, b.GAMMA, b.LAMBDA)  # pyright: ignore
    plus, plus_returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=b.GAMMA)
    )
    found = {
        "compute_gae_advantage_return, advantages": gae,
        "compute_gae_advantage_return, returns": returns,
        "masked_whiten": torch_functional.masked_whiten(torch.tensor(batch.advantages), mask),
        "compute_reinforce_plus_plus_outcome_advantage, returns": plus_returns,
        "compute_reinforce_plus_plus_outcome_advantage": plus,
        "compute_reinforce_plus_plus_baseline_outcome_advantage": (
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)[0]
        ),
        "compute_grpo_outcome_advantage": core_algos.compute_grpo_outcome_advantage(rewards, mask, index)[0],
        "compute_grpo_outcome_advantage, no std": core_algos.compute_grpo_outcome_advantage(
            rewards, mask, index, norm_adv_by_std_in_grpo=False
        )[0],
        "compute_rloo_outcome_advantage": core_algos.compute_rloo_outcome_advantage(rewards, mask, index)[0],
        **corrections(batch, mask),
    }
    reference = torch.tensor(batch.reference)
    for kind in ("k1", "k2", "k3", "k3+"):
        value, slope = gradient(lambda x, kind=kind: core_algos.kl_penalty(x, reference, kind), batch.logprobs)
        found |= {f"kl_penalty, {kind}": value, f"kl_penalty, {kind}, gradient": slope}
    found["entropy_from_logits"] = np.pad(
        torch_functional.entropy_from_logits(torch.tensor(batch.logits[:, :-1], dtype=torch.float64)), ((0, 0), (1, 0))
    )
    found = {name: np.where(batch.mask, x, 0) for name, x in found.items()}
    for mode in MODES:
        found[f"agg_loss, {mode}"] = core_algos.agg_loss(torch.tensor(batch.losses), mask, mode).numpy()
    found["compute_value_loss"], found["compute_value_loss, gradient"] = gradient(
        lambda x: core_algos.compute_value_loss(x, torch.tensor(batch.returns), values, mask, b.VALUE_CLIP)[0], batch.new_values
    )
    found |= policy_losses(batch, mask)
    return {f"verl {name}": x for name, x in found.items()}


if __name__ == "__main__":
    b.answer(answers)
