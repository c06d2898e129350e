"""The thread of one engine: looks at it, and brings it to the version that the publisher wants.

fetch (where weights have to travel) -> pause (retract) -> update from disk with flush -> verify the version -> continue, every
stage with a deadline. What fails leaves the engine quarantined with the reason; a later try that passes brings it back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from common.types import EngineInfo
from learner.engine_api import EngineApi, EngineError, EngineGone

if TYPE_CHECKING:
    from learner.publisher import Publisher


class EngineKeeper:
    """`run` is the thread; it reads and changes the publisher's table under the publisher's lock."""

    def __init__(self, publisher: Publisher, index: int, api: EngineApi) -> None:
        self._publisher = publisher
        self._index = index
        self._api = api
        self._proven = False  # it took an update
        self._in_doubt = False  # an update began and was not finished: paused, or weights of unknown origin
        self._failures = 0
        self._retry_at = 0.0  # time.monotonic()

    def run(self) -> None:
        shared, options = self._publisher, self._publisher._options
        while True:
            with shared._changed:
                if shared._closing:
                    return
                target = shared._target(self._info.pool)
                shared._loading[self._index] = target
            self._visit(target)
            with shared._changed:
                shared._loading[self._index] = 0
                shared._changed.wait_for(
                    lambda seen=target: shared._closing or shared._target(self._info.pool) != seen, options.poll_s
                )

    def _visit(self, target: int) -> None:
        try:
            version = _number(self._api.weight_version())
            if self._info.state != "ready":
                self._api.health()
        except EngineGone as error:
            self._gone(error)
            return
        except EngineError as error:
            self._set(state="quarantined", reason=str(error))
            self._count(error)
            return
        if target == 0:
            self._set(version=version, state="starting", reason="no weights are published yet")
        elif version == target and not self._in_doubt:
            self._set(version=version, state="ready", reason="")
        elif time.monotonic() >= self._retry_at:
            self._update(target)

    def _update(self, target: int) -> None:
        api, started = self._api, time.monotonic()
        stage = "fetch"
        try:
            folder = api.prepare(self._publisher._folder.path(target), target)  # it may take a while, and serves meanwhile
            self._set(state="updating", reason=f"to version {target}")
            stage, self._in_doubt = "pause", True
            api.pause()
            stage = "update"
            api.update_weights(folder, target)
            stage = "verify"
            label = api.weight_version()
            if label != str(target):
                raise EngineError("/model_info", 200, f"it serves version {label} after the update to {target}")
            stage = "continue"
            api.resume()
        except EngineGone as error:
            self._gone(error)
        except EngineError as error:
            self._quarantine(stage, target, error)
        else:
            self._in_doubt, self._failures, self._retry_at, self._proven = False, 0, 0.0, True
            self._set(version=target, state="ready", reason="")
            self._publisher._events(
                "engine_updated", {"name": self._info.name, "version": target, "seconds": time.monotonic() - started}
            )
            self._publisher._collect()

    def _quarantine(self, stage: str, target: int, error: EngineError) -> None:
        options = self._publisher._options
        wait = min(options.backoff_s * 2**self._failures, options.backoff_max_s)
        self._failures += 1
        self._retry_at = time.monotonic() + wait
        reason = f"update to version {target} failed at {stage}: {error}"
        self._set(state="quarantined", reason=reason)  # first, so that nobody sends it work when it goes on
        problem = self._undo_pause(stage)
        if problem:
            self._set(reason=f"{reason}; it may still be paused: {problem}")
        self._count(error)

    def _count(self, error: EngineError) -> None:
        """Hear that the engine failed: a 4xx says that it will never do otherwise."""
        shared = self._publisher
        with shared._changed:
            hopeless = 400 <= error.status < 500 and not self._proven
            shared._refusals[self._index] = shared._refusals[self._index] + 1 if hopeless else 0
            shared._changed.notify_all()

    def _undo_pause(self, stage: str) -> str:
        """Let the engine go on; "" or why that failed. After an unproven update nothing may go on with the old cache."""
        try:
            if stage == "fetch":
                return ""
            if stage in ("update", "verify"):
                self._api.abort_all()
                self._api.flush_cache()
            self._api.resume()
        except EngineError as error:
            return str(error)
        return ""

    def _gone(self, error: EngineGone) -> None:
        """It will be another process when it answers again: no back-off, and its weights are looked at anew."""
        self._failures, self._retry_at = 0, 0.0
        self._set(version=0, state="starting", reason=str(error))

    @property
    def _info(self) -> EngineInfo:
        return self._publisher._table[self._index]

    def _set(self, **changes: Any) -> None:
        self._publisher._set_engine(self._index, **changes)


def _number(label: str) -> int:
    """The version that an engine's label means; 0 for "default" or anyone else's label."""
    return int(label) if label.isdigit() else 0
