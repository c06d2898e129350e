"""What an update trains on: groups of trajectories, and which of their tokens are young enough for the loss.

Dimension key: A action tokens of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.addresses import MAIN, STALE
from common.types import Step, Trajectory
from learner.evaluation import succeeded
from learner.ledger import Ledger
from learner.rollouts import SCORED, Group, Kind, Origin, State

COINCIDENCE = 1e-6


@dataclass(frozen=True)
class Lag:
    """Of the live tokens that one pool of engines sampled, in updates."""

    tokens: int
    mean: float
    max: int


@dataclass(frozen=True, eq=False)
class Batch:
    kind: Kind  # RL, or WARM: reference solutions for a supervised update
    update: int  # committed updates of this kind when it left
    groups: tuple[tuple[Trajectory, ...], ...]  # scored members, oldest dispatch first; stale ones count in statistics only
    live: dict[str, list[np.ndarray]]  # rollout id -> per step [A] bool: may enter the loss
    lags: dict[str, int]  # rollout id -> updates since its oldest token
    lag: Lag  # of main
    stale_lag: Lag  # of the stale pool
    stale: int  # rollouts without a live token
    live_tokens: int
    success: dict[str, float]  # domain -> share of its rollouts that succeeded

    @property
    def identical(self) -> list[tuple[str, str]]:
        """Rollouts that cannot be independent samples, see `identical_siblings`."""
        return [pair for group in self.groups for pair in identical_siblings(group)]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each rollout with a live one."""
        return [sum(map(len, masks)) for masks in self.live.values() if any(mask.any() for mask in masks)]


def identical_siblings(group: Sequence[Trajectory]) -> list[tuple[str, str]]:
    """Pairs of rollouts of a group that sampled the very same ids although that was next to impossible: engines that draw
    with one seed for all make such groups, whose members teach nothing.

    Two independent samples agree with the probability of the sequence, exp(sum of its logprobs); a group of G has fewer than
    G² pairs, and an alarm may be wrong once in a million groups.
    """
    first: dict[tuple[bytes, ...], Trajectory] = {}
    found = []
    for trajectory in group:
        twin = first.setdefault(tuple(step.action_ids.tobytes() for step in trajectory.steps), trajectory)
        logprob = sum(float(step.action_logprobs.sum()) for step in trajectory.steps)
        if twin is not trajectory and logprob < math.log(COINCIDENCE / len(group) ** 2):
            found.append((twin.rollout_id, trajectory.rollout_id))
    return found


def build(groups: Sequence[Group], stored: Mapping[str, Trajectory], ledger: Ledger) -> Batch:
    """The batch of groups that the ledger has just handed out; `stored` has the trajectories of scored rollouts."""
    kind = groups[0].kind
    members = [[r for r in group.rollouts if r.state in SCORED and r.id in stored] for group in groups]
    live, lags = {}, {}
    counts: Counter[tuple[str, int]] = Counter()  # (pool, lag) -> live tokens
    for rollout in (r for group in members for r in group):
        steps = stored[rollout.id].steps
        if kind is Kind.WARM:
            live[rollout.id] = [np.ones(len(step.action_ids), bool) for step in steps]
        else:
            whole = rollout.state is State.TRAINING
            live[rollout.id] = [
                live_tokens(step, ledger, counts) if whole else np.zeros(len(step.action_ids), bool) for step in steps
            ]
        lags[rollout.id] = max((ledger.lag(origin.version) for origin in rollout.origins), default=0)
    tokens = sum(int(mask.sum()) for masks in live.values() for mask in masks)
    outcomes: dict[str, list[bool]] = {}
    for rollout in (r for group in members for r in group):
        outcomes.setdefault(stored[rollout.id].task.domain, []).append(succeeded(stored[rollout.id]))
    return Batch(
        kind=kind,
        update=ledger.warm_update if kind is Kind.WARM else ledger.update,
        groups=tuple(tuple(stored[r.id] for r in group) for group in members),
        live=live,
        lags=lags,
        lag=_lag(counts, MAIN),
        stale_lag=_lag(counts, STALE),
        stale=sum(r.state is State.STALE for group in members for r in group),
        live_tokens=tokens,
        success={domain: sum(values) / len(values) for domain, values in outcomes.items()},
    )


def live_tokens(step: Step, ledger: Ledger, counts: Counter[tuple[str, int]]) -> np.ndarray:
    """[A] bool. Adds the live tokens to `counts`."""
    out = np.zeros(len(step.action_ids), bool)
    for run, end in zip(step.versions, [*(r.start for r in step.versions[1:]), len(out)], strict=True):
        if ledger.live(Origin(run.version, run.pool)) and end > run.start:
            out[run.start : end] = True
            counts[run.pool, ledger.lag(run.version)] += end - run.start
    return out


def _lag(counts: Counter[tuple[str, int]], pool: str) -> Lag:
    lags = {lag: n for (name, lag), n in counts.items() if name == pool}
    tokens = sum(lags.values())
    return Lag(tokens, sum(lag * n for lag, n in lags.items()) / max(1, tokens), max(lags, default=0))
