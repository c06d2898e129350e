"""The task sampler: which task the next group works on. Uniform: every task once per epoch, domains by weight.

A domain's order in an epoch follows from (seed, domain, epoch) alone, so its state is two numbers. Statistics per task are
kept for reports and for samplers that weigh tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.seeds import derive_seed
from common.tasks import fingerprint
from common.types import Task
from learner.tasks import TasksError


@dataclass
class TaskStatistics:
    n: int = 0  # scored rollouts
    successes: int = 0


@dataclass
class _Domain:
    """Cursor over the shuffled tasks of one domain. `cursor == len(tasks)` is the start of the next epoch."""

    tasks: Sequence[Task]
    fingerprint: str
    epoch: int = 0
    cursor: int = 0


class TaskSampler:
    """Draws training tasks. Same seed, same tasks, same draws."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]], weights: Mapping[str, float], seed: int) -> None:
        """`tasks` by domain. Raises TasksError when a domain has none."""
        for name in weights:
            if not tasks.get(name):
                raise TasksError(f"domain {name!r} lists no training tasks; set domains.train_tasks or its options")
        self._seed = seed
        self._domains = {name: _Domain(tasks[name], fingerprint(tasks[name])) for name in weights}
        total = sum(weights.values())
        self._shares = [weight / total for weight in weights.values()]
        self._rng = np.random.default_rng(derive_seed(seed, "domains"))
        self._orders: dict[str, tuple[int, np.ndarray]] = {}  # domain -> epoch and its order
        self.statistics: dict[str, dict[str, TaskStatistics]] = {name: {} for name in weights}  # domain -> task id -> numbers

    def next(self) -> Task:
        names = list(self._domains)
        name = names[int(self._rng.choice(len(names), p=self._shares))] if len(names) > 1 else names[0]
        domain = self._domains[name]
        if domain.cursor >= len(domain.tasks):
            domain.epoch, domain.cursor = domain.epoch + 1, 0
        task = domain.tasks[int(self._order(name, domain)[domain.cursor])]
        domain.cursor += 1
        return task

    def record(self, task: Task, success: bool) -> None:
        """One scored rollout of the policy on `task`. Failed rollouts are never recorded."""
        numbers = self.statistics[task.domain].setdefault(task.id, TaskStatistics())
        numbers.n += 1
        numbers.successes += success

    def state(self) -> dict[str, Any]:
        return {
            "rng": self._rng.bit_generator.state,
            "domains": {
                name: {
                    "fingerprint": domain.fingerprint,
                    "epoch": domain.epoch,
                    "cursor": domain.cursor,
                    "statistics": {task: [x.n, x.successes] for task, x in self.statistics[name].items()},
                }
                for name, domain in self._domains.items()
            },
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on where `state` was saved; returns the domains whose tasks changed: these start at their first epoch, and keep
        the statistics of the tasks that still exist."""
        self._rng.bit_generator.state = state["rng"]
        changed = []
        for name, domain in self._domains.items():
            saved = state["domains"].get(name, {"fingerprint": "", "epoch": 0, "cursor": 0, "statistics": {}})
            if saved["fingerprint"] == domain.fingerprint:
                domain.epoch, domain.cursor = saved["epoch"], saved["cursor"]
            else:
                domain.epoch = domain.cursor = 0
                changed.append(name)
            known = {task.id for task in domain.tasks}
            self.statistics[name] = {task: TaskStatistics(*x) for task, x in saved["statistics"].items() if task in known}
        return changed

    def _order(self, name: str, domain: _Domain) -> np.ndarray:
        """The order of the domain's tasks in its epoch, [tasks] int64."""
        epoch, order = self._orders.get(name, (-1, np.zeros(0, np.int64)))
        if epoch != domain.epoch:
            order = np.random.default_rng(derive_seed(self._seed, name, domain.epoch)).permutation(len(domain.tasks))
            self._orders[name] = (domain.epoch, order)
        return order
