"""Pulls one version from the learner's weight server into a folder: parts in parallel, each summed up as it arrives.

What is there already is kept when its sum is right, whoever left it: a cut connection goes on where it was cut, another
try or another process after the last whole part. Blocking; `Download.run` belongs on a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONNECTIONS = min(8, max(2, os.cpu_count() or 1))
BUFFER_BYTES = 2**20  # received, hashed and written at once, while it is in the processor's cache
SILENCE_S = 5.0  # of a connection; then it is made anew
TRIES = 5  # connections in a row that bring nothing
AGAIN_S = 0.2  # between two of them
PULLS = 2  # of a part whose sum is wrong
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchError(Exception):
    """A version cannot be had; `status` is what the relay answers."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Listing:
    """What the weight server says of a version."""

    version: int
    made: int  # tells it from one of the same number in a run that was started over
    part_bytes: int
    files: tuple[tuple[str, int], ...]  # names and bytes

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Part:
    """Bytes `start` to `end` of a file."""

    file: str
    index: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.file} bytes {self.start} to {self.end}"


class Source:
    """A weight server; one connection per thread that uses it."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != ("https" if tls else "http") or not parts.hostname or not parts.port:
            raise FetchError(400, f"source {url!r}: write {'https' if tls else 'http'}://host:port")
        self.url = url
        self._host, self._port, self._tls = parts.hostname, parts.port, tls
        self._mine = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def ask(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises FetchError."""
        try:
            with self._get(path, {}) as response:
                return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._hang_up()
            raise FetchError(502, f"{self.url}{path}: {_words(error)}") from error

    def read(self, path: str, start: int, end: int, buffer: memoryview) -> Generator[memoryview]:
        """The bytes, piece by piece in `buffer`. Raises FetchError for what will not get better, OSError and HTTPException for
        a connection that was lost."""
        try:
            with self._get(path, {"Range": f"bytes={start}-{end - 1}"}) as response:
                if response.status != 206 or response.length != end - start:
                    raise http.client.HTTPException(f"bytes {start} to {end} are answered by {response.length} bytes")
                while start < end:
                    count = response.readinto(buffer[: end - start])
                    if not count:
                        raise ConnectionError(f"the connection was cut at byte {start}")
                    start += count
                    yield buffer[:count]
        except BaseException:
            self._hang_up()
            raise

    def _get(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            if self._tls:
                connection = http.client.HTTPSConnection(self._host, self._port, timeout=SILENCE_S, context=self._tls)
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENCE_S)
            self._mine.connection = connection
            self._open.append(connection)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise FetchError(404 if response.status == 404 else 502, f"{self.url}{path}: {_message(response.read())}")
        return response

    def _hang_up(self) -> None:
        """The next call of this thread gets a new connection."""
        connection = getattr(self._mine, "connection", None)
        if connection is not None:
            self._mine.connection = None
            self._open.remove(connection)
            connection.close()

    def interrupt(self) -> None:
        """Whoever waits for bytes gets none any more."""
        for connection in list(self._open):
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # the plain socket's call: that of TLS is not for two threads
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self._open:
            connection.close()


class Download:
    """One version into `folder`. `free` says how many bytes have room there."""

    def __init__(self, source: Source, listing: Listing, folder: Path, free: Callable[[Path], int]) -> None:
        self.listing = listing
        self._source = source
        self._folder = folder
        self._free = free
        self._ending = threading.Event()
        self._got: Counter[str] = Counter()  # file -> bytes that were pulled
        self._files: dict[str, int] = {}  # name -> descriptor

    def stop(self) -> None:
        """`run` ends soon, with FetchError; what it has stays."""
        self._ending.set()

    @property
    def pulled(self) -> int:
        return sum(self._got.values())

    def run(self) -> None:
        """Returns when every byte is there and every sum is right. Raises FetchError."""
        old = self._open_files()
        parts = [
            Part(name, index, start, min(start + self.listing.part_bytes, size))
            for name, size in self.listing.files
            for index, start in enumerate(range(0, size, self.listing.part_bytes))
        ]
        parts.sort(key=lambda part: part.index)  # file by file in turn: writers of one file wait for each other in the kernel
        pool = ThreadPoolExecutor(CONNECTIONS + 1, thread_name_prefix="relay")
        try:
            wanted = pool.submit(self._sums)  # computed over there, while bytes come
            kept, new = [p for p in parts if p.file in old], [p for p in parts if p.file not in old]
            found = dict(zip(kept, pool.map(self._sum_of_kept, kept), strict=True))
            found |= dict(zip(new, pool.map(self._pull, new), strict=True))
            self._repair(pool, found, Counter(new), wanted.result())
        finally:
            self.stop()  # of what else is under way when one part fails
            pool.shutdown(wait=True, cancel_futures=True)
            for descriptor in self._files.values():
                os.close(descriptor)

    def _repair(
        self, pool: ThreadPoolExecutor, found: dict[Part, str], pulls: Counter[Part], wanted: dict[str, list[str]]
    ) -> None:
        """Pull parts whose sum is wrong: those of an earlier try that never came, and damaged ones once more."""
        while wrong := [part for part, digest in found.items() if digest != wanted[part.file][part.index]]:
            for part in wrong:
                if pulls[part] >= PULLS:
                    right = wanted[part.file][part.index]
                    what = f"{part} of version {self.listing.version}"
                    raise FetchError(502, f"{what} came twice with sha256 {found[part]}; at the learner it is {right}")
            pulls.update(wrong)
            found |= dict(zip(wrong, pool.map(self._pull, wrong), strict=True))

    def _open_files(self) -> set[str]:
        """Open every file at its size; names of those that an earlier try left. Raises FetchError when there is no room."""
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = dict(self.listing.files)
        there = {path.name: path.stat() for path in self._folder.iterdir()}
        for name in there.keys() - sizes.keys():
            (self._folder / name).unlink()
        needed = self.listing.bytes - sum(512 * there[name].st_blocks for name in sizes.keys() & there.keys())
        free = self._free(self._folder)
        if needed > free:
            raise FetchError(
                507,
                f"version {self.listing.version} needs {needed} more bytes in {self._folder.parent}, {free} are free:"
                " make room there, or name another weights.folder",
            )
        for name, size in sizes.items():
            self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            os.ftruncate(self._files[name], size)
        return sizes.keys() & there.keys()

    def _sums(self) -> dict[str, list[str]]:
        while "sums" not in (answer := self._source.ask(f"/{self.listing.version}/sums")):  # they are being computed
            self._check_ending()
        sums = answer["sums"]
        for name, size in self.listing.files:
            if len(sums.get(name, ())) != -(-size // self.listing.part_bytes):
                raise FetchError(
                    502, f"{self._source.url}: the sums of version {self.listing.version} do not fit its file {name}"
                )
        return sums

    def _sum_of_kept(self, part: Part) -> str:
        digest, at, view = hashlib.sha256(), part.start, memoryview(bytearray(BUFFER_BYTES))
        while at < part.end and (count := os.preadv(self._files[part.file], [view[: part.end - at]], at)):
            self._check_ending()
            digest.update(view[:count])
            at += count
        return digest.hexdigest()

    def _pull(self, part: Part) -> str:
        """Bring `part` here, over as many connections as it takes; its sha256."""
        digest, at, view, fruitless = hashlib.sha256(), part.start, memoryview(bytearray(BUFFER_BYTES)), 0
        path = f"/{self.listing.version}/files/{part.file}"
        while at < part.end:
            try:
                with contextlib.closing(self._source.read(path, at, part.end, view)) as pieces:
                    for piece in pieces:
                        self._check_ending()
                        digest.update(piece)
                        self._write(part.file, piece, at)
                        at, fruitless = at + len(piece), 0
            except (OSError, http.client.HTTPException) as error:
                fruitless += 1
                if fruitless >= TRIES:
                    raise FetchError(502, f"{self._source.url}{path}: {_words(error)}, {TRIES} times in a row") from error
                self._ending.wait(AGAIN_S)
                self._check_ending()
        return digest.hexdigest()

    def _write(self, name: str, piece: memoryview, at: int) -> None:
        try:
            while piece:
                count = os.pwrite(self._files[name], piece, at)
                at, piece = at + count, piece[count:]
                self._got[name] += count
        except OSError as error:
            fix = "make room there, or name another weights.folder" if error.errno in FULL else "see the log of this host"
            raise FetchError(507, f"{self._folder / name}: {error.strerror}: {fix}") from error

    def _check_ending(self) -> None:
        if self._ending.is_set():
            raise FetchError(503, f"the fetch of version {self.listing.version} was stopped")


def listing_of(source: Source, version: int) -> Listing:
    """Raises FetchError, also for names that would lead out of the folder."""
    answer = source.ask(f"/{version}")
    try:
        files = tuple((str(file["name"]), int(file["size"])) for file in answer["files"])
        listing = Listing(int(answer["version"]), int(answer["made"]), int(answer["part_bytes"]), files)
    except (KeyError, TypeError, ValueError) as error:
        raise FetchError(502, f"{source.url}/{version}: not what a weight server answers: {error!r}") from error
    bad = [name for name, _ in files if not NAME.fullmatch(name)]
    if bad or listing.version != version or listing.part_bytes < 1:
        raise FetchError(502, f"{source.url}/{version}: lists version {listing.version} with the files {bad or files}")
    return listing


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".rstrip()


def _message(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:300].decode(errors="replace")
