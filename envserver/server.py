"""EnvService: one domain's sessions over gRPC, with health, reflection and a graceful end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from envserver.admission import Catalog
from envserver.env import Domain
from envserver.sessions import Refused, Sessions

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["EnvService"].full_name
PAGE_TASKS = 1_000
PAGE_BYTES = 4 * 2**20  # of one ListTasks reply, well below the message limit

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Settings:
    """Of one server; sizes and times as in `[[domains]]`."""

    address: str  # host:port; port 0 picks a free one
    capacity: int
    threads: int
    lease_s: float
    late_s: float = 0.0  # of one call of environment code, see Sessions
    drain_s: float = 10.0  # how long open sessions may go on after the signal to stop
    tls: wire.Tls = field(default_factory=wire.Tls)


class EnvService(pb_grpc.EnvServiceServicer):
    """Wire messages to sessions and back."""

    def __init__(self, domain: Domain, catalog: Catalog, sessions: Sessions) -> None:
        self.domain = domain
        self.catalog = catalog
        self.sessions = sessions
        self.pages = {split: [convert.task_to(task) for task in tasks] for split, tasks in catalog.tasks.items()}
        self.tools_json = json.dumps(domain.tools)

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeReply:  # noqa: N802
        splits = {
            split: pb.SplitInfo(
                tasks=len(tasks), fingerprint=self.catalog.fingerprints[split], quarantined=len(self.catalog.quarantined[split])
            )
            for split, tasks in self.catalog.tasks.items()
        }
        return pb.DescribeReply(
            domain=self.domain.name,
            capacity=self.sessions.capacity,
            open_sessions=len(self.sessions),
            tools_json=self.tools_json,
            instructions=self.domain.instructions,
            splits=splits,
            has_reference=self.domain.has_reference,
            draining=self.sessions.draining,
            lease_seconds=self.sessions.lease_s,
        )

    async def ListTasks(self, request: pb.ListTasksRequest, context: grpc.aio.ServicerContext) -> pb.ListTasksReply:  # noqa: N802
        if request.split not in self.pages:
            known = ", ".join(self.pages)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown split {request.split!r}; splits: {known}")
        if request.offset < 0 or request.limit < 0:
            message = f"offset {request.offset} and limit {request.limit} must not be negative"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        tasks = self.pages[request.split]
        reply = pb.ListTasksReply(total=len(tasks), fingerprint=self.catalog.fingerprints[request.split])
        size = 0
        for task in tasks[request.offset :][: min(request.limit or PAGE_TASKS, PAGE_TASKS)]:
            size += task.ByteSize()
            if size > PAGE_BYTES and reply.tasks:
                break
            reply.tasks.append(task)
        return reply

    async def Open(self, request: pb.OpenRequest, context: grpc.aio.ServicerContext) -> pb.OpenReply:  # noqa: N802
        try:
            task = convert.task_from(request.task)
        except convert.ConvertError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return await _answer(self.sessions.open(request.session_id, task, request.with_reference), context)

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepReply:  # noqa: N802
        try:
            action = convert.action_from(request.action)
        except convert.ConvertError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return await _answer(self.sessions.step(request.session_id, request.step_index, action), context)

    async def Close(self, request: pb.CloseRequest, context: grpc.aio.ServicerContext) -> pb.CloseReply:  # noqa: N802
        return pb.CloseReply(existed=self.sessions.close(request.session_id))

    async def Renew(self, request: pb.RenewSessionsRequest, context: grpc.aio.ServicerContext) -> pb.RenewSessionsReply:  # noqa: N802
        return pb.RenewSessionsReply(
            lost=self.sessions.renew(request.session_ids),
            open_sessions=len(self.sessions),
            capacity=self.sessions.capacity,
            draining=self.sessions.draining,
            waits=map(convert.edge_to, self.sessions.edges(set(request.session_ids))),
        )


async def _answer(reply: Awaitable[Reply], context: grpc.aio.ServicerContext) -> Reply:
    try:
        return await reply
    except Refused as refusal:
        code, message = refusal.code, str(refusal)
    return await _abort(context, code, message)


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort raises")


class EnvServer:
    """A bound server. `start` serves, `drain` ends. Raises wire.PortBusy when the address is taken."""

    def __init__(self, domain: Domain, catalog: Catalog, settings: Settings) -> None:
        self.settings = settings
        self.sessions = Sessions(domain, settings.capacity, settings.threads, settings.lease_s, late_s=settings.late_s)
        self._service = EnvService(domain, catalog, self.sessions)
        self._server = wire.aio_server()
        self.port = wire.bind(self._server, settings.address, settings.tls)

    async def start(self) -> None:
        pb_grpc.add_EnvServiceServicer_to_server(self._service, self._server)
        self._health = await wire.add_aio_health_and_reflection(self._server, [SERVICE])
        await self._server.start()
        self._reaper = asyncio.get_running_loop().create_task(self.sessions.expire_forever())

    async def drain(self) -> None:
        """Take no new sessions, let the open ones end for up to `drain_s`, close the rest, stop."""
        self.sessions.draining = True
        await self._health.enter_graceful_shutdown()
        try:
            await asyncio.wait_for(self.sessions.idle.wait(), self.settings.drain_s)
        except TimeoutError:
            log.warning("closing %d sessions that were still open after %.0f s", len(self.sessions), self.settings.drain_s)
        self._reaper.cancel()
        self.sessions.close_all()
        await self._server.stop(1.0)
