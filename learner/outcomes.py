"""What became of rollouts that are no longer open: counts by kind, domain, outcome and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from learner.rollouts import OUTCOMES, Group, Kind, Rollout, State

REASON_MEMORY = 64  # distinct reasons counted per kind and domain; further ones are counted as "other"
TOLD = (State.FILTERED, State.STALE, State.FAILED)  # whose reasons are counted

Key = tuple[Kind, str, State, str]


class Outcomes:
    """Totals of folded groups; what is asked includes `groups` that are still open, whose rollouts may have an outcome."""

    def __init__(self) -> None:
        self._totals: Counter[Key] = Counter()

    def fold(self, group: Group) -> None:
        for rollout in group.rollouts:
            key = _key(group, rollout)
            if key not in self._totals and sum(known[:2] == key[:2] for known in self._totals) >= REASON_MEMORY:
                key = (*key[:3], "other")
            self._totals[key] += 1

    def tally(self, groups: Iterable[Group], kinds: tuple[Kind, ...], domain: str = "") -> Counter[State]:
        """Rollouts of `kinds` by state, of `domain` or of all."""
        out: Counter[State] = Counter()
        for (kind, name, state, _), count in self._all(groups).items():
            if kind in kinds and domain in ("", name):
                out[state] += count
        return out

    def counts(self, groups: Iterable[Group], kinds: tuple[Kind, ...], domain: str = "") -> dict[str, int]:
        """{dispatched, open, trained, filtered, stale, failed, cancelled}."""
        tally = self.tally(groups, kinds, domain)
        named = {state.value: tally[state] for state in OUTCOMES if state is not State.EVALUATED or Kind.EVAL in kinds}
        total = sum(tally.values())
        return {"dispatched": total, "open": total - sum(named.values()), **named}

    def reasons(self, groups: Iterable[Group], kinds: tuple[Kind, ...]) -> dict[str, dict[str, int]]:
        """Outcome -> reason -> rollouts."""
        out: dict[str, Counter[str]] = {}
        for (kind, _, state, reason), count in self._all(groups).items():
            if kind in kinds and reason:
                out.setdefault(state.value, Counter())[reason] += count
        return {state: dict(counter) for state, counter in out.items()}

    def _all(self, groups: Iterable[Group]) -> Counter[Key]:
        return self._totals + Counter(_key(group, rollout) for group in groups for rollout in group.rollouts)

    def state(self) -> list[list[Any]]:
        return [[kind.value, domain, state.value, reason, n] for (kind, domain, state, reason), n in self._totals.items()]

    def restore(self, state: Iterable[list[Any]]) -> None:
        """Totals of a version that did not count by domain belong to none."""
        rows = (row if len(row) == 5 else [row[0], "", *row[1:]] for row in state)
        self._totals = Counter({(Kind(kind), domain, State(s), reason): n for kind, domain, s, reason, n in rows})


def _key(group: Group, rollout: Rollout) -> Key:
    return (group.kind, group.task.domain, rollout.state, rollout.reason if rollout.state in TOLD else "")
