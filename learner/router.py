"""SGLang's router in front of all engines: who is a worker of it, and the one row that actors see instead of the engines' rows.

The router only forwards `/generate`: weights go to each engine directly, by its keeper. It decides nothing: an engine is added
when the publisher calls it ready, stays while it is updated (its requests wait and go on), and is removed when it is quarantined
or gone; what it has in flight then ends there. A router that was restarted has no workers, and gets them again. The row is ready
while an engine that is ready is a worker; its version is the oldest one that such an engine serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from common.addresses import MAIN
from common.types import EngineInfo
from learner.engine_api import Deadlines, EngineApi, EngineError

NAME = "router"
MODEL = "policy"  # of all workers; else the router takes the path of its weights for an engine's model, and each is another one
SOON_S = 0.1  # between two looks while the router does what it was told


class Router:
    """`hear` is told the publisher's table, `tell` hears the actors'. A thread runs from construction to `close`; it also calls
    `tell` and `events`."""

    def __init__(
        self,
        url: str,
        tell: Callable[[list[EngineInfo]], None],
        events: Callable[[str, dict[str, Any]], None],
        poll_s: float = 1.0,
    ) -> None:
        self._api = EngineApi(url)
        self._url, self._tell, self._events, self._poll_s = url, tell, events, poll_s
        self._changed = threading.Condition()  # guards everything below
        self._table: list[EngineInfo] = []
        self._workers: frozenset[str] = frozenset()  # urls, when last looked at
        self._trouble = "not seen yet"
        self._row = EngineInfo(NAME, url, MAIN, 0, "starting", self._trouble)
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="router", daemon=True)
        self._thread.start()

    def hear(self, table: Sequence[EngineInfo]) -> None:
        with self._changed:
            self._table = list(table)
            self._changed.notify_all()
            self._show()

    def close(self, timeout: float = 15.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                table = list(self._table)
            workers, trouble, done = frozenset(), "", True
            try:
                workers, done = self._bring(table)
            except EngineError as error:
                trouble = str(error)
            except (KeyError, TypeError) as error:
                trouble = f"{self._url}/workers answered something else than a router does: {error!r}"
            with self._changed:
                self._workers, self._trouble = workers, trouble
                self._show()
                pause = self._poll_s if done else SOON_S
                self._changed.wait_for(lambda seen=table: self._closing or self._table != seen, pause)

    def _bring(self, table: Sequence[EngineInfo]) -> tuple[frozenset[str], bool]:
        """Tell the router what its workers are to be; which they are at the moment, and whether that is all."""
        look_s = Deadlines().look_s
        listed = {worker["url"]: worker["id"] for worker in self._api.call("GET", "/workers", look_s)["workers"]}
        missing = [engine.url for engine in table if engine.state == "ready" and engine.url not in listed]
        wanted = {engine.url for engine in table if engine.state in ("ready", "updating")}
        excess = [url for url in listed if url not in wanted]
        for url in missing:
            self._api.call("POST", "/workers", look_s, {"url": url, "model_id": MODEL})
        for url in excess:
            self._api.call("DELETE", f"/workers/{listed[url]}", look_s)
        return frozenset(listed) - frozenset(excess), not missing and not excess

    def _show(self) -> None:
        """Tell the actors' row when it has changed. The caller holds the lock."""
        serving = [engine for engine in self._table if engine.state == "ready" and engine.url in self._workers]
        states = {engine.state for engine in self._table}
        state = next((s for s in ("updating", "starting", "quarantined") if s in states), "starting")
        words = [f"{e.name} {e.state}{f' ({e.reason})' if e.reason else ''}" for e in self._table if e not in serving]
        reason = "; ".join(filter(None, (self._trouble, *words)))
        version = min((engine.version for engine in serving), default=0)
        row = EngineInfo(NAME, self._url, MAIN, version, "ready" if serving else state, reason)
        if row == self._row:
            return
        if (row.state, row.version) != (self._row.state, self._row.version):
            self._events("router", {"state": row.state, "version": row.version, "reason": reason})
        self._row = row
        self._tell([row])
