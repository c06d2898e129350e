"""What an update trains on: groups of trajectories, and which of their tokens are young enough for the loss.

Dimension key: A action tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.types import Step, Trajectory
from learner.evaluation import succeeded
from learner.ledger import Ledger
from learner.rollouts import SCORED, Group, Kind, State


@dataclass(frozen=True, eq=False)
class Batch:
    kind: Kind  # RL, or WARM: reference solutions for a supervised update
    update: int  # committed updates of this kind when it left
    groups: tuple[tuple[Trajectory, ...], ...]  # scored members, oldest dispatch first; stale ones count in statistics only
    live: dict[str, list[np.ndarray]]  # rollout id -> per step [A] bool: may enter the loss
    lags: dict[str, int]  # rollout id -> updates since its oldest token
    lag_mean: float  # over live tokens
    lag_max: int  # over live tokens
    stale: int  # rollouts without a live token
    live_tokens: int
    success: dict[str, float]  # domain -> share of its rollouts that succeeded

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


def build(groups: Sequence[Group], stored: Mapping[str, Trajectory], ledger: Ledger) -> Batch:
    """The batch of groups that the ledger has just handed out; `stored` has the trajectories of scored rollouts."""
    kind = groups[0].kind
    members = [[r for r in group.rollouts if r.state in SCORED and r.id in stored] for group in groups]
    live, lags = {}, {}
    weights: dict[int, int] = {}  # lag -> live tokens
    for rollout in (r for group in members for r in group):
        steps = stored[rollout.id].steps
        if kind is Kind.WARM:
            live[rollout.id] = [np.ones(len(step.action_ids), bool) for step in steps]
        else:
            whole = rollout.state is State.TRAINING
            live[rollout.id] = [_live(step, ledger, weights) if whole else np.zeros(len(step.action_ids), bool) for step in steps]
        lags[rollout.id] = max((ledger.lag(v) for v in rollout.versions), default=0)
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
        lag_mean=sum(lag * n for lag, n in weights.items()) / max(1, sum(weights.values())),
        lag_max=max(weights, default=0),
        stale=sum(r.state is State.STALE for group in members for r in group),
        live_tokens=tokens,
        success={domain: sum(values) / len(values) for domain, values in outcomes.items()},
    )


def _live(step: Step, ledger: Ledger, weights: dict[int, int]) -> np.ndarray:
    """[A] bool. Adds the live tokens to `weights` by lag."""
    out = np.zeros(len(step.action_ids), bool)
    for run, end in zip(step.versions, [*(r.start for r in step.versions[1:]), len(out)], strict=True):
        if ledger.live(run.version) and end > run.start:
            out[run.start : end] = True
            lag = ledger.lag(run.version)
            weights[lag] = weights.get(lag, 0) + end - run.start
    return out
