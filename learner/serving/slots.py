"""Which tokens each cache slot holds, and which slot a request gets. NumPy only; no pages, no tree.

Dimension key: L slots, M positions of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Placement(NamedTuple):
    slot: int  # where the sequence lives
    source: int  # the slot whose first `common` tokens it shares; copied first when it is another one
    common: int  # leading tokens whose keys need no computing


class SlotTable:
    """Held tokens by slot. A slot keeps its tokens after its request has left, until another request needs it."""

    def __init__(self, slots: int, length: int) -> None:
        self._ids = np.zeros((slots, length), np.int32)
        self._held = np.zeros(slots, np.int64)  # valid leading tokens
        self._used = np.zeros(slots, np.int64)  # when a request last left
        self._busy = np.zeros(slots, bool)
        self._clock = 0

    @property
    def held_tokens(self) -> int:
        return int(self._held.sum())

    def take(self, sequence: np.ndarray, usable: int) -> Placement:
        """A slot for `sequence` [T], with as much of its first `usable` tokens as any slot holds.

        A request continues in the slot whose tokens it extends. Otherwise it gets the slot that was free for longest,
        and the shared prefix is copied there: the owner of the longest match may still come back for the rest of it.
        Raises ValueError when all are busy.
        """
        equal = self._ids[:, :usable] == sequence[:usable]
        lengths = np.where(equal.all(axis=1), usable, equal.argmin(axis=1)) if usable else np.zeros(len(self._held), np.int64)
        common = np.minimum(lengths, self._held)
        source = int(common.argmax())
        shared = int(common[source])
        if self._busy[source] or shared < self._held[source]:
            free = np.flatnonzero(~self._busy)
            slot = int(free[self._used[free].argmin()])
        else:
            slot = source
        self._busy[slot] = True
        self._ids[slot, :shared] = sequence[:shared]
        self._held[slot] = shared
        return Placement(slot, source if shared else slot, shared)

    def extend(self, slot: int, ids: np.ndarray | list[int]) -> None:
        """The keys of `ids` were written after what the slot holds."""
        start = self._held[slot]
        self._ids[slot, start : start + len(ids)] = ids
        self._held[slot] += len(ids)

    def release(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self._busy[slot] = False

    def forget(self) -> None:
        """No slot holds anything valid any more."""
        self._held[:] = 0
