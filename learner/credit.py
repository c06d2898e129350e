"""Credit: from the rewards of a rollout's steps to an advantage, a return and an old value for every sampled token.

A rollout may be cut into several segments (its context was rewritten, or it branched). Its action tokens are gathered
across them in step order, credited as one sequence, and put back. Context tokens take no part.

`values[t]` values the state before token t. It was read at token t-1 of t's own segment: every segment starts with
context, so the first action of a rewritten context is valued there, and the last action before the rewriting
bootstraps from that value.

Dimension key: T tokens of a segment, A action tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from common.record import Segment
from common.types import Status, Trajectory
from learner import advantages, temporal

_grpo = jax.jit(advantages.grpo, static_argnames="ddof")
_gae = jax.jit(temporal.gae, static_argnames=("gamma", "lam"))


@dataclass(frozen=True, eq=False)
class Credit:
    """What the losses need to know of one segment; 0 wherever the policy did not sample the token."""

    advantages: np.ndarray  # [T] float32
    returns: np.ndarray  # [T] float32
    old_values: np.ndarray  # [T] float32: the critic's, when the update began


def of_group(group: Sequence[Trajectory], segments: Sequence[Sequence[Segment]], ddof: int) -> list[list[Credit]]:
    """GRPO: every sampled token of a rollout has the rollout's advantage in its group. There are no values.

    A group is what it was planned as, a list of rollouts; its statistics are over rollouts, however many segments
    each has. The caller leaves out rollouts without a reward (FAILED).
    """
    rewards, mask = _filled(np.asarray([trajectory.total_reward for trajectory in group]))
    scores = np.asarray(_grpo(rewards, mask, ddof=ddof))[: len(group)]
    return [
        [_credit(segment, np.full(segment.mask.sum(), score)) for segment in parts]
        for score, parts in zip(scores, segments, strict=True)
    ]


@dataclass(frozen=True)
class Discount:
    gamma: float
    lam: float
    bootstrap: bool = True  # a rollout that a limit cut off goes on at the critic's value


def of_rollout(
    trajectory: Trajectory, segments: Sequence[Segment], values: Sequence[np.ndarray], after: float, discount: Discount
) -> list[Credit]:
    """GAE over the action tokens of a rollout, across its segments.

    `values` holds [T] per segment; `after` values the state after the rollout's last token (its tail, or its last
    action when there is none) and counts only when the rollout was TRUNCATED, which the record's status says and never
    a length, and when `discount` bootstraps at all. Bootstrapping is right where the limit is no part of the task
    (Pardo et al. 2018, arXiv 1712.00378); an agent that can bring the limit about earns the critic's value by doing so.
    """
    step_of = np.concatenate([segment.step_of[segment.mask] for segment in segments])
    order = np.argsort(step_of, kind="stable")
    old = np.concatenate([value[segment.mask] for segment, value in zip(segments, values, strict=True)])
    rewards, mask = _filled(place_rewards(np.asarray([step.reward for step in trajectory.steps]), step_of[order]))
    bootstrap = after if discount.bootstrap and trajectory.status == Status.TRUNCATED else 0.0
    ordered = _gae(rewards, _filled(old[order])[0], mask, jnp.float32(bootstrap), gamma=discount.gamma, lam=discount.lam)
    gains, returns = np.empty(len(order)), np.empty(len(order))
    gains[order], returns[order] = (np.asarray(x)[: len(order)] for x in ordered)
    cuts = np.cumsum([segment.mask.sum() for segment in segments])[:-1]
    parts = zip(segments, np.split(gains, cuts), np.split(returns, cuts), np.split(old, cuts), strict=True)
    return [_credit(segment, *arrays) for segment, *arrays in parts]


def place_rewards(step_rewards: np.ndarray, step_of: np.ndarray) -> np.ndarray:
    """[S] rewards of steps -> [A] rewards of action tokens: each stands on the last action token of its step.

    `step_of` [A] names the step of each action token and never falls. The reward of a step without tokens stands on
    the last token before it (the first one if there is none before); without any token there is nothing to reward.
    """
    rewards = np.zeros(len(step_of))
    if len(step_of):
        last = np.searchsorted(step_of, np.arange(len(step_rewards)), side="right") - 1
        np.add.at(rewards, np.maximum(last, 0), step_rewards)
    return rewards


def _filled(values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """[N] float32 with zeros behind, up to a power of two, so that few lengths are compiled; and which are real."""
    size = 1 << max(4, (len(values) - 1).bit_length())
    return jnp.zeros(size).at[: len(values)].set(values), jnp.arange(size) < len(values)


def last_segment(trajectory: Trajectory, segments: Sequence[Segment]) -> int:
    """Index of the segment that holds the last step, and the tail after it."""
    return next(i for i, segment in enumerate(segments) if segment.steps[-1] == len(trajectory.steps) - 1)


def _credit(segment: Segment, gains: np.ndarray, returns: np.ndarray | None = None, old: np.ndarray | None = None) -> Credit:
    """Arrays over the segment's sampled tokens, spread over all its tokens."""
    spread = []
    for compact in (gains, returns, old):
        array = np.zeros(len(segment.ids), np.float32)
        if compact is not None:
            array[segment.mask] = compact
        spread.append(array)
    return Credit(*spread)
