"""How many turns training rollouts get, from stage to stage (ScalingInter-RL, arXiv 2509.08755). Stages count from 1; 0 is the
whole budget of the domain: without a curriculum, for evaluations, for reference solutions.

Pure: no clock, no I/O. `stages` is a function of the update alone, so nothing of it is saved.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from common.config_tasks import CurriculumConfig


class Curriculum:
    def __init__(self, config: CurriculumConfig) -> None:
        self._kind, self._mastered = config.kind, config.mastered
        self._turns, self._every = config.stages.turns, config.stages.every
        self._window: deque[bool] = deque(maxlen=config.window)  # success: the newest rollouts of the present stage
        self._reached = 1  # success: the present stage

    def stage(self, update: int) -> int:
        """Of groups that open after `update` committed updates."""
        if self._kind == "none":
            return 0
        return min(1 + update // self._every, len(self._turns)) if self._kind == "stages" else self._reached

    def max_turns(self, stage: int, limit: int) -> int:
        """Of a rollout in a group of `stage`, in a domain whose limits.max_turns is `limit`."""
        return min(limit, self._turns[min(stage, len(self._turns)) - 1]) if stage and self._turns else limit

    def record(self, stage: int, success: bool) -> None:
        """A scored rollout of a group of `stage`. The next stage comes when enough of the newest rollouts succeeded within the
        present budget; those of earlier stages say nothing about it."""
        if self._kind != "success" or stage != self._reached or self._reached == len(self._turns):
            return
        self._window.append(success)
        if len(self._window) == self._window.maxlen and sum(self._window) >= self._mastered * len(self._window):
            self._reached += 1
            self._window.clear()

    def state(self) -> dict[str, Any]:
        return {"stage": self._reached, "window": list(self._window)}

    def restore(self, state: dict[str, Any]) -> None:
        self._reached = max(1, min(state["stage"], len(self._turns)))
        self._window.extend(state["window"])
