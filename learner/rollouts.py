"""What the ledger keeps: a record per rollout, grouped by task, and the rules that bound them. Data only.

A rollout is open (pending, leased, waiting for an update, or in the running update) until it reaches exactly one outcome:
trained, filtered, stale, failed or cancelled. Held-out rollouts end evaluated, failed or cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from common.addresses import STALE
from common.config import RunConfig
from common.types import Source, Task
from learner.selection import ALL, Selection


class Kind(StrEnum):
    """Why a group exists; the value is the letter in its ids."""

    RL = "g"
    WARM = "w"  # reference solutions for supervised updates
    EVAL = "e"  # held-out tasks; outside capacity, never in a batch

    @property
    def source(self) -> Source:
        return Source.REFERENCE if self is Kind.WARM else Source.POLICY


TRAINING = (Kind.RL, Kind.WARM)


class State(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    WAITING = "waiting"
    TRAINING = "training"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNDELIVERED = (State.PENDING, State.LEASED)
OPEN = (*UNDELIVERED, State.WAITING, State.TRAINING)
SCORED = (State.WAITING, State.TRAINING, State.STALE)  # its reward counts in the group's statistics
OUTCOMES = (State.TRAINED, State.FILTERED, State.STALE, State.FAILED, State.CANCELLED, State.EVALUATED)


ROLLOUT_ID = re.compile(r"(\d+)-([gwe])(\d+)-\d+")


class Standing(StrEnum):
    """What a delivery of (rollout, attempt) meets."""

    EXPECTED = "expected"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    UNKNOWN = "unknown"  # never handed out


class Origin(NamedTuple):
    """What sampled a token: a version, in a pool of engines."""

    version: int
    pool: str


@dataclass
class Rollout:
    id: str
    group_id: str
    member: int
    seed: int
    state: State = State.PENDING
    attempt: int = 0  # of the newest lease; 0: never leased
    tries: int = 0  # leases so far, bounded by max_attempts
    answered: int = 0  # the last attempt that was delivered, scored or failed
    actor: str = ""
    leased_at: float = 0.0
    expires: float = 0.0
    origins: tuple[Origin, ...] = ()  # of the delivered tokens
    place: tuple[str, int] = ("", 0)  # spool file and offset of the delivered bytes
    reward: float = 0.0  # of the delivered trajectory
    reason: str = ""


def born_as(rollout_id: str) -> tuple[int, Kind, int]:
    """Incarnation, kind and group's ordinal, which an id carries; incarnation 0: it is none of ours."""
    match = ROLLOUT_ID.fullmatch(rollout_id)
    return (int(match[1]), Kind(match[2]), int(match[3])) if match else (0, Kind.RL, 0)


@dataclass
class Group:
    """A task and its fixed plan of members."""

    id: str
    kind: Kind
    ordinal: int
    task: Task
    rollouts: list[Rollout] = field(default_factory=list)
    stage: int = 0  # of the curriculum when it opened; 0: none

    @classmethod
    def planned(cls, incarnation: int, kind: Kind, ordinal: int, task: Task, stage: int, seeds: Iterable[int]) -> Group:
        """A new one; a member for each seed."""
        name = f"{incarnation}-{kind.value}{ordinal:06d}"
        members = [Rollout(f"{name}-{member}", name, member, seed) for member, seed in enumerate(seeds)]
        return cls(name, kind, ordinal, task, members, stage)

    @property
    def closed(self) -> bool:
        """Every member is delivered or out of attempts."""
        return not any(r.state in UNDELIVERED for r in self.rollouts)

    @property
    def ready(self) -> bool:
        """Closed, with something to train on."""
        return self.closed and self.any(State.WAITING)

    @property
    def scored(self) -> list[Rollout]:
        return [r for r in self.rollouts if r.state in SCORED]

    @property
    def rewards(self) -> list[float]:
        """Of its scored members."""
        return [r.reward for r in self.scored]

    def any(self, state: State) -> bool:
        return any(r.state is state for r in self.rollouts)

    def move(self, before: State, after: State, reason: str = "") -> int:
        """Members in the state `before` are in `after` now; returns how many."""
        members = [rollout for rollout in self.rollouts if rollout.state is before]
        for rollout in members:
            rollout.state, rollout.reason = after, reason
        return len(members)

    def to_json(self) -> dict[str, Any]:
        rollouts = [asdict(r) | {"state": r.state.value} for r in self.rollouts]
        named = {"id": self.id, "kind": self.kind.value, "ordinal": self.ordinal, "stage": self.stage}
        return named | {"task": asdict(self.task), "rollouts": rollouts}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Group:
        group = cls(data["id"], Kind(data["kind"]), data["ordinal"], Task(**data["task"]), stage=data.get("stage", 0))
        for item in data["rollouts"]:
            file, offset = item["place"]
            origins = tuple(Origin(version, pool) for version, pool in item["origins"])
            fixed = {"state": State(item["state"]), "origins": origins, "place": (file, offset)}
            group.rollouts.append(Rollout(**(item | fixed)))
        return group


@dataclass(frozen=True)
class Rules:
    """The numbers that the ledger obeys."""

    seed: int
    updates: int
    groups_per_update: int
    group_size: int
    warm_updates: int
    warm_rollouts: int
    max_lag: int
    stale_max_lag: int  # of tokens that the stale pool sampled
    on_stale: str  # "mask", "drop" or "restart"
    take: str  # "fixed" or "drain"
    max_attempts: int
    lease_s: float
    weights: Mapping[str, float]  # of domains
    selection: Selection = ALL

    @property
    def candidates(self) -> int:
        """Groups that an update chooses from."""
        return self.selection.candidates(self.groups_per_update)

    def need(self, kind: Kind) -> int:
        """Groups that an update is made from."""
        return self.warm_rollouts if kind is Kind.WARM else self.candidates

    def members(self, kind: Kind) -> int:
        """Rollouts of a group."""
        return self.group_size if kind is Kind.RL else 1

    def batches(self, kind: Kind, done: int) -> int:
        """For how many updates groups may be open after `done` of them: `max_lag + 1`, in the warm start two, and no more than
        remain."""
        if kind is Kind.EVAL:
            raise ValueError("evaluation is outside capacity")
        most, planned = (2, self.warm_updates) if kind is Kind.WARM else (self.max_lag + 1, self.updates)
        return max(0, min(most, planned - done))

    def bound(self, pool: str) -> int:
        """The greatest lag at which a token of `pool` is trained."""
        return self.stale_max_lag if pool == STALE else self.max_lag

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        algorithm, learner, warm = config.algorithm, config.learner, config.warm
        return cls(
            seed=config.seed,
            updates=learner.updates,
            groups_per_update=algorithm.groups_per_update,
            group_size=algorithm.group_size,
            warm_updates=warm.updates,
            warm_rollouts=warm.rollouts_per_update,
            max_lag=learner.max_lag,
            stale_max_lag=config.cross_policy.max_lag,
            on_stale=learner.on_stale,
            take=learner.take,
            max_attempts=learner.max_attempts,
            lease_s=learner.lease_s,
            weights={domain.name: domain.weight for domain in config.domains},
            selection=Selection.of(config),
        )
