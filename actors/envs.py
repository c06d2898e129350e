"""The client of environment servers. Placement is ours, recovery is the sessions' leases'.

A replica is chosen by the power of two choices on its load; a full or draining one sends us to another. `Step` is
idempotent by its index, so a lost answer is asked for again with the same index. Everything else that goes wrong in a server is
EnvLost: infrastructure, never a reward.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

import grpc
import grpc.aio

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto.rl_pb2_grpc import EnvServiceStub
from common.types import Action, Observation, Task
from common.waits import Edge, Wait, Waits

log = logging.getLogger("actors.envs")

RENEW_S = 2.0
CALL_S = 30.0  # of one try of a call; a longer step is joined again under its index
STEP_TRIES = 6  # while the server cannot be reached: a server that restarts has lost the session anyway
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0
Code = grpc.StatusCode
TOO_LARGE = "larger than max"  # gRPC's own words for a message above the limit; the same code as a full server's
_AGAIN = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)  # the answer was lost on the way


class EnvLost(Exception):
    """The session, its server or the environment's code failed: infrastructure."""


@dataclass(eq=False)
class Replica:
    domain: str
    name: str  # of its process
    address: str
    stub: EnvServiceStub
    channel: grpc.aio.Channel
    sessions: dict[str, Session] = field(default_factory=dict)
    opening: set[str] = field(default_factory=set)  # asked for, and not answered yet
    edges: list[Edge] = field(default_factory=list)  # what our sessions waited for there at the last Renew
    renewed: float = 0.0  # time.monotonic() of it
    reported: int = 0  # open sessions of all actors at the last Renew
    draining: bool = False

    @property
    def load(self) -> int:
        return max(self.reported, len(self.sessions))


@dataclass(eq=False)
class Session:
    """One environment, of one rollout."""

    id: str
    replica: Replica
    observation: Observation
    instructions: str
    tools_json: str
    reference: tuple[Action, ...]
    lost: bool = False


class Envs:
    """All replicas of all domains. Use inside a running event loop; `close` it there."""

    def __init__(
        self, addresses: dict[str, list[str]], tls: wire.Tls = wire.Tls(), seed: int = 0, waits: Waits | None = None
    ) -> None:
        """`waits`: the process's register, which hears of servers that answer."""
        self._random = random.Random(seed)
        self.waits = waits or Waits()
        self._replicas = {
            domain: [self._replica(domain, index, address, tls) for index, address in enumerate(replicas)]
            for domain, replicas in addresses.items()
        }
        self._closing: set[asyncio.Task[None]] = set()

    @staticmethod
    def _replica(domain: str, index: int, address: str, tls: wire.Tls) -> Replica:
        channel = wire.aio_channel(address, tls)
        return Replica(domain, f"env-{domain}-{index}", address, EnvServiceStub(channel), channel)

    async def open(self, task: Task, session_id: str, with_reference: bool, wait: Wait | None = None) -> Session:
        """Open a session somewhere. Waits while all replicas are full or away, and `wait` says for which; the caller sets the
        deadline. Raises EnvLost."""
        wait = wait or Wait()
        if not self._replicas.get(task.domain):
            raise EnvLost(f"no env server for domain {task.domain!r}; there are {sorted(self._replicas)}")
        request = pb.OpenRequest(session_id=session_id, task=convert.task_to(task), with_reference=with_reference)
        delay, avoid = FIRST_DELAY_S, ""
        doubtful: set[Replica] = set()  # may hold the session although no answer came
        why = ""
        wait.set("env.open", f"env servers of {task.domain}")
        try:
            while True:
                replica = self._choose(task.domain, avoid)
                doubtful.add(replica)
                replica.opening.add(session_id)
                wait.move(replica.name, why)
                try:
                    reply = await replica.stub.Open(request, timeout=CALL_S)
                    self.waits.hear(replica.name)
                    doubtful.remove(replica)
                    return self._opened(replica, request, reply)
                except grpc.aio.AioRpcError as error:
                    if error.code() == Code.RESOURCE_EXHAUSTED and TOO_LARGE not in (error.details() or ""):
                        self.waits.hear(replica.name)
                        doubtful.remove(replica)
                    elif error.code() not in _AGAIN:
                        raise EnvLost(_why(replica, "Open", error)) from error
                    avoid, why = replica.address, _why(replica, "Open", error)
                finally:
                    replica.opening.discard(session_id)
                await asyncio.sleep(delay * (0.5 + self._random.random()))
                delay = min(2 * delay, LONGEST_DELAY_S)
        finally:
            for replica in doubtful:
                self._close_soon(replica, session_id)

    def _choose(self, domain: str, avoid: str) -> Replica:
        every = self._replicas[domain]
        usable = [r for r in every if not r.draining and r.address != avoid] or [r for r in every if not r.draining] or every
        if len(usable) == 1:
            return usable[0]
        first, second = self._random.sample(usable, 2)
        return first if first.load <= second.load else second

    def _opened(self, replica: Replica, request: pb.OpenRequest, reply: pb.OpenReply) -> Session:
        if reply.task_id != request.task.id:
            self._close_soon(replica, request.session_id)
            raise EnvLost(f"session {request.session_id} was opened for task {reply.task_id!r}, not {request.task.id!r}")
        session = Session(
            request.session_id,
            replica,
            convert.observation_from(reply.observation),
            reply.instructions,
            reply.tools_json,
            tuple(convert.action_from(action) for action in reply.reference),
        )
        replica.sessions[session.id] = session
        return session

    async def step(self, session: Session, index: int, action: Action) -> Observation:
        """Do `action`. Raises EnvLost; the caller sets the deadline."""
        request = pb.StepRequest(session_id=session.id, step_index=index, action=convert.action_to(action))
        failures, delay = 0, FIRST_DELAY_S
        while True:
            if session.lost:
                raise EnvLost(f"session {session.id} is gone from {session.replica.address}")
            try:
                reply = await session.replica.stub.Step(request, timeout=CALL_S)
                self.waits.hear(session.replica.name)
                session.replica.edges = [edge for edge in session.replica.edges if edge.owner != session.id]
                return convert.observation_from(reply.observation)
            except grpc.aio.AioRpcError as error:
                # A step that only takes long is no failure: asking again joins it.
                failures += error.code() != Code.DEADLINE_EXCEEDED
                if error.code() not in _AGAIN or failures == STEP_TRIES:
                    raise EnvLost(_why(session.replica, "Step", error)) from error
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    def close_session(self, session: Session) -> None:
        """Free the session, in the background."""
        session.replica.sessions.pop(session.id, None)
        if not session.lost:
            self._close_soon(session.replica, session.id)

    def _close_soon(self, replica: Replica, session_id: str) -> None:
        async def call() -> None:
            try:
                await replica.stub.Close(pb.CloseRequest(session_id=session_id), timeout=5)
            except grpc.aio.AioRpcError as error:
                log.debug("close of %s at %s: %s", session_id, replica.address, error.code())  # its lease frees it

        self._keep(call())

    def _keep(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def renew(self) -> None:
        """One heartbeat to every replica where we hold sessions, open some, or that was draining."""
        every = [replica for replicas in self._replicas.values() for replica in replicas]
        needed = [replica for replica in every if replica.sessions or replica.opening or len(every) > 1]
        await asyncio.gather(*map(self._renew, needed))

    def edges(self) -> list[Edge]:
        """What our sessions wait for inside of the servers, as these said last. Owners are `replica/session`."""
        now = time.monotonic()
        return [
            edge._replace(owner=f"{replica.name}/{edge.owner}", seconds=edge.seconds + now - replica.renewed)
            for replicas in self._replicas.values()
            for replica in replicas
            for edge in replica.edges
        ]

    async def _renew(self, replica: Replica) -> None:
        held = [*replica.sessions, *replica.opening]
        try:
            reply = await replica.stub.Renew(pb.RenewSessionsRequest(session_ids=held), timeout=RENEW_S)
        except grpc.aio.AioRpcError as error:
            log.warning("renew at %s (%s): %s", replica.address, replica.domain, error.code().name)
            return
        self.waits.hear(replica.name)
        replica.reported, replica.draining = reply.open_sessions, reply.draining
        replica.edges, replica.renewed = [convert.edge_from(edge) for edge in reply.waits], time.monotonic()
        for session_id in reply.lost:
            if session := replica.sessions.get(session_id):
                session.lost = True

    async def close(self) -> None:
        """Close what is still open, then the channels."""
        for replicas in self._replicas.values():
            for replica in replicas:
                for session in list(replica.sessions.values()):
                    self.close_session(session)
        if self._closing:
            await asyncio.wait(self._closing, timeout=5)
        for replicas in self._replicas.values():
            await asyncio.gather(*[replica.channel.close() for replica in replicas])


def _why(replica: Replica, call: str, error: grpc.aio.AioRpcError) -> str:
    return f"{call} at {replica.address} ({replica.domain}): {error.code().name}: {error.details()}"
