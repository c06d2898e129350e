"""Evaluation: held-out success of one version, outside capacity and apart from everything that training reads.

Success of a rollout is `metrics["success"]` (at least 0.5) when its environment reports one, else a return above 0.5.
A failed rollout is tried again; out of attempts it is left out of `n` and reported as failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import Task, Trajectory

SPLIT = "heldout"
Z95 = 1.959963984540054  # 97.5th percentile of the normal distribution


def succeeded(trajectory: Trajectory) -> bool:
    if "success" in trajectory.metrics:
        return trajectory.metrics["success"] >= 0.5
    return trajectory.total_reward > 0.5


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927); (0, 1) without data."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def fixed_tasks(tasks: Mapping[str, Sequence[Task]], count: int) -> dict[str, Sequence[Task]]:
    """The first `count` held-out tasks of each domain: always the same ones.

    Raises ValueError when a domain has fewer.
    """
    for domain, listed in tasks.items():
        if len(listed) < count:
            raise ValueError(
                f"eval.tasks {count} exceeds the {len(listed)} held-out tasks of domain {domain!r}; lower eval.tasks"
            )
    return {domain: listed[:count] for domain, listed in tasks.items()}


@dataclass
class Job:
    """One (version, mode) over all held-out tasks."""

    label: str  # phase: "init", "warm" or "rl"
    version: int
    mode: str  # "greedy" or "sampled"
    rollouts: dict[str, str] = field(default_factory=dict)  # open rollout id -> domain
    successes: dict[str, list[bool]] = field(default_factory=dict)  # domain -> one entry per scored rollout
    failed: dict[str, int] = field(default_factory=dict)  # domain -> rollouts out of attempts, or not done by the deadline

    def plan(self, rollout_id: str, domain: str) -> None:
        self.rollouts[rollout_id] = domain
        self.successes.setdefault(domain, [])
        self.failed.setdefault(domain, 0)

    def scored(self, rollout_id: str, success: bool) -> None:
        self.successes[self.rollouts.pop(rollout_id)].append(success)

    def given_up(self, rollout_id: str) -> None:
        self.failed[self.rollouts.pop(rollout_id)] += 1

    def results(self) -> list[dict[str, Any]]:
        """One entry per domain, as in summary.json."""
        out = []
        for domain, outcomes in self.successes.items():
            n = len(outcomes)
            common = {"phase": self.label, "version": self.version, "split": SPLIT, "mode": self.mode, "domain": domain}
            rate = sum(outcomes) / n if n else 0.0
            out.append(common | {"success": rate, "n": n, "ci95": list(wilson(sum(outcomes), n))})
        return out
