"""The engine's thread: admits requests to rows, prefills, decodes in chunks, hands finished requests back.

One thread owns the programs, the slots and every request in work. Others talk to it through `submit`, `abort` and
`call`, which post a function to its inbox; it looks there between two dispatches, so every command takes effect
between tokens and none needs a lock.

Scheduling: as many waiting requests as one prefill dispatch takes are admitted at a time, until rows or requests run
out; then one decode chunk. The chunk ends early when enough rows have stopped to fill a prefill: turns are short, and
an idle row costs as much as a working one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from flax import nnx

from learner.model.qwen3 import Qwen3
from learner.serving.programs import CompilationCount, Decoded, DecodeRows, EngineShape, Programs
from learner.serving.request import ABORTED, STOPS, Request
from learner.serving.slots import SlotTable

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """What the engine is doing, in requests and tokens."""

    running: int
    waiting: int
    held_tokens: int


@dataclass(eq=False)
class _Row:
    """A request at work in a slot. `filled` tokens of its sequence have their keys in the cache."""

    request: Request
    slot: int
    filled: int
    sequence: np.ndarray  # when it was admitted: prompt, and output if it was retracted


class Engine:
    """Serves one model. `deliver` gets finished requests, on the engine's thread; it must not block."""

    def __init__(self, model: Qwen3, shape: EngineShape, version: str, deliver: Callable[[Sequence[Request]], None]) -> None:
        self.shape = shape
        self.version = version
        self.paused = False
        self.compilations = CompilationCount()
        self.compilations_at_warm_up = 0
        self.ready = threading.Event()
        self._params = nnx.state(model, nnx.Param)
        self._programs = Programs(model, shape)
        self._slots = SlotTable(shape.cache_slots, shape.max_length)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._finished: list[Request] = []
        self._deliver = deliver
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- for any thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the dispatch in progress; unfinished requests stay unfinished."""
        self._inbox.put(self._stop)
        self._thread.join()
        self.compilations.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        self._inbox.put(lambda: self._accept(requests))

    def abort(self, rid: str | None) -> Future[None]:
        """Finish the request, or all of them (None), with what it has; an unknown id is no error."""
        return self.call(lambda: self._abort(rid))

    def pause(self, mode: str) -> Future[None]:
        """Stop generating. `abort` finishes every request, `retract` sends running ones back to wait."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self.call(self._resume)

    def update(self, params: nnx.State, version: str | None) -> Future[int]:
        """Swap the parameters and forget all keys; running requests go on with the new ones. Number of those."""
        return self.call(lambda: self._update(params, version))

    def flush(self) -> Future[bool]:
        """Forget all keys; False, and nothing done, while requests are running or waiting."""
        return self.call(self._flush)

    def load(self) -> Load:
        """A look from outside; the numbers may be a dispatch old."""
        return Load(len(self._rows), len(self._waiting), self._slots.held_tokens)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread, between two dispatches."""
        future: Future[T] = Future()

        def run() -> None:
            future.set_result(function())

        self._inbox.put(run)
        return future

    # ---- on the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._programs.warm_up(self._params)
        self.compilations_at_warm_up = self.compilations.total
        self.ready.set()
        log.info("engine ready: %d programs compiled", self.compilations.total)
        while not self._stopping:
            self._obey(wait=self.paused or not (self._waiting or self._rows))
            if not self.paused:
                self._admit()
                self._decode()
            if self._finished:
                self._deliver(self._finished)
                self._finished = []

    def _obey(self, wait: bool) -> None:
        """Run what the inbox holds; with `wait`, sleep until there is something."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._stopping = True

    def _accept(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.max_new_tokens:
                self._waiting.append(request)
            else:
                request.append([], [], self.version)
                self._finish(request)

    def _finish(self, request: Request) -> None:
        request.version = self.version
        self._finished.append(request)

    def _abort(self, rid: str | None) -> None:
        for row in [row for row in self._rows if rid in (None, row.request.rid)]:
            self._leave(row)
            self._cut(row.request)
        for request in [request for request in self._waiting if rid in (None, request.rid)]:
            self._waiting.remove(request)
            self._cut(request)

    def _cut(self, request: Request) -> None:
        request.finish = dict(ABORTED)
        self._finish(request)

    def _leave(self, row: _Row) -> None:
        self._slots.release(row.slot)
        self._rows.remove(row)

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(None)
        else:
            self._retract()

    def _retract(self) -> None:
        for row in reversed(list(self._rows)):
            self._leave(row)
            row.request.retractions += 1
            self._waiting.appendleft(row.request)

    def _resume(self) -> None:
        self.paused = False

    def _update(self, params: nnx.State, version: str | None) -> int:
        running = len(self._rows)
        self._retract()
        self._params = params
        self._slots.forget()
        self.version = self.version if version is None else version
        return running

    def _flush(self) -> bool:
        if self._rows or self._waiting:
            return False
        self._slots.forget()
        return True

    def _admit(self) -> None:
        """Waiting requests to free rows, one prefill dispatch at a time: later ones find the prefixes of earlier ones."""
        while self._waiting and len(self._rows) < self.shape.rows:
            count = min(self.shape.prefill_rows, self.shape.rows - len(self._rows), len(self._waiting))
            rows = [self._place(self._waiting.popleft()) for _ in range(count)]
            self._rows += rows
            for row in rows:
                if row.request.scored:
                    self._score(row)
            while rows := [row for row in rows if row.filled < len(row.sequence) - 1]:
                self._prefill(rows)

    def _place(self, request: Request) -> _Row:
        """The last token is never taken from the cache: decoding starts with it. Nor is one whose logits are asked for."""
        sequence = request.sequence()
        usable = request.prompt_from if request.scored else len(sequence) - 1
        slot, source, common = self._slots.take(sequence, usable)
        if source != slot:
            self._programs.copy(source, slot)
        if request.cached_tokens < 0:
            request.cached_tokens = common
        return _Row(request, slot, common, sequence)

    def _prefill(self, rows: list[_Row]) -> None:
        """One chunk of each row. The last token of a sequence is left to decoding."""
        shape = self.shape
        slots = np.zeros(shape.prefill_rows, np.int32)
        ids = np.zeros((shape.prefill_rows, shape.prefill_chunk), np.int32)
        positions = np.full_like(ids, shape.max_length)
        for index, row in enumerate(rows):
            end = min(row.filled + shape.prefill_chunk, len(row.sequence) - 1)
            part = row.sequence[row.filled : end]
            slots[index] = row.slot
            ids[index, : len(part)] = part
            positions[index, : len(part)] = np.arange(row.filled, end)
            self._slots.extend(row.slot, part)
            row.filled = end
        self._programs.prefill(self._params, slots, ids, positions, shape.width(max(row.filled for row in rows)))

    def _score(self, row: _Row) -> None:
        """The whole prefill of one row, with the logprobs of its prompt. No command comes between, so one version makes all."""
        request, chunk = row.request, self.shape.prefill_chunk
        last = len(row.sequence) - 1
        made: list[float] = []
        while row.filled < last:
            start, end = row.filled, min(row.filled + chunk, last)
            ids, targets = np.zeros((2, chunk), np.int32)
            positions = np.full(chunk, self.shape.max_length, np.int32)
            ids[: end - start] = row.sequence[start:end]
            targets[: end - start] = row.sequence[start + 1 : end + 1]
            positions[: end - start] = np.arange(start, end)
            made += self._programs.score(self._params, row.slot, ids, positions, targets)[: end - start].tolist()
            self._slots.extend(row.slot, row.sequence[start:end])
            row.filled = end
        request.prompt_logprobs = made[len(made) - (last - request.prompt_from) :]

    def _decode(self) -> None:
        if not self._rows:
            return
        rows, needed = self._decode_rows()
        quota = max(1, min(self.shape.prefill_rows, len(self._rows) // 4))
        decoded = self._programs.decode(self._params, rows, quota, self.shape.width(needed))
        self._collect(rows, decoded)

    def _decode_rows(self) -> tuple[DecodeRows, int]:
        """The dispatch's arrays, and how many positions it attends to at most."""
        count = self.shape.rows
        slots, tokens, positions, left = (np.zeros(count, np.int32) for _ in range(4))
        seeds, temperatures = np.zeros(count, np.uint32), np.zeros(count, np.float32)
        stops = np.full((count, STOPS), -1, np.int32)
        needed = 1
        for index, row in enumerate(self._rows):
            request = row.request
            slots[index] = row.slot
            tokens[index] = request.output[-1] if request.output else request.prompt[-1]
            positions[index] = row.filled
            left[index] = request.max_new_tokens - len(request.output)
            seeds[index] = request.seed
            temperatures[index] = request.temperature
            stops[index, : len(request.stops)] = request.stops
            needed = max(needed, row.filled + min(self.shape.decode_chunk, int(left[index])))
        return DecodeRows(slots, tokens, positions, left, seeds, temperatures, stops), needed

    def _collect(self, rows: DecodeRows, decoded: Decoded) -> None:
        counts = decoded.counts.tolist()
        ids, logprobs = decoded.ids.T.tolist(), decoded.logprobs.T.tolist()
        for index, row in enumerate(list(self._rows)):
            count = counts[index]
            new = ids[index][:count]
            self._slots.extend(row.slot, [int(rows.tokens[index]), *new[:-1]][:count])
            row.filled += count
            row.request.append(new, logprobs[index][:count], self.version)
            if row.request.finish is not None:
                self._leave(row)
                self._finish(row.request)
