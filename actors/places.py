"""Which engine a request goes to, and how many may be there at one time: places, handed out first come, first served.

`take` waits for a place at an engine that is ready, and returns it however its body ends. An engine that failed rests: nobody is
sent there for a while that doubles from failure to failure, up to a bound, each time with some chance in it, so that many
processes do not come back at one moment. It comes back by itself, or when the learner's table says that it serves new weights.

Load is what this process has in flight, which it knows exactly and at once. What engines say of themselves (/v1/loads) is not
asked: it is stale while an engine is paused, and processes that follow the same numbers all run to the same engine until the next
look. An engine that is slow, or that others keep busy, gives its places back later, and so gets less.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.types import EngineInfo
from common.waits import Tell, engines_of

FIRST_REST_S, LONGEST_REST_S = 0.5, 15.0


class NoEngine(Exception):
    """The table has no engine of that pool: waiting would not bring one."""


@dataclass(frozen=True)
class PlaceRules:
    """`concurrency`: requests in flight per engine, of this process. `choice`: "prefix" goes back to the engine that holds the
    cached prefix, "least_loaded" does not care."""

    concurrency: int
    choice: str = "prefix"


@dataclass(eq=False)
class _Waiter:
    preferred: Collection[str]
    otherwise: str  # pool to go to when this one has no engine ready; "" stays
    tell: Tell
    told: str
    granted: asyncio.Future[EngineInfo]


@dataclass(frozen=True)
class _Rest:
    failures: int  # in a row
    began: float  # time.monotonic(), as `until`
    until: float
    alarm: asyncio.TimerHandle


class Places:
    """Use inside a running event loop; `close` it there."""

    def __init__(self, rules: PlaceRules, index: int = 0) -> None:
        """`index`: of this actor process; among engines with the same load, each process begins with another one."""
        self._rules = rules
        self._index = index
        self._chance = random.Random(index)
        self._table: dict[str, EngineInfo] = {}
        self._order: dict[str, int] = {}
        self._rests: dict[str, _Rest] = {}
        self._queues: dict[str, deque[_Waiter]] = {}  # of each pool
        self.in_flight: Counter[str] = Counter()

    def update(self, table: Iterable[EngineInfo]) -> None:
        """Take over the learner's table. The learner has just spoken to an engine that it newly calls ready, or that has newer
        weights: whatever failed here before is over."""
        rows = list(table)
        for engine in rows:
            old = self._table.get(engine.name)
            if old is not None and engine.state == "ready" and (old.state, old.version) != (engine.state, engine.version):
                self._wake(engine.name)
        self._table = {engine.name: engine for engine in rows}
        self._order = {engine.name: (position - self._index) % len(rows) for position, engine in enumerate(rows)}
        self._serve()

    @asynccontextmanager
    async def take(self, preferred: Collection[str], pool: str, tell: Tell, otherwise: str = "") -> AsyncIterator[EngineInfo]:
        """A place at an engine of `pool`, or of the pool `otherwise` as soon as no engine of `pool` is ready; the caller sets the
        deadline. Raises NoEngine.

        With choice "prefix" it is at one of `preferred`, which have the prefix in their cache, unless that is full or resting;
        then, as with "least_loaded", at the engine with the fewest requests of this process. It does not wait for a full one:
        to compute a prefix again costs one prefill, to wait the rest of somebody's turn while another engine has nothing to do,
        and the cache is no sure thing (new weights flush it, other rollouts push it out).
        """
        waiter = _Waiter(preferred, otherwise, tell, "", asyncio.get_running_loop().create_future())
        self._queues.setdefault(pool, deque()).append(waiter)
        self._serve_pool(pool)
        try:
            self._tell(pool if waiter in self._queues[pool] else otherwise, waiter)
            engine = await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self._give_back(waiter.granted.result())  # it was granted while the caller was being cancelled
            raise
        try:
            yield engine
        finally:
            self._give_back(engine)

    def failed(self, name: str, begun: float) -> None:
        """A request that was sent at `begun` (time.monotonic()) had no answer, or one that says to come back later. Requests that
        were under way when an engine failed are one failure."""
        now, last = time.monotonic(), self._rests.get(name)
        if last is not None and begun < last.began:
            return
        failures = last.failures + 1 if last else 1
        pause = min(FIRST_REST_S * 2 ** (failures - 1), LONGEST_REST_S) * self._chance.uniform(0.5, 1.0)
        if last is not None:
            last.alarm.cancel()
        alarm = asyncio.get_running_loop().call_later(pause, self._serve)
        self._rests[name] = _Rest(failures, now, now + pause, alarm)
        self._serve()

    def answered(self, name: str, begun: float) -> None:
        """A request that was sent at `begun` was served: failures before it do not count any more."""
        last = self._rests.get(name)
        if last is not None and begun >= last.began:
            self._wake(name)
            self._serve()

    def states(self) -> str:
        """The table in words, for errors and waits."""
        rows = [" ".join(filter(None, (e.name, e.state, f"version {e.version}", e.reason))) for e in self._table.values()]
        return ", ".join(rows) or "no engine in the table"

    def close(self) -> None:
        for name in list(self._rests):
            self._wake(name)

    def _wake(self, name: str) -> None:
        rest = self._rests.pop(name, None)
        if rest is not None:
            rest.alarm.cancel()

    def has(self, pool: str) -> bool:
        """Whether the learner's table has an engine of `pool`, whatever its state."""
        return any(engine.pool == pool for engine in self._table.values())

    def ready(self, pool: str) -> list[EngineInfo]:
        """Engines that may serve rollouts now: ready, with published weights, and not resting."""
        now = time.monotonic()
        return [
            e
            for e in self._table.values()
            if e.pool == pool
            and e.state == "ready"
            and e.version >= 1
            and (e.name not in self._rests or self._rests[e.name].until <= now)
        ]

    def _give_back(self, engine: EngineInfo) -> None:
        self.in_flight[engine.name] -= 1
        self._serve_pool(engine.pool)

    def _serve(self) -> None:
        """After a change of what is ready."""
        for pool, queue in list(self._queues.items()):
            self._serve_pool(pool)
            for waiter in queue:
                self._tell(pool, waiter)

    def _serve_pool(self, pool: str) -> None:
        """Hand out what is free. Whoever waits can use any place of the pool, so the first one is never passed by."""
        queue = self._queues.get(pool, deque())
        while queue:
            waiter = queue[0]
            if waiter.granted.done():  # cancelled
                queue.popleft()
                continue
            if waiter.otherwise and not self.ready(pool):
                self._queues.setdefault(waiter.otherwise, deque()).append(queue.popleft())
                pool_after, waiter.otherwise = waiter.otherwise, ""
                self._serve_pool(pool_after)
                continue
            if not self.has(pool):
                waiter.granted.set_exception(NoEngine(f"pool {pool!r} has no engine; the table: {self.states()}"))
                continue
            free = [e for e in self.ready(pool) if self.in_flight[e.name] < self._rules.concurrency]
            if not free:
                return
            kept = [e for e in free if self._rules.choice == "prefix" and e.name in waiter.preferred]
            chosen = kept[0] if kept else min(free, key=lambda e: (self.in_flight[e.name], self._order[e.name]))
            self.in_flight[chosen.name] += 1
            waiter.granted.set_result(chosen)

    def _tell(self, pool: str, waiter: _Waiter) -> None:
        """Say what a waiter waits for, when that changes."""
        if waiter.granted.done():
            return
        ready = self.ready(pool)
        name = "engine.place" if ready else "engine.ready"
        if name != waiter.told:
            waiter.told = name
            full = f"{self._rules.concurrency} requests in flight at each of " + ", ".join(e.name for e in ready)
            waiter.tell(name, engines_of(pool), full if ready else self.states())
