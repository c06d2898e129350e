"""LearnerService: the control plane on the wire, on plain gRPC threads. No logic but chunks and conversions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import grpc

from common import wire
from common.convert import assignment_to, edge_from, engine_to
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc
from learner.assignments import EXPECTED
from learner.control import Control

SERVICE = pb.DESCRIPTOR.services_by_name["LearnerService"].full_name
WORKERS = 16
PARTIAL_BYTES = 2 * wire.MAX_TRAJECTORY_BYTES  # chunks of unfinished messages kept together
LEASE_WAIT_S = 0.5  # a Lease that would bring nothing waits so long for work
LEASES_WAITING = 4  # at once, which leaves threads for everything else; other actors ask again
LEASE_PART = 4  # assignments that are leased at once
LEASE_BYTES = 2 * 2**20  # a reply that has more is sent: the actor asks again for what is left
PARTIAL_S = 120.0  # chunks of a sender that went silent are dropped after so long
ACTOR_WAITS = 1_000  # of one Renew that are kept


class Partials:
    """Chunks of messages that are not complete yet. Bounded: the longest untouched message goes first, its sender starts
    again."""

    def __init__(self, limit: int = PARTIAL_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int, str], _Partial] = {}  # by (rollout, attempt, actor), longest untouched first

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(partial.bytes for partial in self._open.values())

    def add(self, key: tuple[str, int, str], chunk: wire.Chunk) -> bytes | None:
        """The whole message when `chunk` completes it, else None. Raises ValueError: the sender starts at chunk 0."""
        now = self._clock()
        with self._lock:
            partial = self._open.pop(key, None)
            if partial is None:
                if chunk.index > 0:
                    raise ValueError(f"chunk {chunk.index} of {chunk.count} without those before it")
                partial = _Partial()
            if chunk.index < chunk.count - 1:
                partial.assembler.add(chunk)
                partial.bytes = len(chunk.payload) + (partial.bytes if chunk.index else 0)
                partial.touched = now
                self._open[key] = partial
                self._drop_excess(now)
                return None
        return partial.assembler.add(chunk)  # the last one: joined outside the lock

    def _drop_excess(self, now: float) -> None:
        total = sum(partial.bytes for partial in self._open.values())
        for key, partial in list(self._open.items()):
            if total <= self._limit and partial.touched >= now - PARTIAL_S:
                break
            total -= partial.bytes
            del self._open[key]


class _Partial:
    def __init__(self) -> None:
        self.assembler = wire.Assembler()
        self.bytes = 0
        self.touched = 0.0


class LearnerService(rl_pb2_grpc.LearnerServiceServicer):
    def __init__(self, control: Control, lease_wait_s: float = LEASE_WAIT_S) -> None:
        self._control = control
        self._lease_wait_s = lease_wait_s
        self._partials = Partials()
        self._waiting = threading.BoundedSemaphore(LEASES_WAITING)

    def Lease(self, request: pb.LeaseRequest, context: grpc.ServicerContext) -> pb.LeaseReply:  # noqa: N802 - the wire's name
        reply = pb.LeaseReply(incarnation=self._control.incarnation)
        wanted = min(LEASE_PART, request.capacity)
        patient = self._waiting.acquire(blocking=False)
        try:
            leased = self._control.lease(request.actor_id, wanted, self._lease_wait_s if patient else 0.0, context.is_active)
        finally:
            if patient:
                self._waiting.release()
        while True:
            reply.assignments.extend(map(assignment_to, leased.assignments))
            full = len(reply.assignments) >= request.capacity or reply.ByteSize() > LEASE_BYTES
            if full or len(leased.assignments) < wanted:
                break
            wanted = min(LEASE_PART, request.capacity - len(reply.assignments))
            leased = self._control.lease(request.actor_id, wanted)
        reply.no_more, reply.retry_after_s = leased.no_more, leased.retry_after_s
        reply.engines.extend(map(engine_to, self._control.engines))
        return reply

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.RenewReply:  # noqa: N802
        running = [(key.rollout_id, key.attempt) for key in request.running]
        edges = list(map(edge_from, request.waits[:ACTOR_WAITS]))
        stop = self._control.renew(request.actor_id, running, edges, dict(request.metrics))
        return pb.RenewReply(
            incarnation=self._control.incarnation,
            engines=map(engine_to, self._control.engines),
            cancel=[pb.RolloutKey(rollout_id=rollout_id, attempt=attempt) for rollout_id, attempt in stop],
            no_more=self._control.no_more,
        )

    def Deliver(self, request: pb.DeliverRequest, context: grpc.ServicerContext) -> pb.DeliverReply:  # noqa: N802
        key = (request.rollout_id, request.attempt)
        answer = self._control.standing(request.incarnation, key)
        if answer is not EXPECTED:
            return self._reply(answer.status, answer.reason)
        chunk = wire.Chunk(request.chunk, request.chunks, request.total_bytes, request.crc32, request.payload)
        try:
            data = self._partials.add((*key, request.actor_id), chunk)
        except ValueError as error:
            return self._reply("RESEND", str(error))
        if data is None:
            return self._reply("MORE")
        try:
            answer = self._control.deliver(request.incarnation, key, data)
        except OSError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"the learner cannot write its inbox: {error}")
        return self._reply(answer.status, answer.reason)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        return pb.StatusReply(report_json=json.dumps(self._control.status()))

    def _reply(self, status: str, reason: str = "") -> pb.DeliverReply:
        return pb.DeliverReply(status=status, reason=reason, incarnation=self._control.incarnation)


def serve(control: Control, address: str, tls: wire.Tls = wire.Tls()) -> tuple[grpc.Server, int]:
    """Start serving at `address` (`host:port`, port 0 picks one); returns the server and its port. Raises wire.PortBusy."""
    server = wire.thread_server(WORKERS)
    rl_pb2_grpc.add_LearnerServiceServicer_to_server(LearnerService(control), server)
    wire.add_health_and_reflection(server, [SERVICE])
    port = wire.bind(server, address, tls)
    server.start()
    return server, port
