"""How much each task of a domain is worth trying: weights in (0, 1] from what is known of the task, and draws by them.

A weight follows from its task's row of numbers alone, and a draw from the weights and one uniform number; so rows, saved and
read back, give the very same draws. Recording a rollout and drawing a task take time that grows with the logarithm of the
number of tasks.

Dimension key: N tasks of a domain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from common.config_tasks import TasksConfig

PRIOR = 0.5  # successes, and as many failures, that a task is thought to have had before it was seen (Jeffreys)


class SumTree:
    """Draws indices by weight. Every node is the sum of the two below it, computed from these alone: the tree is the same
    however its weights came to be what they are."""

    def __init__(self, weights: np.ndarray) -> None:
        """`weights` [N], positive."""
        self._size = 1 << max(0, len(weights) - 1).bit_length()
        level = np.zeros(self._size)
        level[: len(weights)] = weights
        levels = [level]
        while len(level) > 1:
            level = level[::2] + level[1::2]
            levels.append(level)
        self._nodes: list[float] = [0.0, *np.concatenate(levels[::-1]).tolist()]  # node i has the children 2i and 2i + 1

    def set(self, index: int, weight: float) -> None:
        nodes, at = self._nodes, self._size + index
        nodes[at] = weight
        while at > 1:
            at //= 2
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]

    def find(self, uniform: float) -> int:
        """The index that `uniform`, in [0, 1), falls on."""
        nodes, at = self._nodes, 1
        left = uniform * nodes[1]
        while at < self._size:
            at *= 2
            if left >= nodes[at] and nodes[at + 1] > 0:  # what is right of the last task has no weight, also after rounding
                left -= nodes[at]
                at += 1
        return at - self._size


class Weigher(Protocol):
    """The tasks of one domain, by index."""

    tree: SumTree

    def record(self, index: int, success: bool) -> None: ...

    def state(self) -> dict[str, Any]:
        """`rows`: index -> numbers of the tasks of which something is known. All of it JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state whose indices are those of this domain. Nothing was recorded before."""
        ...


def variance_weight(success: float, floor: float) -> float:
    """`max(floor, 4 p (1 - p))`: what a 0/1 reward's variance is of its maximum. A group of equal rewards has advantages of
    zero; at p the rollouts of a group differ most often where this is largest."""
    return max(floor, 4 * success * (1 - success))


class Variance:
    """Weighs tasks by the variance of their success, from counts in which newer rollouts push older ones out:
    `p = (successes + 1/2) / (rollouts + 1)`, both decayed. A task that nobody has tried has p = 1/2, the greatest weight."""

    def __init__(self, count: int, decay: float, floor: float) -> None:
        """`decay` per rollout."""
        self._decay, self._floor = decay, floor
        self._successes, self._rollouts = np.zeros(count), np.zeros(count)  # [N], decayed
        self.tree = SumTree(np.ones(count))

    def record(self, index: int, success: bool) -> None:
        self._successes[index] = self._successes[index] * self._decay + success
        self._rollouts[index] = self._rollouts[index] * self._decay + 1
        self._weigh(index)

    def success(self, index: int) -> float:
        return float((self._successes[index] + PRIOR) / (self._rollouts[index] + 2 * PRIOR))

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self._rollouts)
        rows = np.stack([self._successes[seen], self._rollouts[seen]], axis=1)
        return {"rows": dict(zip(seen.tolist(), rows.tolist(), strict=True))}

    def restore(self, state: Mapping[str, Any]) -> None:
        for index, (successes, rollouts) in state["rows"].items():
            self._successes[index], self._rollouts[index] = successes, rollouts
            self._weigh(index)

    def _weigh(self, index: int) -> None:
        self.tree.set(index, variance_weight(self.success(index), self._floor))


class Alignment:
    """Weighs tasks by how close their own learning curve is to that of all (LIMR, arXiv 2502.11886, eq. 2 and 3), from the run's
    own history: 1 above the threshold and while too little is known, else the floor.

        s_i = 1 - sum_k (r_i^k - r_avg^k)^2 / sum_k (1 - r_avg^k)^2        r_avg^k: mean of r_i^k over tasks

    Always solved: 0. An epoch k ends when as many rollouts were scored as make a group per task; `r_i^k` is the share of task
    i's rollouts in it that succeeded (accuracy, as in LIMR's code; in the paper it is the reward). A task that is not seen in an
    epoch has no part in it. The sums grow epoch by epoch, so nothing but two sums is kept of a task.
    """

    def __init__(self, count: int, group_size: int, config: TasksConfig) -> None:
        self._threshold, self._visits, self._floor = config.threshold, config.visits, config.floor
        self._epoch = count * group_size  # rollouts
        self._scored = 0  # in this epoch
        # [N, 5]: sums of (r - r_avg)^2 and of (1 - r_avg)^2, epochs seen; in this epoch: successes, rollouts
        self._rows = np.zeros((count, 5))
        self.tree = SumTree(np.ones(count))

    def record(self, index: int, success: bool) -> None:
        self._rows[index, 3:] += success, 1
        self._scored += 1
        if self._scored >= self._epoch:
            self._end_epoch()

    def scores(self) -> np.ndarray:
        """[N], as far as whole epochs tell."""
        off, most = self._rows[:, 0], self._rows[:, 1]
        return 1 - np.divide(off, most, out=np.ones(len(off)), where=most > 0)

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self._rows.any(axis=1))
        return {"rows": dict(zip(seen.tolist(), self._rows[seen].tolist(), strict=True)), "scored": self._scored}

    def restore(self, state: Mapping[str, Any]) -> None:
        for index, row in state["rows"].items():
            self._rows[index] = row
        self._scored = state["scored"]
        self._weigh()

    def _end_epoch(self) -> None:
        seen = self._rows[:, 4] > 0
        rewards = self._rows[seen, 3] / self._rows[seen, 4]
        average = rewards.mean()
        self._rows[seen, 0] += (rewards - average) ** 2
        self._rows[seen, 1] += (1 - average) ** 2
        self._rows[seen, 2] += 1
        self._rows[:, 3:] = 0
        self._scored = 0
        self._weigh()

    def _weigh(self) -> None:
        low = (self._rows[:, 2] >= self._visits) & ~(self.scores() > self._threshold)
        self.tree = SumTree(np.where(low, self._floor, 1.0))


def weigher(config: TasksConfig, count: int, group_size: int) -> Weigher | None:
    """For `count` tasks; None where all weigh the same."""
    if config.sampler == "variance":
        return Variance(count, config.decay ** (1 / group_size), config.floor)
    return Alignment(count, group_size, config) if config.sampler == "limr" else None
