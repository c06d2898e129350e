"""Evaluation: held-out success of one version, outside capacity and apart from everything that training reads.

Success of a rollout is `metrics["success"]` (at least 0.5) when its environment reports one, else a return above 0.5.
A failed rollout is tried again; out of attempts it is left out of `n` and reported as failed. With several rollouts of a task,
`success` is the mean over tasks of a task's share, and pass@k and pass^k say how it is spread.
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
from learner.scores import Attempt, Scores
from learner.tasks import TasksError

SPLIT = "heldout"
Z95 = 1.959963984540054  # 97.5th percentile of the normal distribution


def succeeded(trajectory: Trajectory) -> bool:
    if "success" in trajectory.metrics:
        return trajectory.metrics["success"] >= 0.5
    return trajectory.total_reward > 0.5


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927); (0, 1) without data.

    Of a mean of `n` numbers in [0, 1] whose sum is `successes` as well: they vary no more than zeros and ones of that mean.
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(k: int, n: int, c: int) -> float:
    """Probability that some of `k` of the `n` rollouts of a task is one of the `c` that succeeded: the unbiased estimate of
    pass@k, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1)."""
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_all(k: int, n: int, c: int) -> float:
    """Probability that all `k` do: pass^k (Yao et al. 2024, tau-bench, section 3)."""
    return math.comb(c, k) / math.comb(n, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, ... and `n`; none for one sample, whose success says it all."""
    return sorted({n, *(2**i for i in range(n.bit_length()))}) if n > 1 else []


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
    samples: int = 1  # rollouts of each task
    rollouts: dict[str, Attempt] = field(default_factory=dict)  # open rollout id -> what it is
    outcomes: dict[str, dict[str, list[bool]]] = field(default_factory=dict)  # domain -> task -> an entry per scored rollout
    failed: dict[str, int] = field(default_factory=dict)  # domain -> rollouts out of attempts, or not done by the deadline

    @property
    def total(self) -> int:
        scored = sum(len(outcomes) for tasks in self.outcomes.values() for outcomes in tasks.values())
        return len(self.rollouts) + scored + sum(self.failed.values())

    def plan(self, rollout_id: str, attempt: Attempt) -> None:
        self.rollouts[rollout_id] = attempt
        self.outcomes.setdefault(attempt.domain, {})
        self.failed.setdefault(attempt.domain, 0)

    def score(self, attempt: Attempt, success: bool) -> None:
        self.outcomes.setdefault(attempt.domain, {}).setdefault(attempt.task, []).append(success)
        self.failed.setdefault(attempt.domain, 0)

    def given_up(self, rollout_id: str) -> None:
        self.failed[self.rollouts.pop(rollout_id).domain] += 1

    def results(self) -> list[dict[str, Any]]:
        """One entry per domain, as in summary.json. Rollouts of one task are alike, so intervals are over tasks."""
        out = []
        for domain, tasks in self.outcomes.items():
            pairs = [(len(outcomes), sum(outcomes)) for outcomes in tasks.values()]  # a task's rollouts, and its successes
            entry = {"phase": self.label, "version": self.version, "split": SPLIT, "mode": self.mode, "domain": domain}
            rate, interval = _mean([c / n for n, c in pairs])
            entry |= {"success": rate, "n": sum(n for n, _ in pairs), "tasks": len(pairs), "ci95": interval}
            out.append(entry | {"pass_k": [found for k in powers(self.samples) if (found := _pass_k(k, pairs))]})
        return out


def _mean(values: Sequence[float]) -> tuple[float, list[float]]:
    return sum(values) / len(values) if values else 0.0, list(wilson(sum(values), len(values)))


def _pass_k(k: int, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Over the tasks with at least `k` scored rollouts; empty when there are none."""
    enough = [(n, c) for n, c in pairs if n >= k]
    if not enough:
        return {}
    some, some_interval = _mean([pass_at(k, n, c) for n, c in enough])
    every, every_interval = _mean([pass_all(k, n, c) for n, c in enough])
    found = {"k": k, "tasks": len(enough), "pass_at": some, "pass_at_ci95": some_interval}
    return found | {"pass_all": every, "pass_all_ci95": every_interval}


class Evaluation:
    """The held-out rollouts that are open, and the results so far. One evaluation (a version, in some modes) at a time."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]], scores: Scores | None = None, samples: int = 1) -> None:
        """`samples`: rollouts of a task in mode "sampled". `scores`: what earlier lives of the run had scored."""
        self._tasks, self._scores, self._samples = tasks, scores, samples
        self._weights = ""  # that are evaluated, in the words of `scores`; "": nothing is kept
        self.jobs: list[Job] = []
        self.results: list[dict[str, Any]] = []  # of all evaluations, entries of summary.json

    @property
    def open(self) -> list[str]:
        """Rollouts without a result."""
        return [rollout_id for job in self.jobs for rollout_id in job.rollouts]

    @property
    def version(self) -> int:
        return self.jobs[0].version if self.jobs else 0

    def start(self, ledger: Ledger, label: str, version: int, modes: Sequence[str], weights: str = "") -> int:
        """Dispatch every task in every mode, but what was scored with these `weights` before; returns how many were. Seeds
        depend on task, mode and sample alone: evaluations compare like with like."""
        self._weights = weights
        known = self._scores.of(weights) if self._scores and weights else {}
        self.jobs = [Job(label, version, mode, self._samples if mode == "sampled" else 1) for mode in modes]
        kept = 0
        for job in self.jobs:
            for domain, tasks in self._tasks.items():
                for attempt, task in [(Attempt(job.mode, domain, t.id, n), t) for t in tasks for n in range(job.samples)]:
                    if attempt in known:
                        job.score(attempt, known[attempt])
                        kept += 1
                        continue
                    seed = ("eval", domain, task.id, job.mode, *([attempt.sample] if attempt.sample else []))
                    job.plan(ledger.open(Kind.EVAL, task, *seed).rollouts[0].id, attempt)
        return kept

    def mode_of(self, rollout_id: str) -> str:
        return self._job(rollout_id).mode

    def scored(self, rollout_id: str, success: bool) -> None:
        job = self._job(rollout_id)
        attempt = job.rollouts.pop(rollout_id)
        job.score(attempt, success)
        if self._scores and self._weights:
            self._scores.add(self._weights, attempt, success)

    def given_up(self, rollout_id: str) -> bool:
        """Out of attempts; whether it was one of ours."""
        ours = rollout_id in self.open
        if ours:
            self._job(rollout_id).given_up(rollout_id)
        return ours

    def finish(self) -> tuple[list[dict[str, Any]], int]:
        """Results, and how many rollouts failed. They are recorded if nothing is open any more: what is late is not a random
        part of the tasks, short episodes come first. A domain without a scored rollout although none is open has no result: its
        success is unknown, and trying for longer would not tell.

        Raises EveryRolloutFails when no domain has any.
        """
        late = bool(self.open)
        for rollout_id in self.open:
            self.given_up(rollout_id)
        results = [entry for job in self.jobs for entry in job.results()]
        failed = sum(sum(job.failed.values()) for job in self.jobs)
        self.jobs = []
        unknown = [entry for entry in results if not entry["n"]]
        if unknown and not late and len(unknown) == len(results):
            entry = unknown[0]
            raise EveryRolloutFails(
                f"every {entry['mode']} held-out rollout of domain {entry['domain']!r} failed for good, so version "
                f"{entry['version']} has no result; see events.jsonl (rollout_failed)"
            )
        results = [entry for entry in results if entry["n"]]
        self.results += [] if late else results
        return results, failed

    def unknown(self, results: Sequence[Mapping[str, Any]], version: int) -> dict[str, str]:
        """The alarm for domains that have no entry in `results`."""
        missing = sorted(set(self._tasks) - {entry["domain"] for entry in results})
        why = f"no held-out rollout of {', '.join(missing)} was scored: version {version} has no result there"
        return {"alarm": why} if missing else {}

    def _job(self, rollout_id: str) -> Job:
        return next(job for job in self.jobs if rollout_id in job.rollouts)
