"""How well the policy does in a whole domain, in its newest rollouts and in the long run, and whether it fell all at once.

An outage looks like a hard domain: every rollout is scored, and every score is 0. It is told apart by how sudden it is. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

GROUPS = 32  # in the window of newest rollouts
MEMORY = 10  # windows: after so many, an outcome has 1/e of its weight in the long run
SIGMAS = 3.0  # that the newest rollouts must be below the long run
FALL, RECOVERY = 0.5, 0.75  # of the long run: below it is a drop, above it is over


def fell(before: float, groups: float, now: float) -> bool:
    """Whether success `now`, over GROUPS groups, is less than half of `before`, over `groups`, and chance does not explain it: by
    the test of two proportions, each group taken for one observation, as rollouts of one task tell the same."""
    pooled = (before * groups + now * GROUPS) / (groups + GROUPS)
    noise = math.sqrt(pooled * (1 - pooled) * (1 / groups + 1 / GROUPS))
    return now < FALL * before and before - now > SIGMAS * noise


class DomainSuccess:
    def __init__(self, group_size: int) -> None:
        self._newest: deque[bool] = deque(maxlen=GROUPS * group_size)
        self._won = 0  # of the newest
        self._decay = math.exp(-1 / (MEMORY * GROUPS * group_size))
        self._successes = self._rollouts = 0.0  # older than the window, decayed
        self.dropped = False

    @property
    def newest(self) -> float:
        """Success of the newest rollouts; 0 until there is a window full of them."""
        return self._won / len(self._newest) if len(self._newest) == self._newest.maxlen else 0.0

    @property
    def long_run(self) -> float:
        """Success before them."""
        return self._successes / self._rollouts if self._rollouts else 0.0

    def record(self, success: bool) -> bool:
        """A scored rollout of training; whether success has just dropped. It is told once, and again only after a recovery; what
        comes in between is no part of the long run."""
        if len(self._newest) == self._newest.maxlen:
            oldest = self._newest[0]
            self._won -= oldest
            if not self.dropped:
                self._successes = self._successes * self._decay + oldest
                self._rollouts = self._rollouts * self._decay + 1
        self._newest.append(success)
        self._won += success
        if self.dropped:
            self.dropped = self.newest < RECOVERY * self.long_run
            return False
        groups = self._rollouts * GROUPS / len(self._newest)
        self.dropped = groups >= GROUPS and fell(self.long_run, groups, self.newest)
        return self.dropped

    def state(self) -> dict[str, Any]:
        return {
            "newest": [int(success) for success in self._newest],
            "long_run": [self._successes, self._rollouts],
            "dropped": self.dropped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._newest.extend(map(bool, state["newest"]))
        self._won = sum(self._newest)
        self._successes, self._rollouts = state["long_run"]
        self.dropped = state["dropped"]
