"""The thread of one engine: looks at it, and brings it to the version that the publisher wants.

fetch (where weights have to travel) -> pause (retract) -> update from disk with flush -> verify the version -> continue ->
canary, every stage with a deadline. (A paused engine serves nothing, so the canary comes last; `learner/proofs.py` keeps what is
sampled before it apart.) What fails leaves the engine quarantined with the reason; a later try that passes brings it back. The
same version is tried again after a back-off, and not at all once the engine has died of it too often; another one at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from common.types import EngineInfo
from learner.canary import Canary, CanaryError, Judge
from learner.engine_api import EngineApi, EngineError, EngineGone
from learner.stalls import publisher_of

if TYPE_CHECKING:
    from learner.publisher import Publisher


DEATHS = 3  # of one version; where that is the first one, publisher.REFUSALS of them end the wait for it


class WrongWeights(EngineError):
    """The engine works, and its canary says that it does not serve the weights it was given."""


class EngineKeeper:
    """`run` is the thread; it reads and changes the publisher's table under the publisher's lock."""

    def __init__(self, publisher: Publisher, index: int, api: EngineApi) -> None:
        self._judge = Judge(publisher._options.dtype, publisher._options.temperature)
        self._proofs = publisher.proofs
        self._publisher = publisher
        self._waits = publisher.waits
        self._index = index
        self._api = api
        self._label = 0  # the version that it says to serve, when it was asked last
        self._mean = 0.0  # |Δlogprob| of the newest canary
        self._proven = False  # it took an update
        self._in_doubt = True  # paused, or weights of unknown origin: no update was finished since the last one began
        self._failures = 0
        self._retry_at = 0.0  # time.monotonic()
        self._tried = 0  # the version that was begun last
        self._deaths = 0  # of it

    def run(self) -> None:
        shared, options = self._publisher, self._publisher._options
        while True:
            with shared._changed:
                if shared._closing:
                    return
                target = shared._target(self._index)
                shared._loading[self._index] = target
            self._visit(target)
            with shared._changed:
                shared._loading[self._index] = 0
                shared._changed.wait_for(
                    lambda seen=target: shared._closing or shared._target(self._index) != seen, options.poll_s
                )

    def _visit(self, target: int) -> None:
        try:
            with self._wait("engine.look", self._api.deadlines.look_s):
                version = self._label = _number(self._api.weight_version())
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
        elif target == self._tried and self._deaths >= DEATHS:
            self._set(state="quarantined", reason=f"it died of version {target} {DEATHS} times: it waits for another one")
        elif target != self._tried or time.monotonic() >= self._retry_at:
            self._update(target)

    def _update(self, target: int) -> None:
        started, limits = time.monotonic(), self._api.deadlines
        self._tried, self._deaths = target, self._deaths if self._tried == target else 0
        stage, took, what = "fetch", {}, f"version {target}"
        try:
            with self._wait("publish.fetch", limits.fetch_s, what):  # it may take a while, and the engine serves meanwhile
                folder = self._api.prepare(self._publisher._folder.path(target), target)
            with self._turn() as mine:
                if not mine:
                    return
                for name, limit, step in self._stages(folder, target):
                    stage, began = name, time.monotonic()
                    with self._wait(f"publish.{name}", limit, what):
                        step()
                    took[name] = time.monotonic() - began
        except EngineGone as error:
            self._gone(error, f"update to version {target} failed at {stage}: ")
            if stage == "update":  # SGLang dies of files that are cut short, and of those of another model
                self._deaths += 1
                self._count(error)
        except EngineError as error:
            self._quarantine(stage, target, error)
        else:
            self._in_doubt, self._failures, self._retry_at, self._proven = False, 0, 0.0, True
            self._proofs.passed(self._info.name, target)  # before anybody hears that it is ready
            self._set(version=target, state="ready", reason="")
            self._publisher._events(
                "engine_updated",
                {
                    "name": self._info.name,
                    "version": target,
                    "seconds": time.monotonic() - started,
                    "stages": took,
                    "canary": self._mean,
                },
            )
            self._publisher.canaries[self._info.name] = self._mean
            self._publisher._collect()

    @contextmanager
    def _wait(self, name: str, limit_s: float, what: str = "") -> Iterator[None]:
        """Around calls of the engine; one that raises nothing has shown that it is alive."""
        with self._waits.wait(publisher_of(self._info.name), name, self._info.name, limit_s, what):
            yield
        self._waits.hear(self._info.name)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        shared, limit_s = self._publisher, self._publisher._options.rolling_wait_s
        with ExitStack() as stack:
            with self._waits.wait(publisher_of(self._info.name), "publish.turn", "the engine before it", limit_s):
                mine = stack.enter_context(shared._turn())
            yield mine

    def _stages(self, folder: str, target: int) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """What has to be done to the engine, in order: name, deadline in seconds, call."""
        limits = self._api.deadlines
        self._set(state="updating", reason=f"to version {target}")
        self._in_doubt = True
        yield "pause", limits.pause_s, self._api.pause
        self._proofs.began(self._info.name, target)
        yield "update", limits.update_s, lambda: self._api.update_weights(folder, target)
        yield "verify", limits.look_s, lambda: self._verify(target)
        yield "continue", limits.pause_s, self._api.resume
        yield "canary", limits.canary_s, lambda: self._canary(target)

    def _verify(self, target: int) -> None:
        label = self._api.weight_version()
        if label != str(target):
            raise EngineError("/model_info", 200, f"it serves version {label} after the update to {target}")
        self._label = target

    def _canary(self, version: int) -> None:
        """Raises EngineError when the engine does not answer, WrongWeights when it answers otherwise than `version` does."""
        try:
            canary = Canary.load(self._publisher._folder.path(version))
        except CanaryError as error:
            raise EngineError("canary", 0, str(error)) from error
        score = self._api.score(canary.ids, self._judge.temperature)
        try:
            self._mean = self._judge.check(canary, score, version)
        except CanaryError as error:
            raise WrongWeights("/generate", 0, str(error)) from error

    def _quarantine(self, stage: str, target: int, error: EngineError) -> None:
        options, name = self._publisher._options, self._info.name
        wait = min(options.backoff_s * 2**self._failures, options.backoff_max_s)
        self._failures += 1
        self._retry_at = time.monotonic() + wait
        reason = f"update to version {target} failed at {stage}: {error}"
        if stage == "fetch" and self._info.state == "ready":
            self._set(reason=reason)  # it serves on what it has proven
        else:
            self._set(state="quarantined", reason=reason)  # first, so that nobody sends it work when it goes on
        if stage not in ("fetch", "pause"):
            self._proofs.failed(name, target, reason)
        # A load that failed half-way may have changed some of what the engine still calls its old version.
        doubted = self._label if stage in ("update", "verify") else 0
        if doubted:
            self._proofs.began(name, doubted)  # before it goes on: actors may not have heard yet that they must not come
        try:
            self._undo(stage)
            if doubted:
                self._canary(doubted)
        except EngineError as problem:
            if doubted:
                self._proofs.failed(name, doubted, f"{reason}; version {doubted} was not proven again: {problem}")
            if not isinstance(problem, WrongWeights):
                self._set(reason=f"{reason}; it may still be paused: {problem}")
        else:
            if doubted:
                self._proofs.passed(name, doubted)
        self._count(error)

    def _undo(self, stage: str) -> None:
        """Let the engine go on; with weights that nobody knows it may use nothing that it has cached. Raises EngineError."""
        if stage == "fetch":
            return
        if stage in ("update", "verify", "canary"):
            self._api.abort_all()
            self._api.flush_cache()
        self._api.resume()

    def _count(self, error: EngineError) -> None:
        """Hear that the engine failed: a 4xx, a canary that its first weights do not pass, or a death of them, says that it will
        never do otherwise."""
        shared = self._publisher
        with shared._changed:
            hopeless = (400 <= error.status < 500 or isinstance(error, WrongWeights | EngineGone)) and not self._proven
            shared._refusals[self._index] = shared._refusals[self._index] + 1 if hopeless else 0
            shared._changed.notify_all()

    def _gone(self, error: EngineGone, during: str = "") -> None:
        """It will be another process when it answers again: no back-off, and its weights are looked at anew."""
        self._failures, self._retry_at = 0, 0.0
        reason = f"{during}{error}"
        self._proofs.abandoned(self._info.name, reason)
        self._set(version=0, state="starting", reason=reason)

    @property
    def _info(self) -> EngineInfo:
        return self._publisher._table[self._index]

    def _set(self, **changes: Any) -> None:
        self._publisher._set_engine(self._index, **changes)


def _number(label: str) -> int:
    """The version that an engine's label means; 0 for "default" or anyone else's label."""
    return int(label) if label.isascii() and label.isdigit() else 0
