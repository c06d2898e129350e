"""Metrics of one update: of its optimizer steps, as they add up, and of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from learner.optimizer import StepReport
from learner.pack import Example
from learner.reducers import Last, Measures, PerStep, results
from learner.rows import Credit, Rollout

Metrics = dict[str, float]


class Report:
    """What the optimizer steps of one update did."""

    def __init__(self) -> None:
        self.steps: list[tuple[Measures, StepReport]] = []
        self.extra: Metrics = {}
        self.trained = self.cut = self.empty = 0

    def metrics(self) -> Metrics:
        """Means over trained tokens (losses and norms: over optimizer steps); what was not measured is left out."""
        steps: list[tuple[Any, StepReport]] = jax.device_get(self.steps)
        finite = [(measures, step) for measures, step in steps if step.finite]
        out: Metrics = {
            "trained_tokens": float(self.trained),
            "cut_tokens": float(self.cut),
            "optimizer_steps": float(sum(bool(step.taken) for _, step in steps)),
            "skipped_nonfinite": float(len(steps) - len(finite)),
            "skipped_zero": float(sum(not step.taken for _, step in finite)),
            "skipped_empty": float(self.empty),
        }
        return out | results(_with_step(at, *pair) for at, pair in enumerate(finite)) | self.extra


def _with_step(at: int, measures: Measures, step: StepReport) -> Measures:
    norms = {name: PerStep(getattr(step, name), 1.0) for name in ("grad_norm", "update_norm")}
    return measures | norms | {"lr": Last(step.lr, at)}


def of_rollouts(groups: Sequence[Sequence[Rollout]], credits: Sequence[Sequence[Sequence[Credit]]], apart: bool) -> Metrics:
    """Whether there is anything to learn from: the spread of returns in groups, and of advantages in each domain, over the tokens
    that are trained on; and what an off-policy correction does to them. All of it of each domain too, if domains are to be told
    `apart`; advantages of different algorithms have no spread in common."""
    pairs = list(zip(groups, credits, strict=True))
    domains: dict[str, list[Any]] = {}
    for group, scored in pairs:
        if group:
            domains.setdefault(group[0].trajectory.task.domain, []).append((group, scored))
    out = {name: value for name, value in _of_groups(pairs).items() if name != "advantage_std"}
    for domain, own in domains.items():
        out |= {f"{name}/{domain}": value for name, value in _of_groups(own).items() if apart or name == "advantage_std"}
    return out


def _of_groups(pairs: Sequence[tuple[Sequence[Rollout], Sequence[Sequence[Credit]]]]) -> Metrics:
    spreads = [np.std([rollout.trajectory.total_reward for rollout in group]) for group, _ in pairs if len(group) > 1]
    out = {"group_reward_std": float(np.mean(spreads))} if spreads else {}
    trained = [
        (part.advantages[mask], part.weights[mask])
        for group, scored in pairs
        for rollout, parts in zip(group, scored, strict=True)
        for mask, part in zip(rollout.masks, parts, strict=True)
    ]
    gains, weights = (np.concatenate(arrays) for arrays in zip(*trained, strict=True)) if trained else (np.zeros(0),) * 2
    if len(gains):
        out["advantage_std"] = float(gains.std(dtype=np.float64))
        out |= {"correction_mean": float(weights.mean(dtype=np.float64)), "correction_zero": float((weights == 0).mean())}
    return out


def of_values(examples: Sequence[Example], domains: Mapping[int, str]) -> Metrics:
    """`explained_variance`: 1 - Var(return - value) / Var(return), over trained tokens. Of each of `domains` (number -> name)
    too."""
    parts = {"": examples} | {f"/{name}": [own for own in examples if own.domain == number] for number, name in domains.items()}
    return {f"{name}{domain}": value for domain, own in parts.items() for name, value in _of_critic(own).items()}


def _of_critic(examples: Sequence[Example]) -> Metrics:
    returns = np.concatenate([example.returns[example.mask] for example in examples]) if examples else np.zeros(0)
    if not len(returns):
        return {}
    values = np.concatenate([example.old_values[example.mask] for example in examples])
    variance = float(np.var(returns, dtype=np.float64))
    left = float(np.var(returns - values, dtype=np.float64))
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": 1 - left / variance if variance > 0 else 0.0,
    }
