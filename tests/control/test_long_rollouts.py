"""079: rollouts that take longer than tokens may be old, played against the ledger tick by tick."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from common.types import Task
from learner.ledger import Ledger
from learner.lengths import Lengths
from learner.rollouts import Kind, Origin, Rollout
from tests.control.scripted import rules

TICKS, SLOTS, LONG = 400, 16, 10


@dataclass
class Play:
    """Engines with SLOTS places. A tick is long enough for one update, and for a short rollout; a long one takes LONG ticks, and
    samples with every version that is published meanwhile."""

    ledger: Ledger
    long_every: int  # of so many tasks one is long; 0: none
    updates: int = 0
    again: int = 0  # slot ticks of attempts after the first
    busy: int = 0
    trained: Counter[int] = field(default_factory=Counter)  # by ticks of the rollout
    lengths: Lengths = field(default_factory=Lengths)

    def run(self) -> Play:
        running: list[tuple[Rollout, int, int]] = []  # the rollout, when it is done, the version that it began with
        version, opened = 1, 0
        for tick in range(TICKS):
            for _ in range(max(0, self.ledger.capacity(Kind.RL))):
                ticks = LONG if self.long_every and opened % self.long_every == 0 else 1
                self.ledger.open(Kind.RL, Task("toy", f"t{opened}", opened, {"ticks": ticks}))
                opened += 1
            for rollout in self.ledger.lease("a", SLOTS - len(running), Kind.RL, 0.0):
                running.append((rollout, tick + self._ticks(rollout), version))
            self.busy += len(running)
            self.again += sum(rollout.attempt > 1 for rollout, *_ in running)
            for rollout, done, begun in running:
                if done == tick + 1:
                    self.lengths.played(100 * self._ticks(rollout))
                    origins = tuple(Origin(v, "main") for v in range(begun, version + 1))
                    self.ledger.delivered(rollout.id, origins, ("f", 0), float(rollout.member))
            running = [entry for entry in running if entry[1] > tick + 1]
            taken = [rollout for group in self.ledger.take(Kind.RL) for rollout in group.rollouts if rollout.state == "training"]
            if taken:
                ticks = [self._ticks(rollout) for rollout in taken]
                self.trained.update(ticks)
                self.lengths.trained([100 * each for each in ticks])
                self.ledger.commit()
                self.updates, version = self.updates + 1, version + 1
                self.ledger.published(version, self.updates)
        return self

    def _ticks(self, rollout: Rollout) -> int:
        group, _ = self.ledger.find(rollout.id)
        return group.task.payload["ticks"]


def played(long_every: int, on_stale: str, **changes: int) -> Play:
    ledger = Ledger(rules(max_lag=4, on_stale=on_stale, updates=10**6, groups_per_update=2, group_size=2, **changes), 1)
    ledger.published(1, 0)
    return Play(ledger, long_every).run()


@pytest.mark.parametrize("on_stale", ["restart", "drop"])
def test_079_long_rollouts_neither_fill_the_engines_nor_stop_the_learner(on_stale):
    """One task in eight takes 10 updates where tokens may be 4 old. It is tried a bounded number of times and then given up; that
    is counted, by its length too, and most updates are made all the same."""
    alone, found = played(0, on_stale), played(8, on_stale)
    assert alone.updates >= TICKS - 2
    assert found.updates > alone.updates / 2
    assert found.again < found.busy / 2
    assert (found.again > 0) == (on_stale == "restart")
    assert found.ledger.reasons(Kind.RL)["stale"]["lag"] > 0
    assert found.trained[LONG] < found.trained[1] / 50
    assert alone.lengths.alarm() == ""
    assert "one rollout in ten that is played has more than 1000 tokens" in found.lengths.alarm()


def test_079_without_a_bound_they_would():
    """They hold the places of groups until the learner is so slow that they are not too old any more."""
    endless = played(8, "restart", max_attempts=10**6)
    assert endless.updates < 0.8 * TICKS
    assert endless.again > endless.busy / 2


def test_079_with_masks_what_is_young_enough_of_a_long_rollout_trains():
    assert played(8, "mask").trained[LONG] > 0
