"""Publishes weights: one thread writes them to disk, one thread per engine brings its engine to the version wanted.

Training never waits: `publish` takes a host copy of the parameters and returns. When training is faster than writing,
the newest parameters win and the versions between are skipped. Each engine goes through pause (retract) -> update from
disk with flush -> verify the version -> continue -> canary, every stage with a deadline. An engine that fails is quarantined with
the reason, and comes back by itself when a later try passes; one that is not there, or was restarted with other weights,
is brought to the wanted version as soon as it answers. No engine waits for another for long, see `rolling`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.addresses import EVAL, STALE
from common.types import EngineInfo
from common.waits import Waits
from learner.canary import Canary
from learner.engine_api import Deadlines, EngineError
from learner.keeper import EngineKeeper
from learner.proofs import Proofs
from learner.stale_pool import StalePool
from learner.stalls import WRITER
from learner.transport import DiskTransport, Transport
from learner.weights import WeightFolder, leaves, nonfinite

WRITE_S = 300.0  # of a version, before it is told as late
REFUSALS = 3  # of an engine's first update, before it is given up
Params = Mapping[Any, Any]  # names to NumPy arrays, may be nested; the publisher's own from `publish` on
Save = Callable[[Params, Path], None]  # writes what an engine loads (safetensors, config.json) into an empty folder
Events = Callable[[str, dict[str, Any]], None]


class PublishError(RuntimeError):
    """Weights cannot be published or served; the message says which and why."""


class NotReady(PublishError):
    """No engine serves a version yet."""


class EnginesRefuse(PublishError):
    """Every engine refuses every update (a 4xx, a failed canary) or dies of it, and none has ever taken one: waiting will not
    help."""


@dataclass(frozen=True)
class PublisherOptions:
    """Where weights go and how long things may take."""

    run: Path  # weights/ and versions.jsonl stand here
    incarnation: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    poll_s: float = 1.0  # between two looks at an engine
    backoff_s: float = 1.0  # before a failed update is tried again; doubles
    backoff_max_s: float = 30.0
    transport: Transport = field(default_factory=DiskTransport)  # closed with the publisher
    rolling: bool = False  # one engine after another, so that the others serve meanwhile
    rolling_wait_s: float = 60.0  # for the one before; then they go on side by side: no engine waits for a hung one
    dtype: str = "float32"  # of the published weights
    temperature: float = 1.0  # that training samples at
    hold_one: bool = True  # of several engines, for an evaluation; false: all, where nobody can choose among them (a router)
    refresh: int = 0  # updates after which engines of the stale pool get the newest version; 0: every one


@dataclass(frozen=True)
class _Hold:
    version: int
    until: float  # time.monotonic()
    engines: frozenset[int]  # whose versions stay
    alone: bool  # the others serve training meanwhile


class Publisher:
    """Threads run from construction to `close`. `on_engines` hears the whole table after each change, in order.

    `events` and `on_engines` are called from these threads, also before the constructor has returned.
    """

    def __init__(
        self,
        options: PublisherOptions,
        engines: Sequence[EngineInfo],
        save: Save,
        events: Events,
        on_engines: Callable[[list[EngineInfo]], None] = lambda table: None,
        proofs: Proofs | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._options = options
        self._save = save
        self._events = events
        self._on_engines = on_engines
        self._folder = WeightFolder(options.run, options.incarnation)
        self._changed = threading.Condition()  # guards everything below
        self._table = [replace(e, version=0, state="starting", reason="not seen yet") for e in engines]
        self._loading = dict.fromkeys(range(len(engines)), 0)  # engine -> version it may be reading from disk
        self._pending: tuple[int, Params, Canary] | None = None
        self._newest = 0  # written and whole, of this incarnation
        self._stale = StalePool(options.refresh)
        self._hold: _Hold | None = None
        self._told = list(self._table)  # the table that was told last
        self._pins: Counter[int] = Counter()
        self._refusals: Counter[int] = Counter()  # engine -> in a row, of one that never took an update
        self._failure: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        self.proofs = proofs or Proofs()
        self.waits = waits or Waits()
        self.canaries: dict[str, float] = {}  # engine -> mean |Δlogprob| of its newest canary
        self._closing = False
        self._telling = threading.Lock()  # keeps calls of on_engines in the order of the changes
        self._apis = [options.transport.connect(engine, options.deadlines) for engine in engines]
        loops = [self._write_loop] + [EngineKeeper(self, index, api).run for index, api in enumerate(self._apis)]
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), name="publisher", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    # ---- for the learner ------------------------------------------------------------------------------------

    def publish(self, update: int, params: Params, canary: Canary, numbered: Callable[[int], None] = lambda version: None) -> int:
        """Publish `params`, the state after `update`, and what engines must answer with them; returns their version at once.
        `numbered` hears it before anything can serve it; it must not call back.

        Raises PublishError when a parameter is not finite (nothing is written and no version is used), or when an
        earlier publication failed in the background.
        """
        self.check()
        with ThreadPoolExecutor() as threads:
            named = list(leaves(params))
            counts = list(threads.map(lambda pair: nonfinite(pair[1]), named))
        for (name, array), bad in zip(named, counts, strict=True):
            if bad:
                raise PublishError(f"update {update} is not published: {bad} of {array.size} values of {name} are not finite")
        with self._changed:
            if self._closing:
                raise PublishError(f"update {update} is not published: the publisher is closed")
            version = self._folder.allocate(update)
            numbered(version)
            skipped, self._pending = self._pending, (version, params, canary)
            self._changed.notify_all()
        if skipped is not None:
            self._events("publish_skipped", {"version": skipped[0], "newer": version})
        return version

    def update_of(self, version: int) -> int:
        """The update whose parameters `version` holds."""
        with self._changed:
            updates = self._folder.updates()
        if version not in updates:
            raise PublishError(
                f"version {version} was never published; known are {min(updates, default=0)} to {max(updates, default=0)}"
            )
        return updates[version]

    def engines(self) -> list[EngineInfo]:
        with self._changed:
            return list(self._table)

    def wait_ready(self, version: int, timeout: float) -> int:
        """Wait until at least one engine of the main pool serves `version` or a later one, and return what it serves.

        Raises NotReady after `timeout` seconds, with the state of every engine, EnginesRefuse, and PublishError when writing
        failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._served() >= version or self._hopeless(), timeout)
            served, table, hold, hopeless = self._served(), self._main(), self._hold, self._hopeless()
        self.check()
        if served >= version:
            return served
        rows = "; ".join(f"{e.name} at {e.url} is {e.state}{f' ({e.reason})' if e.reason else ''}" for e in table)
        held = f"; evaluation holds version {hold.version}" if hold else ""
        if hopeless:
            raise EnginesRefuse(f"no engine takes version {version}: {rows}; is each of them SGLang 0.5, and reads it weights/?")
        raise NotReady(f"no engine serves version {version} after {timeout:g} s: {rows or 'there are no engines'}{held}")

    @contextmanager
    def hold(self, seconds: float, version: int = 0) -> Iterator[int]:
        """While inside, an engine of main stays at `version` (0: the newest), which is yielded, in the pool EVAL: nobody else's
        turns go there. The others follow what is published and serve training. One engine is both, and stays.

        Publishing goes on, the held engine follows afterwards, or after `seconds`. If it restarts, it gets the held version.
        """
        with self._changed:
            version = version or self._newest
            if self._hold is not None and self._hold.until > time.monotonic():
                raise PublishError(f"cannot hold version {version}: version {self._hold.version} is held already")
            if version not in self._folder.stored():
                raise PublishError(f"cannot hold version {version}: versions on disk are {self._folder.stored()}")
            main = [index for index, engine in enumerate(self._table) if engine.in_main]
            alone = self._options.hold_one and len(main) > 1
            if alone:
                ready = {index: (self._table[index].state == "ready", self._table[index].version == version) for index in main}
                main = [max(main, key=lambda index: (ready[index], index))]  # the last of those that serve it
            self._hold = mine = _Hold(version, time.monotonic() + seconds, frozenset(main), alone)
            self._changed.notify_all()
        self._tell()
        try:
            with self.pin(version):
                yield version
        finally:
            with self._changed:
                self._hold = None if self._hold is mine else self._hold
                self._changed.notify_all()
            self._tell()

    @contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """While inside, `version` stays on disk."""
        with self._changed:
            self._pins[version] += 1
        try:
            yield
        finally:
            with self._changed:
                self._pins[version] -= 1
            self._collect()

    def recompilations(self) -> int | None:
        """Compilations after warm-up, summed over the engines that count them; None when none does (SGLang)."""
        counts = []
        for api in self._apis:
            try:
                info = api.server_info()
                counts.append(info.get("compilations_after_warmup") if isinstance(info, dict) else None)
            except EngineError as error:
                self._events("engine_info_failed", {"url": api.url, "reason": str(error)})
        known = [int(count) for count in counts if count is not None]
        return sum(known) if known else None

    def close(self, timeout: float = 30.0) -> None:
        """Write what is pending, finish updates that are under way (no engine stays paused), and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._options.transport.close()
        self._folder.close()

    # ---- threads --------------------------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # the main loop hears of it at its next call
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._events("publisher_failed", {"reason": f"{type(error).__name__}: {error}"})

    def check(self) -> None:
        """Raises PublishError when a thread of the publisher has failed."""
        if self._failure is not None:
            raise PublishError(f"publishing failed: {type(self._failure).__name__}: {self._failure}") from self._failure

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._closing)
                if self._pending is None:
                    return
                (version, params, canary), self._pending = self._pending, None
            started = time.monotonic()

            def fill(folder: Path, params: Params = params, canary: Canary = canary) -> None:
                canary.save(folder)
                self._save(params, folder)

            with self.waits.wait(WRITER, "weights.write", f"weights/{version}", WRITE_S):
                self._folder.write(version, fill)
            with self._changed:
                self._newest = version
                self._stale.written(version, self.update_of(version))
                self._changed.notify_all()
            self._events("weights_written", {"version": version, "seconds": time.monotonic() - started})
            self._collect()

    def _collect(self) -> None:
        """Delete versions that nobody needs: not the newest, not wanted, not pinned, in no engine's hands."""
        with self._changed:
            keep = {self._newest, *self._loading.values(), *(+self._pins)}
            keep |= {version for index, engine in enumerate(self._table) for version in (engine.version, self._target(index))}
            retired = self._folder.retire(keep, below=self._newest)  # a larger one is just being written
        self._folder.delete(retired)

    def _target(self, index: int) -> int:
        """The version that an engine should have. The caller holds the lock."""
        if self._table[index].pool == STALE:
            return self._stale.version
        hold = self._holding()
        return hold.version if hold is not None and index in hold.engines else self._newest

    def _holding(self) -> _Hold | None:
        """The caller holds the lock."""
        if self._hold is not None and self._hold.until <= time.monotonic():
            self._events("hold_expired", {"version": self._hold.version, "newest": self._newest})
            self._hold = None
        return self._hold

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """An engine's turn to be updated; False when the publisher closes first."""
        mine = self._options.rolling and self._one_at_a_time.acquire(timeout=self._options.rolling_wait_s)
        try:
            yield not self._closing
        finally:
            if mine:
                self._one_at_a_time.release()

    def _served(self) -> int:
        """The newest version that an engine of main serves to stay, 0 when none does. The caller holds the lock."""
        held = dict.fromkeys(self._hold.engines, self._hold.version) if self._hold is not None else {}
        rows = [(e, held.get(index, e.version)) for index, e in enumerate(self._table) if e.in_main and e.state == "ready"]
        return max((e.version for e, stays in rows if e.version == stays), default=0)

    def _hopeless(self) -> bool:
        """The caller holds the lock."""
        refuse = [self._refusals[index] >= REFUSALS for index, engine in enumerate(self._table) if engine.in_main]
        return bool(refuse) and all(refuse)

    def _main(self) -> list[EngineInfo]:
        """Without them nothing is sampled: the stale pool's turns fall back on them. The caller holds the lock."""
        return [engine for engine in self._table if engine.in_main]

    def _set_engine(self, index: int, **changes: Any) -> None:
        with self._changed:
            old = self._table[index]
            self._table[index] = new = replace(old, **changes)
            self._changed.notify_all()
        self._tell()  # also when only a hold has ended
        if new != old:
            self._events("engine", {"name": new.name, "version": new.version, "state": new.state, "reason": new.reason})

    def _tell(self) -> None:
        """The table as actors are to see it, if that has changed. The caller does not hold the lock."""
        with self._telling:
            with self._changed:
                hold = self._hold
                held = hold.engines if hold is not None and hold.alone else frozenset()
                table = [replace(e, pool=EVAL) if index in held else e for index, e in enumerate(self._table)]
                told, self._told = self._told, table
            if table != told:
                self._on_engines(table)
