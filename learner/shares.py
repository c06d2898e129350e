"""What each domain has of the work, by its weight: seats in a batch, and of the groups that may be open.

The next batches are planned: how many groups each domain has in each of them, by largest remainder, where what one batch rounds
away is owed in the next. A domain's share of capacity is what it has in the batches that capacity is for. So shares sum to the
capacity, and a domain whose weight is worth a third of a group a batch has a group in every third one.

Two things must not keep the others waiting. A domain whose groups do not come (its env servers hang, or it is that slow) is
`late` once the learner has waited for it for long: it lends its share, and nobody waits for it until a group of it is complete.
A group that ended with nothing to train on (failed, filtered) has used its seat, which others fill for that once.

Pure: no clock. How many groups there are is counted by whoever asks (`learner/ledger.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from learner.rollouts import Group, Rollout, State

Claims = dict[str, float]  # domain -> groups, with fractions
Seats = dict[str, int]  # domain -> groups

DIGITS = 9  # that are compared: equal claims stay equal, whatever was added up before


class Held(NamedTuple):
    """Groups of one domain."""

    open: int  # in the running update too
    ready: int  # complete, with something to train on


NONE = Held(0, 0)


def apportion(total: int, claims: Mapping[str, float]) -> Seats:
    """Whole numbers, not negative, that sum to `total`, by largest remainder; of equal ones the first. `claims` sum to about
    `total`. Empty without claims."""
    given = {name: max(0, math.floor(round(claim, DIGITS))) for name, claim in claims.items()}
    while given and (left := total - sum(given.values())):
        if left > 0:
            given[max(given, key=lambda name: round(claims[name] - given[name], DIGITS))] += 1
        else:
            given[min(filter(given.get, given), key=lambda name: round(claims[name] - given[name], DIGITS))] -= 1
    return given


class Shares:
    """Of one kind of training. `weights` by domain."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self.locked: Collection[str] = ()  # domains that take no part
        self.late: set[str] = set()
        self.spent: Counter[str] = Counter()  # groups that ended with nothing to train on, since a batch left
        self._owed: Claims = {}

    @property
    def names(self) -> list[str]:
        """Domains that take part."""
        return [name for name in self._weights if name not in self.locked]

    # ---- the plan ----------------------------------------------------------------------------------------

    def seats(self, need: int) -> Seats:
        """In the next batch, of `need` groups."""
        return apportion(need, self._claims(need, self._owed))

    def of_capacity(self, need: int, batches: int) -> Seats:
        """In the next `batches` batches together."""
        owed, total = self._owed, Counter(dict.fromkeys(self.names, 0))
        for _ in range(batches):
            owed, given = self._next(need, owed)
            total.update(given)
        return dict(total)

    def made(self, need: int) -> None:
        """The next batch is past."""
        self._owed, _ = self._next(need, self._owed)

    def _claims(self, need: int, owed: Mapping[str, float]) -> Claims:
        own = {name: self._weights[name] for name in self.names}
        return {name: need * weight / sum(own.values()) + owed.get(name, 0.0) for name, weight in own.items()}

    def _next(self, need: int, owed: Mapping[str, float]) -> tuple[Claims, Seats]:
        claims = self._claims(need, owed)
        given = apportion(need, claims)
        return {name: claim - given[name] for name, claim in claims.items()}, given

    # ---- who opens a group, who leases --------------------------------------------------------------------

    def to_open(self, need: int, batches: int, held: Mapping[str, Held]) -> Iterator[str]:
        """Whose group opens next, until nobody may open more: each time the domain that has least of its share open. Whoever asks
        for another has opened the one before."""
        share, room = self.now(need, batches, held)
        opened = {name: held.get(name, NONE).open for name in share}
        while may := [name for name in share if opened[name] < share[name] and (room > 0 or name in self.late)]:
            name = min(may, key=lambda name: opened[name] / share[name])
            yield name
            opened[name] += 1
            room -= name not in self.late

    def now(self, need: int, batches: int, held: Mapping[str, Held]) -> tuple[Seats, int]:
        """How many groups each domain may have open at present, with what others lend; and how many more may open in all. What a
        late domain holds is not counted, as nobody waits for it; it may try one group at a time."""
        share = self.of_capacity(need, batches)
        unfilled = self._unfilled(need, held)
        counted = sum(groups.open for name, groups in held.items() if name not in self.late)
        room = need * batches - counted + sum(unfilled.values())
        lent = sum(unfilled.values()) + sum(share.get(name, 0) for name in self.late)
        takers = {name: self._weights[name] for name in share if name not in self.late and name not in unfilled}
        more = apportion(lent, {name: lent * weight / sum(takers.values()) for name, weight in takers.items()})
        return {name: min(1, n) if name in self.late else n + more.get(name, 0) for name, n in share.items()}, room

    def _unfilled(self, need: int, held: Mapping[str, Held]) -> Seats:
        """Seats of the next batch that were used for nothing: others may open groups for them. None when all were."""
        seats = self.seats(need)
        out = {
            name: seats[name] - ready
            for name in self.names
            if name not in self.late and 0 < seats[name] - (ready := held.get(name, NONE).ready) <= self.spent[name]
        }
        return out if len(out) + len(self.late & set(seats)) < len(seats) else {}

    def fair(self, waiting: Mapping[str, Sequence[Rollout]], leased: Mapping[str, int], count: int) -> list[Rollout]:
        """The next `count` of those `waiting`, by domain and in order: each time of the domain that has `leased` least for its
        weight."""
        have = {name: leased.get(name, 0) for name in waiting}
        ends = {name: have[name] + len(rollouts) for name, rollouts in waiting.items()}
        out: list[Rollout] = []
        while len(out) < count and (left := [name for name in waiting if have[name] < ends[name]]):
            name = min(left, key=lambda name: (have[name] + 1) / self._weights.get(name, 1.0))
            out.append(waiting[name][have[name] - ends[name]])
            have[name] += 1
        return out

    # ---- who has a seat -----------------------------------------------------------------------------------

    def missing(self, need: int, held: Mapping[str, Held]) -> Seats:
        """The groups that a batch has to wait for, by domain: those that have a seat and are open."""
        seats = {name: n for name, n in self.seats(need).items() if name not in self.late}
        found = {name: (n - self.spent[name], held.get(name, NONE)) for name, n in seats.items()}
        return {name: n for name, (wanted, has) in found.items() if (n := min(wanted, has.open) - has.ready) > 0}

    def filled(self, need: int, ready: Sequence[Group]) -> list[Group]:
        """`need` of `ready`, in its order: each domain has its seats, the first of all others fill the rest."""
        left = Counter(self.seats(need))
        seated, others = [], []
        for group in ready:
            (seated if left[group.task.domain] > 0 else others).append(group.id)
            left[group.task.domain] -= 1
        chosen = {*seated, *others[: need - len(seated)]}
        return [group for group in ready if group.id in chosen]

    def heard(self, group: Group) -> None:
        """Of a group that may have closed: what is complete ends its domain's lateness, what came to nothing has used a seat."""
        name = group.task.domain
        if group.ready:
            self.late.discard(name)
        self.spent[name] += all(rollout.state in (State.FILTERED, State.FAILED) for rollout in group.rollouts)

    def give_up(self, need: int, held: Mapping[str, Held]) -> list[str]:
        """The learner has waited for too long: whose groups are missing is late, as long as somebody else is not. Where none is
        missing and the batch is not full all the same, whoever holds groups that are not complete is."""
        full = sum(groups.ready for groups in held.values()) >= need
        missing = self.missing(need, held)
        if not missing and not full:
            missing = {name: groups.open - groups.ready for name, groups in held.items() if groups.open > groups.ready}
        found = [name for name in self.names if name in missing and name not in self.late]
        if not set(self.names) - self.late - set(found):
            return []
        self.late |= set(found)
        return found

    # ---- checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"owed": dict(self._owed), "late": sorted(self.late), "spent": dict(self.spent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Domains that are gone since are left out."""
        self._owed = {name: claim for name, claim in state["owed"].items() if name in self._weights}
        self.late = set(state["late"]) & set(self._weights)
        self.spent = Counter(state["spent"])
