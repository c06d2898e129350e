"""The task sampler: which task of its domain the next group works on. Whose turn it is, is not asked here
(`learner/shares.py`). Tasks come uniformly, every one once per epoch, or by weights that follow what is known of them
(`learner/weighing.py`).

A domain's order in an epoch follows from (seed, domain, epoch) alone, so its state is two numbers. No task ever has probability
zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config_tasks import TasksConfig
from common.seeds import derive_seed
from common.tasks import fingerprint
from common.types import Task
from learner.tasks import TasksError
from learner.weighing import Weigher, weigher


@dataclass
class TaskStatistics:
    n: int = 0  # scored rollouts
    successes: int = 0


class _Domain:
    """Its tasks, and a cursor over them, shuffled. `cursor == len(tasks)` is the start of the next epoch."""

    def __init__(self, tasks: Sequence[Task], weigher: Weigher | None) -> None:
        self.tasks, self.weigher = tasks, weigher
        self.fingerprint = fingerprint(tasks)
        self.index = {task.id: index for index, task in enumerate(tasks)}
        self.epoch = self.cursor = 0
        self.statistics: dict[str, TaskStatistics] = {}  # by task id

    def state(self) -> dict[str, Any]:
        weights = self.weigher.state() if self.weigher else {"rows": {}}
        return {
            "fingerprint": self.fingerprint,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "statistics": {task: [x.n, x.successes] for task, x in self.statistics.items()},
            "weights": weights | {"rows": {self.tasks[index].id: row for index, row in weights["rows"].items()}},
        }

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """What is known of tasks that are still here; whether all of them are, and the cursor with them."""
        same = saved["fingerprint"] == self.fingerprint
        self.epoch, self.cursor = (saved["epoch"], saved["cursor"]) if same else (0, 0)
        self.statistics = {task: TaskStatistics(*x) for task, x in saved["statistics"].items() if task in self.index}
        weights = saved.get("weights", {"rows": {}})
        if self.weigher and weights["rows"]:
            rows = {self.index[task]: row for task, row in weights["rows"].items() if task in self.index}
            self.weigher.restore(weights | {"rows": rows})
        return same


class TaskSampler:
    """Draws training tasks. Same seed, same tasks, same history: same draws."""

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        seed: int,
        config: TasksConfig | None = None,
        group_size: int = 1,
    ) -> None:
        """`tasks` by domain. Raises TasksError when a domain has no tasks."""
        for name, listed in tasks.items():
            if not listed:
                raise TasksError(f"domain {name!r} lists no training tasks; set domains.train_tasks or its options")
        self._seed = seed
        self._domains = {
            name: _Domain(listed, weigher(config, len(listed), group_size) if config else None) for name, listed in tasks.items()
        }
        self._rng = np.random.default_rng(derive_seed(seed, "domains"))
        self._orders: dict[str, tuple[int, np.ndarray]] = {}  # domain -> epoch and its order

    @property
    def statistics(self) -> dict[str, dict[str, TaskStatistics]]:
        """Domain -> task id -> numbers."""
        return {name: domain.statistics for name, domain in self._domains.items()}

    def next(self, name: str) -> Task:
        """Of the domain, for the policy."""
        domain = self._domains[name]
        if domain.weigher is None:
            return self.next_uniform(name)
        return domain.tasks[domain.weigher.tree.find(float(self._rng.random()))]

    def next_uniform(self, name: str) -> Task:
        """Of the domain, every task once per epoch, whatever the policy makes of it: for reference solutions."""
        domain = self._domains[name]
        if domain.cursor >= len(domain.tasks):
            domain.epoch, domain.cursor = domain.epoch + 1, 0
        task = domain.tasks[int(self._order(name, domain)[domain.cursor])]
        domain.cursor += 1
        return task

    def record(self, task: Task, success: bool) -> None:
        """One scored rollout of the policy on `task`. Failed rollouts are never recorded."""
        domain = self._domains[task.domain]
        numbers = domain.statistics.setdefault(task.id, TaskStatistics())
        numbers.n += 1
        numbers.successes += success
        if domain.weigher and task.id in domain.index:  # else of a checkpoint with other tasks
            domain.weigher.record(domain.index[task.id], success)

    def state(self) -> dict[str, Any]:
        return {
            "rng": self._rng.bit_generator.state,
            "domains": {name: domain.state() for name, domain in self._domains.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go on where `state` was saved; returns the domains whose tasks changed: these start at their first epoch, and keep
        what is known of the tasks that still exist."""
        self._rng.bit_generator.state = state["rng"]
        nothing = {"fingerprint": "", "epoch": 0, "cursor": 0, "statistics": {}}
        return [name for name, domain in self._domains.items() if not domain.restore(state["domains"].get(name, nothing))]

    def _order(self, name: str, domain: _Domain) -> np.ndarray:
        """The order of the domain's tasks in its epoch, [tasks] int64."""
        epoch, order = self._orders.get(name, (-1, np.zeros(0, np.int64)))
        if epoch != domain.epoch:
            order = np.random.default_rng(derive_seed(self._seed, name, domain.epoch)).permutation(len(domain.tasks))
            self._orders[name] = (domain.epoch, order)
        return order
