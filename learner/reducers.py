"""Metrics that add up: each says how parts of it become the whole, so its value does not depend on how tokens were spread over
micro-batches, rows, devices or hosts.

A measure is a pytree of scalars. `start()` is what one optimizer step begins with, `merge` joins two parts, of a step or of
several, in any order, and `result` is the number that is written down (None where nothing was measured).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp

Scalar = Any  # traced by JAX inside compiled functions, of NumPy on the host


class Mean(NamedTuple):
    """A sum and what it is a sum of: tokens."""

    total: Scalar
    count: Scalar

    @classmethod
    def start(cls) -> Mean:
        return cls(jnp.float32(0), jnp.float32(0))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float | None:
        return float(self.total) / float(self.count) if self.count else None


class PerStep(NamedTuple):
    """A sum over an optimizer step, such as a loss whose tokens have weights already; its mean over steps.

    A part counts no step: `start` does.
    """

    total: Scalar
    steps: Scalar = 0.0

    @classmethod
    def start(cls) -> PerStep:
        return cls(jnp.float32(0), jnp.float32(1))

    def merge(self, other: PerStep) -> PerStep:
        return PerStep(self.total + other.total, self.steps + other.steps)

    def result(self) -> float | None:
        return float(self.total) / float(self.steps) if self.steps else None


class Largest(NamedTuple):
    value: Scalar

    @classmethod
    def start(cls) -> Largest:
        return cls(jnp.float32(-jnp.inf))

    def merge(self, other: Largest) -> Largest:
        return Largest(jnp.maximum(self.value, other.value))

    def result(self) -> float | None:
        return float(self.value) if self.value > -jnp.inf else None


class Smallest(NamedTuple):
    value: Scalar

    @classmethod
    def start(cls) -> Smallest:
        return cls(jnp.float32(jnp.inf))

    def merge(self, other: Smallest) -> Smallest:
        return Smallest(jnp.minimum(self.value, other.value))

    def result(self) -> float | None:
        return float(self.value) if self.value < jnp.inf else None


class Last(NamedTuple):
    """What the newest of several steps says; `at` orders them."""

    value: Scalar
    at: Scalar

    @classmethod
    def start(cls) -> Last:
        return cls(jnp.float32(jnp.nan), jnp.float32(-1))

    def merge(self, other: Last) -> Last:
        newer = other.at > self.at
        return Last(jnp.where(newer, other.value, self.value), jnp.where(newer, other.at, self.at))

    def result(self) -> float | None:
        return float(self.value) if self.at >= 0 else None


class EffectiveSize(NamedTuple):
    """`(Σρ)²/(n·Σρ²)` of n ratios: the share of the sample that an importance-weighted mean is worth (Kish)."""

    total: Scalar
    squares: Scalar
    count: Scalar

    @classmethod
    def start(cls) -> EffectiveSize:
        return cls(jnp.float32(0), jnp.float32(0), jnp.float32(0))

    def merge(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def result(self) -> float | None:
        whole = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / whole if whole else None


Measures = dict[str, Any]  # name -> one of the above


def start(measures: Measures) -> Measures:
    """What a step with such measures begins with."""
    return {name: type(measure).start() for name, measure in measures.items()}


def merge(a: Measures, b: Measures) -> Measures:
    """`b` may lack some of `a`'s: what one of several algorithms does not measure."""
    return a | {name: a[name].merge(measure) for name, measure in b.items()}


def results(parts: Iterable[Measures]) -> dict[str, float]:
    """The numbers of several steps together; what was not measured is left out."""
    parts = list(parts)
    whole = reduce(merge, parts) if parts else {}
    numbers = {name: measure.result() for name, measure in whole.items()}
    return {name: number for name, number in numbers.items() if number is not None}
