"""The published versions over HTTP, for relays on other hosts: GET with ranges, and the sha256 of every part of every file.

    GET /5             {"version": 5, "made": ..., "part_bytes": ..., "files": [{"name": ..., "size": ...}, ...]}
    GET /5/sums        {"sums": {file: [sha256 of its first part, of its second, ...]}}, or 202 while they are computed
    GET /5/files/NAME  the bytes, of a range when one is asked for

Sums are of parts, not of files: several threads compute them, a relay checks a part as soon as it has it, and pulls only
what is damaged again. They are computed once a version, when they are first asked for, while the bytes travel already.
Only versions with DONE exist; one that was retired is 404 from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import ssl
import sys
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common.wire import PortBusy, Tls, server_context
from learner.weights import DONE

log = logging.getLogger("learner.weight_server")

PART_BYTES = 16 * 2**20
BUFFER_BYTES = 2**20  # read, hashed and, under TLS, sent at once
HASHERS = min(4, os.cpu_count() or 1)
SUMS_S = 2.0  # that who asks for sums waits for them
IDLE_S = 60.0  # a connection that asks for nothing, or takes nothing, is closed
PATH = re.compile(r"/([1-9]\d{0,17})(?:/(sums)|/files/([A-Za-z0-9][A-Za-z0-9._-]*))?")  # no name leads out of the folder
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Missing(Exception):
    """There is no such version, or no such file in it."""


@dataclass(frozen=True)
class Listing:
    """A version: `made` (of its DONE, nanoseconds) tells it from one of the same number in a run that was started over."""

    version: int
    made: int
    part_bytes: int
    files: tuple[tuple[str, int], ...]  # names and bytes

    def json(self) -> dict[str, Any]:
        files = [{"name": name, "size": size} for name, size in self.files]
        return {"version": self.version, "made": self.made, "part_bytes": self.part_bytes, "files": files}


class Sums:
    """sha256 of the parts of versions, each computed once, on threads of its own."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        self._pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="weight-sums")
        self._lock = threading.Lock()
        self._begun: dict[Listing, dict[str, list[Future[str]]]] = {}

    def begin(self, listing: Listing) -> dict[str, list[Future[str]]]:
        """Start to compute, unless that was done; forgets versions that are gone."""
        with self._lock:
            if listing not in self._begun:
                self._begun = {one: sums for one, sums in self._begun.items() if (self._folder(one) / DONE).exists()}
                self._begun[listing] = {
                    name: [
                        self._pool.submit(_sum_of, self._folder(listing) / name, start, start + listing.part_bytes)
                        for start in range(0, size, listing.part_bytes)
                    ]
                    for name, size in listing.files
                }
            return self._begun[listing]

    def wait(self, listing: Listing) -> dict[str, Any]:
        """What is known after at most SUMS_S. Raises Missing when the version was retired meanwhile."""
        begun = self.begin(listing)
        everything = [part for parts in begun.values() for part in parts]
        if missing := wait(everything, SUMS_S).not_done:
            return {"computed": len(everything) - len(missing), "parts": len(everything)}
        try:
            return {"sums": {name: [part.result() for part in parts] for name, parts in begun.items()}}
        except (FileNotFoundError, CancelledError) as error:
            raise Missing(f"version {listing.version} was retired while it was summed up") from error
        except OSError:
            self._begun.pop(listing, None)  # the next one who asks has them computed again
            raise

    def _folder(self, listing: Listing) -> Path:
        return self._weights / str(listing.version)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _sum_of(path: Path, start: int, end: int) -> str:
    digest, view = hashlib.sha256(), memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while start < end and (count := os.preadv(file.fileno(), [view[: end - start]], start)):
            digest.update(view[:count])
            start += count
    return digest.hexdigest()


class WeightServer:
    """Serves the folder `weights` at `address` (`host:port`) from threads of its own, until `close`. Raises PortBusy."""

    def __init__(self, weights: Path, address: str, tls: Tls = Tls(), part_bytes: int = PART_BYTES) -> None:
        self.weights, self.part_bytes = weights.resolve(), part_bytes
        self.sums = Sums(self.weights)
        host, port = address.rsplit(":", 1)
        try:
            self._http = _Server((host, int(port)), self, tls)
        except OSError as error:
            raise PortBusy(f"cannot listen on {address}: {error.strerror}; stop the other process or set another port") from error
        self.url = f"{'https' if tls.cert else 'http'}://{host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="weight-server", daemon=True)
        self._thread.start()

    def listing(self, version: int) -> Listing:
        """Raises Missing."""
        folder = self.weights / str(version)
        try:
            made = (folder / DONE).stat().st_mtime_ns
            found = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
            files = sorted((entry.name, entry.stat().st_size) for entry in found if entry.name != DONE)
        except FileNotFoundError as error:
            raise Missing(f"there is no version {version}; it was never published, or is retired") from error
        return Listing(version, made, self.part_bytes, tuple(files))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.hang_up()
        self.sums.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], weights: WeightServer, tls: Tls) -> None:
        self.weights = weights
        self.connections: set[socket.socket] = set()
        super().__init__(address, _Request)
        if tls.cert:  # the handshake is made on the connection's own thread: a client that stalls there holds up nobody
            self.socket = server_context(tls).wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        usual = isinstance(sys.exception(), OSError)  # it was cut, or never spoke TLS
        log.log(logging.DEBUG if usual else logging.ERROR, "connection of %s failed", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        match = PATH.fullmatch(self.path)
        try:
            if not match:
                raise Missing(f"{self.path[:200]}: ask for /VERSION, /VERSION/sums or /VERSION/files/NAME")
            listing = self.server.weights.listing(int(match[1]))
            if match[3]:
                self._send_file(listing, match[3])
            elif match[2]:
                sums = self.server.weights.sums.wait(listing)
                self._send(200 if "sums" in sums else 202, sums)
            else:
                self.server.weights.sums.begin(listing)  # they are wanted next
                self._send(200, listing.json())
        except Missing as error:
            self._send(404, {"error": {"message": str(error)}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, listing: Listing, name: str) -> None:
        if name not in dict(listing.files):
            raise Missing(f"version {listing.version} has no file {name}")
        try:
            file = (self.server.weights.weights / str(listing.version) / name).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise Missing(f"version {listing.version} is retired") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            asked = RANGE.fullmatch(self.headers.get("Range", f"bytes=0-{size - 1}")) if size else None
            start, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, 0)
            if size and start >= end:
                self._send(416, {"error": {"message": f"{name} has {size} bytes; ask for Range: bytes=FIRST-LAST within them"}})
                return
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            self._copy(file, start, end)

    def _copy(self, file: Any, start: int, end: int) -> None:
        """The kernel copies; under TLS the bytes have to pass through here."""
        if not isinstance(self.connection, ssl.SSLSocket):
            sent = self.connection.sendfile(file, start, end - start)
            if sent != end - start:
                raise ConnectionError(f"the file ended {end - start - sent} bytes early")
            return
        view = memoryview(bytearray(min(BUFFER_BYTES, end - start)))
        while start < end:
            count = os.preadv(file.fileno(), [view[: end - start]], start)
            self.connection.sendall(view[:count])
            start += count

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
