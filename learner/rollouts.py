"""What the ledger keeps: a record per rollout, grouped by task, and the rules that bound them. Data only.

A rollout is open (pending, leased, waiting for an update, or in the running update) until it reaches exactly one outcome:
trained, filtered, stale, failed or cancelled. Held-out rollouts end evaluated, failed or cancelled.
"""

from __future__ import annotations

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


@dataclass
class Group:
    """A task and its fixed plan of members."""

    id: str
    kind: Kind
    ordinal: int
    task: Task
    rollouts: list[Rollout] = field(default_factory=list)
    stage: int = 0  # of the curriculum when it opened; 0: none

    @property
    def closed(self) -> bool:
        """Every member is delivered or out of attempts."""
        return not any(r.state in UNDELIVERED for r in self.rollouts)

    @property
    def scored(self) -> list[Rollout]:
        return [r for r in self.rollouts if r.state in SCORED]

    @property
    def rewards(self) -> list[float]:
        """Of its scored members."""
        return [r.reward for r in self.scored]

    def any(self, state: State) -> bool:
        return any(r.state is state for r in self.rollouts)

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
    selection: Selection = ALL

    @property
    def candidates(self) -> int:
        """Groups that an update chooses from."""
        return self.selection.candidates(self.groups_per_update)

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
            selection=Selection.of(config),
        )
