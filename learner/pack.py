"""Packing: segments of any length into micro-batches of one shape, and the weight of every token in the loss.

Weights are made once, on the host, over everything that one optimizer step trains on. The loss is then
`Σ weight · token loss`, a plain sum: it cannot depend on how tokens are spread over rows, micro-batches or devices.

Who counts in a denominator: tokens with `mask`, and rollouts that have at least one. Rollouts whose advantage is zero
stay in it (their gradient is zero, and leaving them out would raise the step size as the policy improves); tokens that
are too old, and rollouts without anything to compare with, are masked out by the caller and leave it.

Lengths are explicit everywhere; the value of a token id never decides anything.

Dimension key: B rows of a micro-batch, T tokens of a row, S tokens of an example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

COPIED = ("old_logprobs", "reference", "advantages", "returns", "old_values")  # numbers that are written as they are
Array = Any  # of NumPy here, traced by JAX inside compiled functions


class PackError(ValueError):
    """An example does not fit; the message names the rollout and the fix."""


@dataclass(frozen=True, eq=False)
class Example:
    """One segment of a rollout, with all that a loss needs to know of its tokens."""

    rollout: str  # segments of one rollout share it
    ids: np.ndarray  # [S] int32
    mask: np.ndarray  # [S] bool: the token is trained on
    behaviour: np.ndarray  # [S] float32: logprob under the policy that sampled it
    old_logprobs: np.ndarray  # [S] float32: under the policy that the loss's ratio is against
    reference: np.ndarray  # [S] float32: under the reference policy of a KL penalty
    advantages: np.ndarray  # [S] float32: times the weight of an off-policy correction
    returns: np.ndarray  # [S] float32
    old_values: np.ndarray  # [S] float32
    temperature: float  # that the rollout was sampled at
    versions: np.ndarray  # [S] int64: of the weights that sampled it
    observed: np.ndarray  # [S] bool: the environment's, and predicted by a loss on observations
    answers: int  # tokens from the environment: what that loss divides by
    domain: int = 0  # its number in the run


class Microbatch(NamedTuple):
    """What a compiled function sees. `x[b, t]` describes the token `ids[b, t]`; entries outside `mask` mean nothing."""

    ids: Array  # [B, T] int32
    positions: Array  # [B, T] int32, counted in each segment
    segment_ids: Array  # [B, T] int32: 1, 2, ... in each row, 0 is padding
    domain: Array  # [B, T] int32: number of the rollout's domain; it decides what is counted where, and nothing else
    mask: Array  # [B, T] bool
    observed: Array  # [B, T] bool: targets of the loss on observations; never in `mask`
    old_logprobs: Array  # [B, T] float32
    reference: Array  # [B, T] float32
    advantages: Array  # [B, T] float32
    returns: Array  # [B, T] float32
    old_values: Array  # [B, T] float32
    temperature: Array  # [B, T] float32, above 0 everywhere, 1 where observed
    weights: Array  # [B, T] float32: of the policy's and the supervised loss; 0 outside mask
    value_weights: Array  # [B, T] float32: of the value loss
    observed_weights: Array  # [B, T] float32: of the loss on observations; 0 outside observed


@dataclass(frozen=True)
class Shape:
    """Of every micro-batch."""

    row_length: int
    rows: int


@dataclass(frozen=True)
class Aggregation:
    """How token losses become the loss of an optimizer step with N trained tokens in R rollouts, n of them in rollout r.

    `token_mean`: 1/N each (DAPO). `seq_mean_token_mean`: 1/(R·n) (GRPO; a sequence is a rollout, all segments of it, as in
    slime's per-rollout mean). `seq_mean_token_sum`: 1/R. `constant`: 1/(R·divisor), whatever the lengths (Dr. GRPO, arXiv
    2503.20783).

    The loss on observations has a denominator of its own: `observations`/(R·m) for the m tokens from the environment in a
    rollout, of those R that have a target (ECHO, arXiv 2605.24517: notices count in m, and are no targets).
    """

    name: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    divisor: float = 0.0
    share: float = 1.0  # times all weights: of the step's rollouts, where several algorithms make it
    policy: float = 1.0  # times the weights of the policy's loss; 0 while a critic warms up
    observations: float = 0.0  # times those of the loss on observations


class Place(NamedTuple):
    """Where an example lies: tokens `[0, length)` at `[start, start + length)` of a row."""

    microbatch: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Packed:
    """The examples of one optimizer step."""

    microbatches: list[Microbatch]
    places: list[Place]  # of each example
    trained: int  # tokens with mask
    cut: int  # trailing context tokens that did not fit their row

    def read(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The examples' parts of per-micro-batch arrays [B, T]: [length] each."""
        return [arrays[m][row, start : start + length] for m, row, start, length in self.places]


def padded(array: np.ndarray, length: int) -> np.ndarray:
    """What `Packed.read` gave, with zeros for the context that packing cut off."""
    return np.concatenate([array, np.zeros(length - len(array), array.dtype)])


def pack(examples: Sequence[Example], shape: Shape, aggregation: Aggregation, keep_tails: bool = False) -> Packed:
    """Lay the examples out, longest first, each in the first row with room.

    Context after the last trained token says nothing to a loss on trained tokens and stays out; with `keep_tails` (a
    critic values the state after it) it is cut only where it does not fit its row, and counted. Raises PackError if a
    trained token does not fit.
    """
    keep_tails = keep_tails or aggregation.observations > 0  # the answer to the last action is a target too
    lengths = [_fitting_length(example, shape.row_length, keep_tails) for example in examples]
    rows = _first_fit(lengths, shape.row_length)
    count = max(1, -(-len(rows) // shape.rows))
    batches = [_empty(shape) for _ in range(count)]
    places = [Place(0, 0, 0, 0)] * len(examples)
    weights, observed = token_weights(examples, aggregation), observation_weights(examples, aggregation)
    trained = int(sum(example.mask.sum() for example in examples))
    for index, row in enumerate(rows):
        batch, at, start = batches[index // shape.rows], index % shape.rows, 0
        for segment, which in enumerate(row, start=1):
            length = lengths[which]
            _write(batch, (at, slice(start, start + length)), examples[which], segment)
            batch.weights[at, start : start + length][examples[which].mask[:length]] = weights[which]
            batch.observed_weights[at, start : start + length][examples[which].observed[:length]] = observed[which]
            places[which] = Place(index // shape.rows, at, start, length)
            start += length
    for batch in batches:
        batch.value_weights[batch.mask] = aggregation.share / max(trained, 1)
    cut = sum(max(0, len(example.ids) - shape.row_length) for example in examples) if keep_tails else 0
    return Packed(batches, places, trained, cut)


def token_weights(examples: Sequence[Example], aggregation: Aggregation) -> list[float]:
    """The weight of each trained token of each example. A rollout counts once, however many segments it has."""
    trained: Counter[str] = Counter()
    for example in examples:
        trained[example.rollout] += int(example.mask.sum())
    rollouts = sum(n > 0 for n in trained.values())
    tokens = trained.total()
    if not tokens:
        return [0.0] * len(examples)
    scale = aggregation.policy * aggregation.share
    match aggregation.name:
        case "token_mean":
            return [scale / tokens] * len(examples)
        case "constant":
            return [scale / (rollouts * aggregation.divisor)] * len(examples)
        case "seq_mean_token_sum":
            return [scale / rollouts] * len(examples)
        case _:
            return [scale / (rollouts * max(trained[example.rollout], 1)) for example in examples]


def observation_weights(examples: Sequence[Example], aggregation: Aggregation) -> list[float]:
    """The weight of each target of the loss on observations, of each example."""
    answers: Counter[str] = Counter()
    targets: set[str] = set()
    for example in examples:
        answers[example.rollout] += example.answers
        if example.observed.any():
            targets.add(example.rollout)
    scale = aggregation.observations * aggregation.share
    return [scale / max(len(targets) * answers[example.rollout], 1) for example in examples]


def _fitting_length(example: Example, row_length: int, keep_tails: bool) -> int:
    trained = np.flatnonzero(example.mask)
    needed = int(trained[-1]) + 1 if len(trained) else 0
    if needed <= row_length:
        return min(len(example.ids), row_length) if keep_tails else needed
    raise PackError(
        f"rollout {example.rollout} needs rows of {needed} tokens; set learner.row_length {row_length} at least so high"
    )


def _first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices of the examples of each row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _empty(shape: Shape) -> Microbatch:
    def zeros(dtype: type) -> np.ndarray:
        return np.zeros((shape.rows, shape.row_length), dtype)

    integers = {name: zeros(np.int32) for name in ("ids", "positions", "segment_ids", "domain")}
    masks = {name: zeros(np.bool_) for name in ("mask", "observed")}
    floats = {name: zeros(np.float32) for name in (*COPIED, "weights", "value_weights", "observed_weights")}
    return Microbatch(**integers, **masks, temperature=zeros(np.float32) + 1, **floats)


def _write(batch: Microbatch, at: tuple[int, slice], example: Example, segment: int) -> None:
    length = at[1].stop - at[1].start
    batch.positions[at] = np.arange(length)
    batch.segment_ids[at] = segment
    batch.domain[at] = example.domain
    batch.temperature[at] = np.where(example.observed[:length], 1, example.temperature)
    for name in ("ids", "mask", "observed", *COPIED):
        getattr(batch, name)[at] = getattr(example, name)[:length]
