"""The engine's compiled programs: prefill, score, copy, decode. Static shapes; one compilation per attended width, where the
width matters.

Nothing here knows requests. A row without work has `left` 0, or positions past the cache: its writes are dropped.

Dimension key: R rows decoded together, P rows of a prefill, C prompt tokens of a prefill, N stop tokens of a row,
L slots of the cache, M positions of a slot, K steps of a decode dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from learner.model.qwen3 import Cache, CacheWindow, Qwen3
from learner.serving.request import STOPS
from learner.serving.sampling import sample

Array = np.ndarray | jax.Array


@dataclass(frozen=True)
class EngineShape:
    """Every static size of an engine."""

    rows: int  # R: requests decoded together
    cache_slots: int  # L: sequences whose keys are kept; more than rows, so that a rollout finds its own between turns
    max_length: int  # M: tokens of one sequence, prompt and output
    decode_chunk: int  # K
    prefill_rows: int  # P
    prefill_chunk: int  # C
    widths: tuple[int, ...]  # attended widths, rising; the last is max_length

    def width(self, needed: int) -> int:
        """The smallest compiled width that covers `needed` positions."""
        return next(width for width in self.widths if width >= needed)


class DecodeRows(NamedTuple):
    """What a decode dispatch needs of each row (NumPy on the way in)."""

    slots: Array  # [R] int32
    tokens: Array  # [R] int32: the sequence's last token, whose key is not in the cache yet
    positions: Array  # [R] int32: of that token
    left: Array  # [R] int32: tokens still to sample; 0: an idle row
    seeds: Array  # [R] uint32
    temperatures: Array  # [R] float32
    stops: Array  # [R, N] int32, filled up with -1


class Decoded(NamedTuple):
    ids: jax.Array  # [K, R] int32
    logprobs: jax.Array  # [K, R] float32
    counts: jax.Array  # [R] int32: how many of the K are real; a row ends with its stop token


class _Loop(NamedTuple):
    step: jax.Array
    cache: Cache
    tokens: jax.Array
    positions: jax.Array
    left: jax.Array
    out: Decoded


class Programs:
    """Compiled programs over one cache, which each of them consumes and replaces."""

    def __init__(self, model: Qwen3, shape: EngineShape) -> None:
        self.shape = shape
        self._graph = nnx.graphdef(model)
        self.cache = model.empty_cache(shape.cache_slots, shape.max_length)
        self._prefill = jax.jit(self._prefill_program, static_argnums=5, donate_argnums=1)
        self._score = jax.jit(self._score_program, donate_argnums=1)
        self._copy = jax.jit(_copy_program, donate_argnums=0)
        self._decode = jax.jit(self._decode_program, static_argnums=4, donate_argnums=1)

    def warm_up(self, params: nnx.State) -> None:
        """Compile every program at every width. All rows are idle: nothing is computed."""
        shape = self.shape
        idle = np.zeros(shape.rows, np.int32)
        rows = DecodeRows(
            idle, idle, idle, idle, idle.astype(np.uint32), idle.astype(np.float32), np.full((shape.rows, STOPS), -1, np.int32)
        )
        slots = np.zeros(shape.prefill_rows, np.int32)
        ids = np.zeros((shape.prefill_rows, shape.prefill_chunk), np.int32)
        self.copy(0, 0)
        self.score(params, 0, ids[0], np.full_like(ids[0], shape.max_length), ids[0])
        for width in shape.widths:
            self.prefill(params, slots, ids, np.full_like(ids, shape.max_length), width)
            self.decode(params, rows, quota=1, width=width)

    def prefill(self, params: nnx.State, slots: np.ndarray, ids: np.ndarray, positions: np.ndarray, width: int) -> None:
        """Write the keys of ids [P, C] at positions [P, C] (max_length: no token there) of slots [P]."""
        self.cache = self._prefill(params, self.cache, slots, ids, positions, width)

    def score(self, params: nnx.State, slot: int, ids: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """A prefill of one row: ids [C] at positions [C] of a slot. Comes back: log p [C] of targets [C], the tokens that follow.

        Of softmax(logits), whatever temperature the request samples at: as SGLang has it.
        """
        self.cache, logprobs = self._score(params, self.cache, np.int32(slot), ids, positions, targets)
        return jax.device_get(logprobs)

    def copy(self, source: int, target: int) -> None:
        """Copy a whole slot."""
        self.cache = self._copy(self.cache, np.int32(source), np.int32(target))

    def decode(self, params: nnx.State, rows: DecodeRows, quota: int, width: int) -> Decoded:
        """Sample up to K tokens a row; ends early when `quota` rows, or all, have finished. NumPy arrays come back."""
        self.cache, decoded = self._decode(params, self.cache, rows, np.int32(quota), width)
        return jax.device_get(decoded)

    def _prefill_program(
        self, params: nnx.State, cache: Cache, slots: jax.Array, ids: jax.Array, positions: jax.Array, width: int
    ) -> Cache:
        _, cache = nnx.merge(self._graph, params).cached(ids, cache, CacheWindow(slots, positions, width))
        return cache

    def _score_program(
        self, params: nnx.State, cache: Cache, slot: jax.Array, ids: jax.Array, positions: jax.Array, targets: jax.Array
    ) -> tuple[Cache, jax.Array]:
        model = nnx.merge(self._graph, params)
        hidden, cache = model.cached(ids[None], cache, CacheWindow(slot[None], positions[None], self.shape.max_length))
        logprobs = jax.nn.log_softmax(model.logits(hidden[0]), axis=-1)
        return cache, jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]

    def _decode_program(
        self, params: nnx.State, cache: Cache, rows: DecodeRows, quota: jax.Array, width: int
    ) -> tuple[Cache, Decoded]:
        model = nnx.merge(self._graph, params)
        chunk, count = self.shape.decode_chunk, self.shape.rows
        slots, seeds, temperatures = jnp.asarray(rows.slots), jnp.asarray(rows.seeds), jnp.asarray(rows.temperatures)
        alive = jnp.sum(rows.left > 0)

        def going(loop: _Loop) -> jax.Array:
            working = jnp.sum(loop.left > 0)
            return (loop.step < chunk) & (working > 0) & (alive - working < quota)

        def advance(loop: _Loop) -> _Loop:
            live = loop.left > 0
            positions = jnp.where(live, loop.positions, self.shape.max_length)
            hidden, grown = model.cached(loop.tokens[:, None], loop.cache, CacheWindow(slots, positions[:, None], width))
            ids, logprobs = sample(model.logits(hidden[:, 0]), seeds, loop.positions + 1, temperatures)
            stopped = jnp.any(ids[:, None] == rows.stops, axis=-1)
            out = Decoded(
                loop.out.ids.at[loop.step].set(ids), loop.out.logprobs.at[loop.step].set(logprobs), loop.out.counts + live
            )
            left = jnp.where(live & ~stopped, loop.left - 1, 0)
            return _Loop(loop.step + 1, grown, ids, loop.positions + 1, left, out)

        empty = Decoded(jnp.zeros((chunk, count), jnp.int32), jnp.zeros((chunk, count)), jnp.zeros(count, jnp.int32))
        start = _Loop(jnp.int32(0), cache, jnp.asarray(rows.tokens), jnp.asarray(rows.positions), jnp.asarray(rows.left), empty)
        end = jax.lax.while_loop(going, advance, start)
        return end.cache, end.out


def _copy_program(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    return jax.tree.map(lambda array: array.at[target].set(array[source]), cache)


class CompilationCount:
    """How many programs this process has compiled since the count began."""

    def __init__(self) -> None:
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.total += event == "/jax/core/compile/backend_compile_duration"
