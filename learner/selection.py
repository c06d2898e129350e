"""Which finished groups train. Pure functions of the rewards of groups; what becomes of the others is the ledger's business.

    signal    DAPO's dynamic sampling (arXiv 2503.14476): a group of equal rewards teaches nothing and makes room for another
    top_std   StarPO-S (arXiv 2504.20073, eq. 7): of all groups drawn, the share with the highest deviation of rewards
    mass      RAGEN-2 (arXiv 2604.06268): the groups with the most spread, until they hold a share of the spread of all

Dimension key: N groups, G rewards of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.config import RunConfig

SLACK = 0.01  # of the sum of deviations, in RAGEN-2's code (selection_eps)
ZERO = 1e-10  # deviations up to here count as none, in RAGEN-2's code

Rewards = Sequence[float]  # [G], of the scored members of a group: stale ones too


@dataclass(frozen=True)
class Selection:
    """`[tasks] select` and its numbers."""

    name: str = "all"  # "all", "signal", "top_std" or "mass"
    share: float = 1.0
    form: str = "paper"  # of mass: "paper", "linear" or "softmax"
    include_zero: bool = False
    max_refills: int = 5

    @classmethod
    def of(cls, config: RunConfig) -> Selection:
        tasks = config.tasks
        return cls(tasks.select, tasks.kept_share, tasks.form, tasks.include_zero, tasks.max_refills)

    def candidates(self, groups_per_update: int) -> int:
        """Groups that are drawn for an update."""
        return round(groups_per_update / self.share) if self.name == "top_std" else groups_per_update

    def fruitless(self, rewards: Rewards) -> bool:
        """Whether a group is not worth waiting with: it closes, and makes room for another."""
        return self.name == "signal" and max(rewards) == min(rewards)

    def chosen(self, groups: Sequence[Rewards], groups_per_update: int) -> list[int]:
        """Indices, rising, of the candidates that train; none when `mass` finds no spread at all."""
        if self.name == "top_std":
            return sorted(highest([deviation(rewards) for rewards in groups])[:groups_per_update])
        if self.name != "mass":
            return list(range(len(groups)))
        scores = [deviation(rewards) for rewards in groups]
        if self.form == "paper":
            return sorted(mass([score * score for score in scores], self.share))
        return sorted(mass_of_code(scores, self.share, self.form, self.include_zero))


ALL = Selection()


def deviation(rewards: Rewards) -> float:
    """Standard deviation with ddof 1, as StarPO-S and RAGEN-2 have it; 0 of fewer than two, and exactly 0 of equal ones."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 and max(rewards) != min(rewards) else 0.0


def highest(scores: Sequence[float]) -> list[int]:
    """Indices by falling score; of equal ones the oldest first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def mass(scores: Sequence[float], share: float, slack: float = 0.0) -> list[int]:
    """The fewest of the highest scores whose sum reaches `share * sum(scores) - slack`, without scores of 0. RAGEN-2's paper:
    the scores are variances (ddof 1), no slack."""
    kept: list[int] = []
    total, threshold = 0.0, share * sum(scores) - slack
    for index in highest(scores):
        if total >= threshold or scores[index] <= 0:
            break
        kept.append(index)
        total += scores[index]
    return kept


def mass_of_code(scores: Sequence[float], share: float, form: str, include_zero: bool) -> list[int]:
    """As in RAGEN-2's code (`rollout_filter.py`), which calls its metric `reward_variance` and has deviations for scores.
    "linear": as `mass`, with a slack. "softmax": the nucleus of softmax(scores), which depends on the scale of rewards."""
    taking_part = [index for index, score in enumerate(scores) if include_zero or abs(score) > ZERO]
    if share >= 1 or not taking_part:
        return taking_part
    left = np.array([scores[index] for index in taking_part])
    if form == "linear":
        return [taking_part[index] for index in mass(left.tolist(), share, SLACK)]
    odds = np.exp(left - left.max())
    order = highest(odds.tolist())
    count = int(np.searchsorted(np.cumsum(odds[order] / odds.sum()), share)) + 1
    return [taking_part[index] for index in order[:count]]
