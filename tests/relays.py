"""Real relays on a thread of their own, and a wire to a weight server that cuts and damages what passes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from actors.relay.server import Relay, serve
from actors.relay.versions import Versions, free_bytes
from common.wire import Tls, client_context, server_context
from learner.engine_api import Deadlines, EngineApi
from learner.transport import RelayApi

DEADLINES = Deadlines(look_s=20, pause_s=20, update_s=20, fetch_s=60)
TIGHT = Deadlines(look_s=5, pause_s=5, update_s=5, fetch_s=0.5)


def put(weights: Path, version: int, sizes: dict[str, int], seed: int = 0) -> dict[str, str]:
    """A whole version of random files; sha256 of each."""
    folder = weights / str(version)
    folder.mkdir(parents=True)
    rng = np.random.default_rng([version, seed])
    sums = {}
    for name, size in sizes.items():
        (folder / name).write_bytes(data := rng.bytes(size))
        sums[name] = hashlib.sha256(data).hexdigest()
    (folder / "DONE").touch()
    return sums


def sums_of(folder: str | Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


class RelayThread:
    """`with RelayThread(folder, {"engine-0": url}) as relay: relay.api("engine-0", source).prepare(...)`."""

    def __init__(
        self,
        folder: Path,
        engines: dict[str, str],
        key: str = "",
        tls: Tls = Tls(),
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._folder, self._engines, self._key, self._tls, self._free = folder, engines, key, tls, free
        self.remove = False  # what is there, at the end: a relay that is killed cannot

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="relay", daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self.versions = Versions(self._folder, client_context(self._tls), self._free)
        relay = Relay(self._engines, self.versions, self._key)
        door = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if self._tls.cert else 'http'}://127.0.0.1:{door.getsockname()[1]}"
        runner = await serve(relay, door, server_context(self._tls) if self._tls.cert else None)
        ready.set()
        await self._ending.wait()
        await runner.cleanup()
        await relay.close()
        await self.versions.close(remove=self.remove)

    def api(self, engine: str, source: str, deadlines: Deadlines = DEADLINES, key: str = "", tls: Tls = Tls()) -> RelayApi:
        direct = EngineApi(self._engines.get(engine, "http://127.0.0.1:1"), deadlines, key or self._key)
        return RelayApi(f"{self.url}/{engine}", source, direct, client_context(tls))


class Wire:
    """Between a relay and a weight server: passes bytes on, counts those that come back, and does what a script says."""

    def __init__(self, url: str) -> None:
        self._target = url.rpartition("/")[2].split(":")
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self.cuts: deque[int] = deque()  # after so many bytes each of the next connections ends
        self.damage = 0  # so many blocks of a body get a wrong byte
        self.hold_at = 2**62  # bytes that came back, after which nothing does
        self.held = threading.Event()  # nothing comes back while it is not set
        self.held.set()
        self.bytes = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.set()
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            server = socket.create_connection((self._target[0], int(self._target[1])))
            self._sockets += [client, server]
            cut = self.cuts.popleft() if self.cuts else 2**62
            for work in (lambda c=client, s=server: self._copy(c, s), lambda s=server, c=client, n=cut: self._back(s, c, n)):
                self._threads.append(thread := threading.Thread(target=work, daemon=True))
                thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)

    def _back(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left and (data := bytearray(source.recv(min(left, 2**14)))):
                self.held.wait()
                if self.damage and not data.startswith(b"HTTP") and len(data) > 1000:
                    self.damage -= 1
                    data[-1] ^= 1
                sink.sendall(data)
                self.bytes += len(data)
                left -= len(data)
                if self.bytes > self.hold_at:
                    self.hold_at = 2**62
                    self.held.clear()
        for end in (sink, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
