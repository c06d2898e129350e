"""The one place that makes gRPC channels and servers, TLS contexts for HTTP, and cuts large messages into chunks.

Limits and keepalive stand here for both sides, so that they cannot disagree. Addresses are `host:port`.
"""

from __future__ import annotations

import ssl
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_MESSAGE_BYTES = 16 * 2**20  # both directions, both sides; observations and chunks stay below
CHUNK_BYTES = 2 * 2**20  # a trajectory travels in chunks of at most this size
MAX_TRAJECTORY_BYTES = 256 * 2**20  # a larger one is an error of that rollout, not of the stream
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.enable_retries", 0),  # one layer retries, and it is ours
    ("grpc.initial_reconnect_backoff_ms", 200),  # a restarted server is found again soon, not after up to two minutes
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a shared one
]


@dataclass(frozen=True)
class Tls:
    """Mutual TLS: both sides show a certificate that `ca` signed. Empty paths: plain text."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes]:
        return Path(self.key).read_bytes(), Path(self.cert).read_bytes(), Path(self.ca).read_bytes()


def server_context(tls: Tls) -> ssl.SSLContext:
    """For an HTTP server that lets in whoever shows a certificate that `ca` signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: Tls) -> ssl.SSLContext | None:
    """For an HTTP client that shows its certificate, and wants one for the host that it calls; None without TLS."""
    if not tls.cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


class PortBusy(OSError):
    """The address cannot be bound."""


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    key, cert, ca = tls.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def channel(address: str, tls: Tls = Tls()) -> grpc.Channel:
    if tls.cert:
        return grpc.secure_channel(address, _credentials(tls), CHANNEL_OPTIONS)
    return grpc.insecure_channel(address, CHANNEL_OPTIONS)


def aio_channel(address: str, tls: Tls = Tls()) -> grpc.aio.Channel:
    if tls.cert:
        return grpc.aio.secure_channel(address, _credentials(tls), CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)


def bind(server: grpc.Server | grpc.aio.Server, address: str, tls: Tls = Tls()) -> int:
    """Bind and return the port (useful with port 0). Raises PortBusy."""
    try:
        if tls.cert:
            key, cert, ca = tls.read()
            credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        port, cause = 0, error
    else:
        cause = None
    if port == 0:
        raise PortBusy(f"cannot listen on {address}: the port is busy; stop the other process or set another port") from cause
    return port


def thread_server(workers: int) -> grpc.Server:
    """A server whose handlers run on threads (the learner's: a jitted step would block an event loop)."""
    return grpc.server(ThreadPoolExecutor(workers, thread_name_prefix="grpc"), options=SERVER_OPTIONS)


def aio_server() -> grpc.aio.Server:
    return grpc.aio.server(options=SERVER_OPTIONS)


def add_health_and_reflection(server: grpc.Server, services: Sequence[str]) -> health.HealthServicer:
    """Health (SERVING for each name) and reflection on a thread server."""
    servicer = health.HealthServicer()
    for name in services:
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return servicer


async def add_aio_health_and_reflection(server: grpc.aio.Server, services: Sequence[str]) -> Any:
    """The same on an asyncio server; returns grpc_health's asyncio servicer, whose `set` is a coroutine."""
    servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    for name in services:
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return servicer


@dataclass(frozen=True)
class Chunk:
    index: int
    count: int
    total_bytes: int
    crc32: int  # of the whole
    payload: bytes


def split(data: bytes, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut `data` into chunks; empty data is one empty chunk.

    Raises ValueError above MAX_TRAJECTORY_BYTES.
    """
    if len(data) > MAX_TRAJECTORY_BYTES:
        raise ValueError(f"{len(data)} bytes, the limit for one trajectory is {MAX_TRAJECTORY_BYTES}")
    count = max(1, -(-len(data) // size))
    crc = zlib.crc32(data)
    for index in range(count):
        yield Chunk(index, count, len(data), crc, data[index * size : (index + 1) * size])


class Assembler:
    """Puts the chunks of one message together. Chunks may repeat; nothing half leaves it."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}

    def add(self, chunk: Chunk) -> bytes | None:
        """The whole message when this chunk completes it, else None.

        Raises ValueError when sizes or checksum do not fit: the sender starts again.
        """
        if not 0 <= chunk.index < chunk.count or chunk.total_bytes > MAX_TRAJECTORY_BYTES:
            raise ValueError(f"chunk {chunk.index} of {chunk.count}, {chunk.total_bytes} bytes in all")
        if chunk.index == 0:
            self._parts.clear()  # the sender starts again
        self._parts[chunk.index] = chunk.payload
        if sum(map(len, self._parts.values())) > chunk.total_bytes:
            raise ValueError(f"more than the announced {chunk.total_bytes} bytes")
        if chunk.index < chunk.count - 1:
            return None
        if self._parts.keys() != set(range(chunk.count)):
            raise ValueError(f"only chunks {sorted(self._parts)} of {chunk.count} arrived")
        data = b"".join(self._parts[i] for i in range(chunk.count))
        if len(data) != chunk.total_bytes or zlib.crc32(data) != chunk.crc32:
            raise ValueError("checksum of the whole does not fit")
        return data
