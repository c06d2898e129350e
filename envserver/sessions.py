"""The live sessions of an env server: opening, stepping once per index, leases, capacity.

Everything here runs on one event loop, so there are no locks; environment code that may block runs on `Workers`.
Answers are recorded as the asyncio tasks that make them: a repeated request awaits the same task, whether it is
finished or still running, and a caller that goes away cancels nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc

from common import convert
from common.proto import rl_pb2 as pb
from common.types import Action, Observation, Status, Task
from common.waits import Edge, Waits
from envserver.env import Domain, Env, TaskError
from envserver.workers import Abandoned, Job, Workers

log = logging.getLogger(__name__)

MESSAGE_LIMIT = 500  # characters of an error: gRPC carries it in headers, which are small


class Refused(Exception):
    """A request that is answered with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Session:
    id: str
    task: Task
    deadline: float
    opening: asyncio.Task[pb.OpenReply] = field(init=False)
    answers: list[asyncio.Task[pb.StepReply]] = field(default_factory=list)  # by step index
    actions: list[Action] = field(default_factory=list)  # by step index
    env: Env | None = None  # None until the environment is made
    job: Job | None = None  # the latest call on the pool; None without one
    over: bool = False  # the episode has ended


class Sessions:
    """Raises Refused for everything that a caller did wrong or cannot have now."""

    def __init__(
        self,
        domain: Domain,
        capacity: int,
        threads: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        late_s: float = 0.0,
    ) -> None:
        """`late_s`: of one call of environment code, before it is told as late; 0: never."""
        self.domain = domain
        self.capacity = capacity
        self.lease_s, self._late_s = lease_s, late_s
        self.waits = Waits(clock)
        self.draining = False
        self.idle = asyncio.Event()  # set while no session is open
        self.idle.set()
        self.workers = Workers(threads)
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._tools_json = json.dumps(domain.tools)

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, session_id: str, task: Task, with_reference: bool) -> pb.OpenReply:
        if not session_id:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "session_id is empty; choose one per attempt")
        session = self._open.get(session_id)
        if session is None:
            self._admit(task, with_reference)
            session = self._open[session_id] = Session(session_id, task, self._clock() + self.lease_s)
            self.idle.clear()
            session.opening = _recorded(self._start(session, with_reference))
        elif (session.task.id, session.task.seed, session.task.payload) != (task.id, task.seed, task.payload):
            message = f"session {session_id} is open for task {session.task.id}, not for {task.id}; use another session_id"
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, message)
        session.deadline = self._clock() + self.lease_s
        return await asyncio.shield(session.opening)

    async def step(self, session_id: str, index: int, action: Action) -> pb.StepReply:
        session = self._open.get(session_id)
        if session is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"session {session_id} is not open here: closed, expired or never opened")
        session.deadline = self._clock() + self.lease_s
        if not 0 <= index < len(session.answers):
            self._check_next(session, index)
            session.actions.append(action)
            session.answers.append(_recorded(self._advance(session, index, action)))
        elif session.actions[index] != action:
            message = f"session {session_id}: step {index} was taken with another action; use the next index"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
        return await asyncio.shield(session.answers[index])

    def close(self, session_id: str) -> bool:
        """Whether the session existed. Never waits for environment code."""
        session = self._open.get(session_id)
        if session is not None:
            self._drop(session)
        return session is not None

    def renew(self, session_ids: Collection[str]) -> list[str]:
        """Extend leases; returns the ids that are not held here."""
        deadline = self._clock() + self.lease_s
        for session in filter(None, map(self._open.get, session_ids)):
            session.deadline = deadline
        return [session_id for session_id in session_ids if session_id not in self._open]

    def expire(self) -> None:
        """Close the sessions whose lease has run out."""
        now = self._clock()
        for session in [session for session in self._open.values() if session.deadline <= now]:
            log.warning("session %s: not renewed for %.1f s, closed", session.id, self.lease_s)
            self._drop(session)

    def edges(self, session_ids: Collection[str]) -> list[Edge]:
        """What these sessions wait for: a thread, or their environment's code."""
        return [edge for edge in self.waits.edges() if edge.owner in session_ids]

    async def expire_forever(self) -> None:
        """Look for expired leases several times per lease."""
        interval = min(1.0, self.lease_s / 5)
        while True:
            before = self._clock()
            await asyncio.sleep(interval)
            late = self._clock() - before - interval
            if late > interval:  # this process stood still, and so did the renewals in its socket: nobody is to blame
                for session in self._open.values():
                    session.deadline += late
            self.expire()

    def close_all(self) -> None:
        for session in list(self._open.values()):
            self._drop(session)

    def _admit(self, task: Task, with_reference: bool) -> None:
        if self.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this env server is draining; open the session on another one")
        if task.domain != self.domain.name:
            message = f"task {task.id} is of domain {task.domain!r}; this server has {self.domain.name!r}"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
        if with_reference and not self.domain.has_reference:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"domain {self.domain.name!r} has no reference solutions")
        if len(self._open) >= self.capacity:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"all {self.capacity} sessions are in use")
        if self.workers.stuck >= self.workers.threads:
            message = f"{self.workers.stuck} calls of closed sessions still run; the environment code hangs"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    def _check_next(self, session: Session, index: int) -> None:
        expected = len(session.answers)
        if index != expected:
            message = f"session {session.id}: step {index} is out of order, the next one is {expected}"
        elif not session.opening.done():
            message = f"session {session.id} is still opening"
        elif session.answers and not session.answers[-1].done():
            message = f"session {session.id}: step {expected - 1} is still running"
        elif session.over:
            message = f"session {session.id}: the episode has ended; close it"
        else:
            return
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, message)

    async def _start(self, session: Session, with_reference: bool) -> pb.OpenReply:
        def call() -> pb.OpenReply:
            session.env = self.domain.make_env()
            observation = session.env.reset(session.task)
            reference = self.domain.reference(session.task) if with_reference else []
            return pb.OpenReply(
                observation=_to_wire(observation),
                tools_json=self._tools_json,
                instructions=self.domain.instructions,
                reference=[convert.action_to(action) for action in reference],
                lease_seconds=self.lease_s,
                task_id=session.task.id,
            )

        reply = await self._guard(session, "reset", call)
        session.over = reply.observation.status != pb.RUNNING
        return reply

    async def _advance(self, session: Session, index: int, action: Action) -> pb.StepReply:
        env = session.env
        assert env is not None  # _check_next has seen the session open
        reply = await self._guard(session, f"step {index}", lambda: pb.StepReply(observation=_to_wire(env.step(action))))
        session.over = reply.observation.status != pb.RUNNING
        return reply

    async def _guard(self, session: Session, what: str, call: Callable[[], Any]) -> Any:
        """The boundary to environment code: its exceptions become statuses and end the session."""
        if self._open.get(session.id) is not session:  # closed before this task had its first turn
            raise Refused(grpc.StatusCode.ABORTED, f"session {session.id} was closed before {what}")
        try:
            if not self.domain.blocking:
                return call()
            code = f"code of {self.domain.name}"
            with self.waits.wait(session.id, "env.thread", f"one of {self.workers.threads} threads", self._late_s, what) as wait:
                session.job = self.workers.submit(call, lambda: wait.set("env.code", code, what))
                return await session.job.future
        except Abandoned as error:
            raise Refused(grpc.StatusCode.ABORTED, f"session {session.id} was closed during {what}") from error
        except TaskError as error:
            code, message = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except Exception as error:  # infrastructure: never a reward
            log.exception("session %s, task %s: %s failed", session.id, session.task.id, what)
            code, message = grpc.StatusCode.INTERNAL, f"{self.domain.name} {what}: {type(error).__name__}: {error}"
        self._drop(session)
        raise Refused(code, message[:MESSAGE_LIMIT])

    def _drop(self, session: Session) -> None:
        """Free the slot now; the environment closes when its running call returns."""
        if self._open.get(session.id) is not session:
            return  # closed before, while its environment was failing
        del self._open[session.id]
        if not self._open:
            self.idle.set()

        def close() -> None:
            if session.env is not None:
                session.env.close()

        if session.job is not None:
            self.workers.abandon(session.job, close)
        else:
            try:
                close()
            except Exception:
                log.exception("session %s: close failed", session.id)


def _recorded(answer: Any) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(answer)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone away
    return task


def _to_wire(observation: Observation) -> pb.ObservationMessage:
    """Raises ValueError for an observation that no trajectory may hold."""
    if not math.isfinite(observation.reward) or not all(map(math.isfinite, observation.metrics.values())):
        raise ValueError(f"reward {observation.reward} and metrics {observation.metrics} must be finite")
    if observation.status not in (Status.RUNNING, Status.TERMINATED, Status.TRUNCATED):
        raise ValueError(f"an environment cannot answer with status {observation.status!r}")
    return convert.observation_to(observation)
