"""What the control plane is doing, in numbers and in one sentence: the status report. Called with its lock held."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from learner import assignments
from learner.rollouts import UNDELIVERED, Kind, Rollout, State

if TYPE_CHECKING:
    from learner.control import Control

RATE_WINDOW_S = 30.0  # of tokens per second
REPORTED_WAITS = 20  # of actors, longest first


@dataclass
class Actor:
    """What an actor said last."""

    seen: float
    running: int = 0
    waits: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


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
        "actors": [{"id": name, "running": actor.running, "age_s": now - actor.seen} for name, actor in control.actors.items()],
        "waits": _waits(control, now),
        "evals": control.evaluation.results,
        "sentence": sentence(control, now),
    }


def sentence(control: Control, now: float) -> str:
    if control.running is not None:
        batch = control.running
        what = "supervised update" if batch.kind is Kind.WARM else "update"
        return f"learner trains {what} {batch.update + 1} on {len(batch.groups)} groups"
    return wait_sentence(control, now) if control.wait_name else f"learner is in phase {control.phase}"


def wait_sentence(control: Control, now: float) -> str:
    """Who the learner waits for, and since when."""
    ledger = control.ledger
    if control.wait_name == "evaluate":
        job = next((job for job in control.evaluation.jobs if job.rollouts), control.evaluation.jobs[-1])
        total = sum(len(x) for x in job.successes.values()) + sum(job.failed.values()) + len(job.rollouts)
        head = f"learner waits for {len(job.rollouts)} of {total} held-out rollouts ({job.mode}, version {job.version})"
        open_rollouts = [r for r in ledger.rollouts(Kind.EVAL) if r.state in UNDELIVERED]
        blocked = "" if assignments.serves(control.engines, job.version) else f"no engine serves version {job.version}"
    else:
        kind = Kind.WARM if control.phase == "warm" else Kind.RL
        missing = max(0, ledger.need(kind) - len(ledger.ready(kind)))
        open_groups = [g for g in ledger.groups.values() if g.kind is kind and not g.closed]
        domains = Counter(g.task.domain for g in open_groups)
        head = f"learner waits for {missing} groups of {', '.join(sorted(domains)) or 'any domain'}"
        open_rollouts = [r for g in open_groups for r in g.rollouts if r.state in UNDELIVERED]
        blocked = "" if kind is Kind.WARM or assignments.fresh(control.engines, ledger) else "no engine has young enough weights"
    return f"{head}: {_culprit(control, open_rollouts, blocked, now)}"


def _culprit(control: Control, rollouts: list[Rollout], blocked: str, now: float) -> str:
    leased = [r for r in rollouts if r.state is State.LEASED]
    if leased:
        oldest = min(leased, key=lambda r: r.leased_at)
        return f"oldest rollout {oldest.id} on {oldest.actor} for {now - oldest.leased_at:.1f} s"
    if blocked:
        engines = "; ".join(
            f"{e.name} is {e.state} at version {e.version}{f' ({e.reason})' if e.reason else ''}" for e in control.engines
        )
        return f"{blocked}: {engines or 'there are no engines yet'}"
    if not control.actors:
        return "no actor has called"
    return f"{len(rollouts)} rollouts are pending, no actor has taken them"


def _waits(control: Control, now: float) -> list[dict[str, Any]]:
    """The learner's own wait, then the longest of the actors'."""
    own = []
    if control.wait_name and control.running is None:
        since = now - control.wait_since
        on = wait_sentence(control, now).removeprefix("learner waits for ")  # a row says who waits
        own = [{"owner": "learner", "name": control.wait_name, "on": on, "seconds": since}]
        own[0]["deadline"] = control.wait_limit
    theirs = [wait | {"seconds": wait["seconds"] + now - actor.seen} for actor in control.actors.values() for wait in actor.waits]
    return own + sorted(theirs, key=lambda wait: -wait["seconds"])[:REPORTED_WAITS]
