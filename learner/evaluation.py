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
from learner.assignments import EveryRolloutFails
from learner.ledger import Ledger
from learner.rollouts import Kind
from learner.tasks import TasksError

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

    Raises TasksError when a domain has fewer.
    """
    for domain, listed in tasks.items():
        if len(listed) < count:
            raise TasksError(
                f"eval.tasks {count} exceeds the {len(listed)} held-out tasks of domain {domain!r} that were found and admitted;"
                " lower eval.tasks, or see why in the env server's log"
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

    @property
    def total(self) -> int:
        return len(self.rollouts) + sum(map(len, self.successes.values())) + sum(self.failed.values())

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


class Evaluation:
    """The held-out rollouts that are open, and the results so far. One evaluation (a version, in some modes) at a time."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]]) -> None:
        self._tasks = tasks
        self.jobs: list[Job] = []
        self.results: list[dict[str, Any]] = []  # of all evaluations, entries of summary.json

    @property
    def open(self) -> list[str]:
        """Rollouts without a result."""
        return [rollout_id for job in self.jobs for rollout_id in job.rollouts]

    @property
    def version(self) -> int:
        return self.jobs[0].version if self.jobs else 0

    def start(self, ledger: Ledger, label: str, version: int, modes: Sequence[str]) -> None:
        """Dispatch every task in every mode. Seeds depend on task and mode alone: evaluations compare like with like."""
        self.jobs = [Job(label, version, mode) for mode in modes]
        for job in self.jobs:
            for domain, tasks in self._tasks.items():
                for task in tasks:
                    group = ledger.open(Kind.EVAL, task, "eval", domain, task.id, job.mode)
                    job.plan(group.rollouts[0].id, domain)

    def mode_of(self, rollout_id: str) -> str:
        return self._job(rollout_id).mode

    def scored(self, rollout_id: str, success: bool) -> None:
        self._job(rollout_id).scored(rollout_id, success)

    def given_up(self, rollout_id: str) -> None:
        """Out of attempts. Does nothing for a rollout of training."""
        if rollout_id in self.open:
            self._job(rollout_id).given_up(rollout_id)

    def finish(self) -> tuple[list[dict[str, Any]], int]:
        """Results, and how many rollouts failed. They are recorded if nothing is open any more: what is late is not a random
        part of the tasks, short episodes come first.

        Raises EveryRolloutFails when a domain has no scored rollout although none is open: its success is unknown, and
        trying for longer would not tell.
        """
        late = bool(self.open)
        for rollout_id in self.open:
            self.given_up(rollout_id)
        results = [entry for job in self.jobs for entry in job.results()]
        failed = sum(sum(job.failed.values()) for job in self.jobs)
        self.jobs = []
        for entry in () if late else results:
            if not entry["n"]:
                raise EveryRolloutFails(
                    f"every {entry['mode']} held-out rollout of domain {entry['domain']!r} failed for good, so version "
                    f"{entry['version']} has no result; see events.jsonl (rollout_failed)"
                )
        self.results += [] if late else results
        return results, failed

    def _job(self, rollout_id: str) -> Job:
        return next(job for job in self.jobs if rollout_id in job.rollouts)
