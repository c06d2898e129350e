"""What a process waits for at this moment: each wait has a name, an owner, somebody or something that it is for, and a deadline.

`Waits` is the register of one process. Its rows, `Edge`s of the wait-for graph, travel to the learner (env server -> actor ->
learner), which joins those of all processes into the graph (`learner/stalls.py`). Nothing here ends a wait: whoever waits has a
deadline of its own; this is the one after which it is told.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LEARNER = "learner"  # its process, in edges
_NUMBERS = itertools.count(1)
Tell = Callable[[str, str, str], None]  # hears what is waited for: its name, on whom, and why


def engines_of(pool: str) -> str:
    """Any engine of `pool`, in edges."""
    return f"engines of {pool}"


def session_name(rollout_id: str, attempt: int) -> str:
    """A rollout's session in an env server; `replica/session` owns the waits inside of it."""
    return f"{rollout_id}.{attempt}"


class Edge(NamedTuple):
    """`owner` has waited for `on` for `seconds`. Fields as in WaitMessage. A tuple: the learner has thousands of them."""

    owner: str  # a process, a rollout, or a session of an env server
    name: str  # what kind of wait: "env.step", "publish.update", ...
    on: str  # an engine, an env replica, a process, or words
    why: str = ""  # what is known about it
    seconds: float = 0.0
    deadline: float = 0.0  # seconds after which it is late; 0: it has none
    silent: float = 0.0  # seconds since the owner's process heard of `on`
    number: int = 0  # of this wait in its process: a later one has another number

    @property
    def late(self) -> bool:
        return 0 < self.deadline < self.seconds


class _State(NamedTuple):
    name: str
    on: str
    why: str
    deadline_s: float
    since: float
    number: int


class Wait:
    """What one owner waits for at the moment. It may be moved from one thing to the next, by any thread."""

    def __init__(
        self,
        owner: str = "",
        deadline_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        name: str = "start",
        on: str = "",
    ) -> None:
        """`deadline_s`: of what has no deadline of its own, which may be told later."""
        self.owner, self.deadline_s = owner, deadline_s
        self._clock = clock
        self.set(name, on)

    def set(self, name: str, on: str, why: str = "", deadline_s: float = 0.0) -> None:
        """From now on it waits for this. One assignment: a reader sees the wait before or the one after."""
        self._state = _State(name, on, why, deadline_s, self._clock(), next(_NUMBERS))

    def move(self, on: str, why: str = "") -> None:
        """The same wait, now for another one, or with more known about it."""
        self._state = self._state._replace(on=on, why=why)

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def on(self) -> str:
        return self._state.on

    def __str__(self) -> str:
        name, on, why, *_ = self._state
        return f"{name} {on}" + (f" ({why})" if why else "")

    def edge(self, now: float, heard: float) -> Edge:
        """`heard`: when `on` was heard of last; what happened before the wait began says nothing against it."""
        state = self._state
        seconds = max(0.0, now - state.since)
        silent = min(seconds, max(0.0, now - heard))
        deadline = state.deadline_s or self.deadline_s
        return Edge(self.owner, state.name, state.on, state.why, seconds, deadline, silent, state.number)


class Waits:
    """The open waits of one process, and when it heard of whom. Thread-safe, and for asyncio too: nothing here blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, Wait] = {}  # by identity; single operations on a dict are atomic
        self._heard: dict[str, float] = {}

    @contextmanager
    def wait(self, owner: str, name: str, on: str, deadline_s: float, why: str = "") -> Iterator[Wait]:
        """While inside, `owner` waits, for this or for what the wait is set to."""
        wait = Wait(owner, deadline_s, self._clock)
        wait.set(name, on, why)
        self._open[id(wait)] = wait
        try:
            yield wait
        finally:
            del self._open[id(wait)]

    def hear(self, *parties: str) -> None:
        """They have just shown that they are alive."""
        now = self._clock()
        for party in parties:
            self._heard[party] = now

    def silence(self, party: str) -> float:
        """Seconds since it was heard; infinite when it never was."""
        return self._clock() - self._heard.get(party, float("-inf"))

    def edges(self) -> list[Edge]:
        """Longest wait first."""
        now = self._clock()
        found = [wait.edge(now, self._heard.get(wait.on, float("-inf"))) for wait in list(self._open.values())]
        return sorted(found, key=lambda edge: -edge.seconds)
