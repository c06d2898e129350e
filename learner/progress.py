"""What the control plane is doing: the status report, numbers and (of `learner/stalls.py`) sentences. Called under its lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.waits import Edge
from learner import stalls

if TYPE_CHECKING:
    from learner.control import Control

ACTOR_MEMORY_S = 60.0  # an actor silent for so long leaves the status report
RATE_WINDOW_S = 30.0  # of tokens per second


@dataclass
class Actor:
    """What an actor said last."""

    seen: float
    running: int = 0
    edges: list[Edge] = field(default_factory=list)  # what its rollouts and their sessions wait for
    metrics: dict[str, float] = field(default_factory=dict)  # "outcome/WORD": rollouts that left it


def remembered(actors: dict[str, Actor], now: float) -> dict[str, Actor]:
    return {name: actor for name, actor in actors.items() if actor.seen >= now - ACTOR_MEMORY_S}


class Rate:
    """Tokens per second, over the newest deliveries."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> None:
        self._arrivals.append((now, tokens))

    def per_second(self, now: float) -> float:
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        seconds = max(1.0, now - self._arrivals[0][0]) if self._arrivals else 1.0
        return sum(tokens for _, tokens in self._arrivals) / seconds


def report(control: Control, now: float) -> dict[str, Any]:
    """The status report, as `launch.py` shows it."""
    ledger, last = control.ledger, control.last
    warm = control.phase == "warm"
    return {
        "phase": control.phase,
        "incarnation": control.incarnation,
        "update": ledger.warm_update if warm else ledger.update,
        "updates": ledger.rules.warm_updates if warm else ledger.rules.updates,
        "success": dict(last.success) if last else {},
        "lag": {"mean": last.lag.mean, "max": last.lag.max} if last else {"mean": 0.0, "max": 0},
        "tokens_per_s": control.rate.per_second(now),
        "tokens": dict(control.tokens),
        "rollouts": control.counts(),
        "reasons": control.reasons(),
        "deliveries": dict(control.deliveries),
        "engines": [
            {"name": e.name, "pool": e.pool, "state": e.state, "version": e.version, "reason": e.reason} for e in control.engines
        ],
        "actors": [
            {"id": name, "running": actor.running, "age_s": now - actor.seen, **actor.metrics}
            for name, actor in control.actors.items()
        ],
        "evals": control.evaluation.results,
        **stalls.Graph(control, now).report(),
    }
