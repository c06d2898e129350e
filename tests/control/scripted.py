"""What the tests of the control plane share: small configurations, records, a clock set by hand, a scripted actor."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common import wire
from common.config import RunConfig
from common.convert import assignment_from, trajectory_bytes
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc
from common.types import (
    Assignment,
    ContextKind,
    EngineInfo,
    Source,
    Status,
    Step,
    Task,
    Trajectory,
    VersionRun,
    spans_of,
)
from common.validate import Vocabulary
from learner.control import Control
from learner.rollouts import Rules
from tests import records

VOCABULARY = Vocabulary(rows=100, sampleable=90)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class EventLog:
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kind: str, detail: dict[str, Any]) -> None:
        self.entries.append((kind, detail))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [detail for name, detail in self.entries if name == kind]


RULES = Rules(
    seed=7,
    updates=100,
    groups_per_update=2,
    group_size=2,
    warm_updates=0,
    warm_rollouts=3,
    max_lag=1,
    stale_max_lag=4,
    on_stale="mask",
    take="fixed",
    max_attempts=2,
    lease_s=10.0,
    weights={"toy": 1.0},
)


def rules(**changes: Any) -> Rules:
    return replace(RULES, **changes)


def make_tasks(domain: str, split: str, count: int) -> list[Task]:
    return [Task(domain, f"{split}-{i}", i, {"n": i}) for i in range(count)]


def config(**tables: Any) -> RunConfig:
    base: dict[str, Any] = {
        "domains": [{"name": "toy", "train_tasks": 6, "heldout_tasks": 4}],
        "algorithm": {"group_size": 2, "groups_per_update": 2, "minibatches": 1},
        "learner": {"updates": 3, "max_lag": 1, "max_attempts": 2, "lease_s": 10.0, "stall_s": 5.0},
        "warm": {"updates": 0, "rollouts_per_update": 3},
        "eval": {"tasks": 3, "deadline_s": 30.0},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table if isinstance(table, dict) else table
    return RunConfig.model_validate(base)


def make_control(
    folder: Path, clock: Clock | None = None, events: EventLog | None = None, incarnation: int = 1, **tables: Any
) -> Control:
    run = config(**tables)
    tasks = {d.name: {"train": make_tasks(d.name, "train", 6), "heldout": make_tasks(d.name, "heldout", 4)} for d in run.domains}
    extra = () if clock is None else (clock,)
    return Control(run, tasks, folder, incarnation, VOCABULARY, events or EventLog(), *extra)


def engine(version: int, state: str = "ready", reason: str = "", pool: str = "main") -> EngineInfo:
    return EngineInfo("engine-0", "http://127.0.0.1:1", pool, version, state, reason)


def step(ids: list[int], runs: list[tuple[Any, ...]], reward: float = 0.0, context: list[int] | None = None) -> Step:
    """`runs` are (start, version), or (start, version, pool)."""
    context = [1, 2] if context is None else context
    return records.step(
        context,
        ids,
        reward=reward,
        context_spans=spans_of([(len(context), ContextKind.TASK)]),
        versions=tuple(VersionRun(start, version, "engine-0", *pool or ("main",)) for start, version, *pool in runs),
    )


def trajectory(a: Assignment, version: int = 1, reward: float = 1.0, **changes: Any) -> Trajectory:
    """A valid answer to `a`: two action tokens of `version`."""
    made = step([3, 4], [(0, version)], reward)
    if a.source == Source.REFERENCE:
        made = replace(made, action_logprobs=np.zeros(0, np.float32), versions=())
    names = {"rollout_id": a.rollout_id, "attempt": a.attempt, "group_id": a.group_id}
    return records.trajectory(made, **(names | {"task": a.task, "source": a.source, "sampling": a.sampling} | changes))


def failed(a: Assignment, reason: str = "env_lost") -> Trajectory:
    return trajectory(a, steps=(), status=Status.FAILED, flags=(f"reason:{reason}",))


def hand_in(control: Control, t: Trajectory, incarnation: int = 0) -> str:
    """Deliver without a wire; returns the status."""
    key = (t.rollout_id, t.attempt)
    answer = control.standing(incarnation or control.incarnation, key)
    if answer.status == "EXPECTED":
        answer = control.deliver(incarnation or control.incarnation, key, trajectory_bytes(t))
    return answer.status


def started(folder, **tables):
    """A control plane in the RL phase, with version 1 on a ready engine."""
    clock, events = Clock(), EventLog()
    control = make_control(folder, clock, events, **tables)
    publish(control, 1, 0)
    control.set_engines([engine(1)])
    control.start_rl()
    return control, clock, events


def publish(control: Control, version: int, update: int) -> None:
    """`version` is known, and proven on engine-0."""
    control.published(version, update)
    control.proofs.passed("engine-0", version)


def lease(control, capacity=100, actor="actor-0") -> list[Assignment]:
    return control.lease(actor, capacity).assignments


def in_background(function, *args):
    """Run `function` on a thread; returns a function that waits for its result."""
    box = []
    thread = threading.Thread(target=lambda: box.append(function(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(20)
        assert not thread.is_alive()
        return box[0]

    return result


def unsampled():
    """A step without logprobs and versions."""
    return replace(step([3], []), action_logprobs=np.zeros(0, np.float32))


class ScriptedActor:
    """An actor as the learner sees it: leases, delivers in chunks, renews."""

    def __init__(self, port: int, name: str = "actor-0") -> None:
        self.name = name
        self.channel: grpc.Channel = wire.channel(f"127.0.0.1:{port}")
        self.stub = rl_pb2_grpc.LearnerServiceStub(self.channel)
        self.incarnation = 0

    def lease(self, capacity: int) -> list[Assignment]:
        reply = self.stub.Lease(pb.LeaseRequest(actor_id=self.name, capacity=capacity), timeout=10)
        self.incarnation = reply.incarnation
        return [assignment_from(a) for a in reply.assignments]

    def chunks(self, t: Trajectory, size: int = wire.CHUNK_BYTES) -> list[pb.DeliverRequest]:
        common = {"actor_id": self.name, "incarnation": self.incarnation, "rollout_id": t.rollout_id, "attempt": t.attempt}
        return [
            pb.DeliverRequest(
                chunk=c.index, chunks=c.count, total_bytes=c.total_bytes, crc32=c.crc32, payload=c.payload, **common
            )
            for c in wire.split(trajectory_bytes(t), size)
        ]

    def send(self, request: pb.DeliverRequest) -> pb.DeliverReply:
        return self.stub.Deliver(request, timeout=30)

    def deliver(self, t: Trajectory, size: int = wire.CHUNK_BYTES) -> str:
        """The last status, by name."""
        reply = pb.DeliverReply()
        for request in self.chunks(t, size):
            reply = self.send(request)
            if reply.status != pb.MORE:
                break
        return pb.DeliverStatus.Name(reply.status)

    def renew(self, running: list[tuple[str, int]], waits: list[pb.WaitMessage] | None = None) -> pb.RenewReply:
        keys = [pb.RolloutKey(rollout_id=r, attempt=a) for r, a in running]
        request = pb.RenewRequest(actor_id=self.name, incarnation=self.incarnation, running=keys, waits=waits or [])
        return self.stub.Renew(request, timeout=10)

    def close(self) -> None:
        self.channel.close()
