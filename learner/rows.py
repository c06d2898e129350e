"""The sampled tokens of an update's rollouts as rows: gathered across segments, credited, and put back.

A rollout may be cut into several segments (its context was rewritten, or it branched). Its action tokens stand in one row, in
the order of their steps; context tokens take no part. Rows are filled up to a power of two of tokens and of rollouts, so that
few shapes are compiled.

Dimension key: T tokens of a segment, R rollouts, A action tokens of a rollout in step order, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from common.record import Segment
from common.types import Trajectory
from learner.losses import LOG_RATIO_BOUND


@dataclass(frozen=True, eq=False)
class Rollout:
    """A trajectory as the learner works on it, and what its networks said of it when the update began: [T] per segment.

    What an algorithm does not read may be missing.
    """

    trajectory: Trajectory
    segments: Sequence[Segment]
    masks: Sequence[np.ndarray]  # bool: trained on
    values: Sequence[np.ndarray] = ()  # of the state before each token
    after: float = 0.0  # of the state after the rollout's last token: its tail, or its last action where there is none
    logprobs: Sequence[np.ndarray] = ()  # of the sampled tokens, under the weights that the update began with
    reference: Sequence[np.ndarray] = ()  # the same, under the reference policy


@dataclass(frozen=True, eq=False)
class Credit:
    """What the losses need to know of one segment; 0 wherever the policy did not sample the token."""

    advantages: np.ndarray  # [T] float32
    returns: np.ndarray  # [T] float32
    old_values: np.ndarray  # [T] float32: the critic's, when the update began
    weights: np.ndarray  # [T] float32: of the off-policy correction


class Tokens:
    """The sampled tokens of rollouts as rows [R, A] in step order, filled up with what `mask` leaves out."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        owners = [np.concatenate([s.step_of[s.mask] for s in rollout.segments]) for rollout in rollouts]
        self._orders = [np.argsort(owner, kind="stable") for owner in owners]
        self.steps = [owner[order] for owner, order in zip(owners, self._orders, strict=True)]  # [A] of each token
        _, self.mask = rows_of(self.steps)

    def rows(self, arrays: Sequence[np.ndarray]) -> jax.Array:
        """[A] of each rollout -> [R, A] float32."""
        return rows_of(arrays)[0]

    def gather(self, name: str) -> jax.Array:
        """[T] per segment, an attribute of the rollouts -> [R, A]; 0 where it is missing."""
        if not all(len(getattr(rollout, name)) for rollout in self.rollouts):
            return jnp.zeros(self.mask.shape, jnp.float32)
        return self._compact([getattr(rollout, name) for rollout in self.rollouts])

    def _compact(self, found: Sequence[Sequence[np.ndarray]]) -> jax.Array:
        """[T] per rollout and segment -> [R, A]."""
        return self.rows(
            [
                np.concatenate([x[s.mask] for x, s in zip(own, r.segments, strict=True)])[order]
                for own, r, order in zip(found, self.rollouts, self._orders, strict=True)
            ]
        )

    def spread(self, *arrays: jax.Array) -> list[list[Credit]]:
        """[R, A] each -> of each rollout and segment [T], as the fields of a Credit."""
        found = [np.asarray(array, np.float32) for array in arrays]
        out = []
        for index, (rollout, order) in enumerate(zip(self.rollouts, self._orders, strict=True)):
            compact = np.zeros((len(found), len(order)), np.float32)
            compact[:, order] = [array[index, : len(order)] for array in found]
            parts, at = [], 0
            for segment in rollout.segments:
                whole = np.zeros((len(found), len(segment.ids)), np.float32)
                count = int(segment.mask.sum())
                whole[:, segment.mask] = compact[:, at : at + count]
                parts.append(Credit(*whole))
                at += count
            out.append(parts)
        return out

    def of_steps(self, values: np.ndarray) -> jax.Array:
        """[S] over the steps of all rollouts, one after another -> [R, A]."""
        cuts = np.cumsum([len(rollout.trajectory.steps) for rollout in self.rollouts])[:-1]
        return self.rows([own[steps] for own, steps in zip(np.split(values, cuts), self.steps, strict=True)])

    def turns(self) -> tuple[jax.Array, jax.Array]:
        """[R, A] bool: the first and the last token of each step."""
        new = [np.diff(steps, prepend=-1) != 0 for steps in self.steps]
        ends = [np.append(own[1:], True)[: len(own)] for own in new]
        return self.rows(new) > 0, self.rows(ends) > 0

    def trained(self) -> jax.Array:
        """[R, A] bool."""
        return self._compact([rollout.masks for rollout in self.rollouts]) > 0

    def behaviour(self) -> jax.Array:
        """[R, A] logprobs as they were recorded."""
        return self._compact([[segment.logprobs for segment in rollout.segments] for rollout in self.rollouts])

    def log_weights(self) -> jax.Array:
        """log(proximal/behaviour); 0 without the proximal."""
        if not all(len(rollout.logprobs) for rollout in self.rollouts):
            return jnp.zeros(self.mask.shape)
        return jnp.clip(self.gather("logprobs") - self.behaviour(), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def domains(self) -> tuple[np.ndarray, int]:
        """[R] numbers of the domains, and how many there are."""
        names = sorted({rollout.trajectory.task.domain for rollout in self.rollouts})
        own = [names.index(rollout.trajectory.task.domain) for rollout in self.rollouts]
        return np.asarray(own + [0] * (len(self.mask) - len(own))), len(names)


def rows_of(arrays: Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Arrays of any lengths as float32 rows, and which entries are real."""
    out = np.zeros((power(len(arrays)), power(max(map(len, arrays), default=0))), np.float32)
    mask = np.zeros(out.shape, bool)
    for index, array in enumerate(arrays):
        out[index, : len(array)], mask[index, : len(array)] = array, True
    return jnp.asarray(out), jnp.asarray(mask)


def power(size: int) -> int:
    """The size that is compiled for: a power of two, at least 16."""
    return 1 << max(4, (size - 1).bit_length())
