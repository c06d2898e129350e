"""What the control plane is doing: the status report, numbers and (of `learner/stalls.py`) sentences. Called under its lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.waits import Edge
from learner import stalls
from learner.rollouts import TRAINING
from learner.shares import NONE

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
        self._arrivals: deque[tuple[float, int]] = deque()  # of the window before the newest one

    def add(self, now: float, tokens: int) -> None:
        self._arrivals.append((now, tokens))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()

    def per_second(self, now: float) -> float:
        self._forget(now)
        seconds = max(1.0, now - self._arrivals[0][0]) if self._arrivals else 1.0
        return sum(tokens for _, tokens in self._arrivals) / seconds


def domains(control: Control) -> dict[str, Any]:
    """With several domains: what each has of the work. Groups open, how many may be, complete ones; outcomes of rollouts."""
    ledger, kind = control.ledger, control.kind
    held, shares = ledger.held(kind), ledger.shares[kind]
    if len(ledger.rules.weights) == 1:
        return {}
    share, _ = shares.now(ledger.need(kind), ledger.batches(kind), held)
    state = {name: "locked" if name in shares.locked else "late" if name in shares.late else "" for name in ledger.rules.weights}
    return {
        name: {"open": held.get(name, NONE).open, "share": share.get(name, 0), "ready": held.get(name, NONE).ready, "state": why}
        | {"rollouts": ledger.counts(*TRAINING, domain=name)}
        for name, why in state.items()
    }


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
        "domains": domains(control),
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
