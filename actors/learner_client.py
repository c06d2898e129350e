"""The actor's side of LearnerService: lease, renew, deliver.

A delivery is repeated until the learner has answered it, for as long as this process lives: the learner may be restarting.
It is known by (rollout id, attempt), so a repetition is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto.rl_pb2_grpc import LearnerServiceStub
from common.types import Assignment, EngineInfo, Trajectory
from common.waits import LEARNER, Edge, Wait

log = logging.getLogger("actors.learner")

CALL_S = 20.0  # of one call
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
DELIVER_S = 60.0  # after which a delivery is told as late; it goes on
RESENDS = 5  # times that one trajectory is started again at chunk 0 because it arrived broken

Key = tuple[str, int]  # rollout id, attempt


class LearnerAway(Exception):
    """The learner did not answer. It may be restarting."""


@dataclass(frozen=True)
class Leased:
    incarnation: int
    assignments: list[Assignment]
    engines: list[EngineInfo]
    no_more: bool
    retry_after_s: float


@dataclass(frozen=True)
class Renewed:
    incarnation: int
    engines: list[EngineInfo]
    cancel: list[Key]
    no_more: bool


class Learner:
    def __init__(self, address: str, actor_id: str, tls: wire.Tls = wire.Tls()) -> None:
        self.address = address
        self.actor_id = actor_id
        self._channel = wire.aio_channel(address, tls)
        self._stub = LearnerServiceStub(self._channel)

    async def lease(self, capacity: int) -> Leased:
        """Raises LearnerAway."""
        try:
            reply = await self._stub.Lease(pb.LeaseRequest(actor_id=self.actor_id, capacity=capacity), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise LearnerAway(f"Lease at {self.address}: {error.code().name}: {error.details()}") from error
        return Leased(
            reply.incarnation,
            [convert.assignment_from(assignment) for assignment in reply.assignments],
            [convert.engine_from(engine) for engine in reply.engines],
            reply.no_more,
            reply.retry_after_s,
        )

    async def renew(self, incarnation: int, running: Sequence[Key], waits: Sequence[Edge], metrics: dict[str, float]) -> Renewed:
        """Raises LearnerAway."""
        request = pb.RenewRequest(
            actor_id=self.actor_id,
            incarnation=incarnation,
            running=[pb.RolloutKey(rollout_id=rollout_id, attempt=attempt) for rollout_id, attempt in running],
            waits=map(convert.edge_to, waits),
            metrics=metrics,
        )
        try:
            reply = await self._stub.Renew(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise LearnerAway(f"Renew at {self.address}: {error.code().name}: {error.details()}") from error
        return Renewed(
            reply.incarnation,
            [convert.engine_from(engine) for engine in reply.engines],
            [(key.rollout_id, key.attempt) for key in reply.cancel],
            reply.no_more,
        )

    async def deliver(self, trajectory: Trajectory, incarnation: int, wait: Wait | None = None) -> str:
        """Hand `trajectory` over; returns the learner's final word: STORED, DUPLICATE, SUPERSEDED or REFUSED. `wait` says what
        keeps it.

        `incarnation` is the learner's that leased it. Raises ValueError for a trajectory that is too large to send.
        """
        wait = wait or Wait()
        wait.set("deliver", LEARNER, self.address, DELIVER_S)
        data = convert.trajectory_bytes(trajectory)
        delay, resends = FIRST_DELAY_S, 0
        while True:
            try:
                reply = await self._send(data, trajectory, incarnation)
            except grpc.aio.AioRpcError as error:
                log.info("delivery of %s waits: %s", trajectory.rollout_id, error.code().name)
                wait.move(LEARNER, f"{self.address}: {error.code().name}")
            else:
                word = pb.DeliverStatus.Name(reply.status)
                resends += reply.status == pb.RESEND
                if reply.status in (pb.STORED, pb.DUPLICATE, pb.SUPERSEDED, pb.REFUSED) or resends > RESENDS:
                    if reply.status not in (pb.STORED, pb.DUPLICATE):
                        log.warning("rollout %s attempt %d: %s %s", trajectory.rollout_id, trajectory.attempt, word, reply.reason)
                    return word
                wait.move(LEARNER, f"it answered {word}: {reply.reason}")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _send(self, data: bytes, trajectory: Trajectory, incarnation: int) -> pb.DeliverReply:
        """All chunks, until one is answered with anything but MORE."""
        reply = pb.DeliverReply()
        for chunk in wire.split(data):
            reply = await self._stub.Deliver(
                pb.DeliverRequest(
                    actor_id=self.actor_id,
                    incarnation=incarnation,
                    rollout_id=trajectory.rollout_id,
                    attempt=trajectory.attempt,
                    chunk=chunk.index,
                    chunks=chunk.count,
                    total_bytes=chunk.total_bytes,
                    crc32=chunk.crc32,
                    payload=chunk.payload,
                ),
                timeout=CALL_S,
            )
            if reply.status != pb.MORE:
                break
        return reply

    async def close(self) -> None:
        await self._channel.close()
