"""The versions that a host holds: one folder each below a folder of the relay's own, whole or marked as partial.

A version is pulled once, however many engines ask. What stays: those that an engine was last told of, those that one may be
loading, and while another one comes the newest two. A relay that starts again trusts nothing that it finds: whole
versions count as partial too, until their sums have been looked at.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import ssl
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from actors.relay.download import Download, FetchError, Listing, Source, listing_of

log = logging.getLogger("actors.relay")

LOCK = "lock"


class FolderError(ValueError):
    """Versions cannot be kept in this folder; one line with the fix."""


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(eq=False)
class _Fetch:
    """A download that is under way, and how many wait for it."""

    source: Source
    task: asyncio.Task[None] = field(init=False)
    download: list[Download] = field(default_factory=list)  # one, when the listing has come
    waiting: int = 0
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True
        for download in self.download:
            download.stop()
        self.source.interrupt()


class Versions:
    """Use inside one event loop. Raises FolderError."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None, free: Callable[[Path], int] = free_bytes) -> None:
        self._folder, self._tls, self._free = folder, tls, free
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # anybody may make folders in /dev/shm
                raise FolderError(f"{folder} is somebody else's; remove it, or name another weights.folder")
            self._lock = (folder / LOCK).open("a")
        except OSError as error:
            raise FolderError(f"{folder}: {error.strerror}; set weights.folder to one that can be written") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise FolderError(f"{folder}: another relay works there; stop it, or name another weights.folder") from error
        self._whole: dict[int, Listing] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._wanted: dict[str, int] = {}  # engine -> the version that it was last told of
        self._loading: defaultdict[str, set[int]] = defaultdict(set)  # engine -> versions that it may be reading
        self._deleting = asyncio.Lock()
        self._tidying: set[asyncio.Task[None]] = set()
        for entry in folder.iterdir():
            if entry.name.isdigit():
                entry.rename(self._partial(int(entry.name)))

    def path(self, version: int) -> Path:
        return self._folder / str(version)

    def _partial(self, version: int) -> Path:
        return self._folder / f"{version}.partial"

    def version_at(self, path: str) -> int:
        """The version whose folder is `path`, when it is here and whole; 0 otherwise."""
        return next((version for version in self._whole if str(self.path(version)) == path), 0)

    def begin_load(self, engine: str, version: int) -> None:
        """`engine` may read `version` until `loaded`: who hangs up does not know whether it still does."""
        self._loading[engine].add(version)

    def refused(self, engine: str, version: int) -> None:
        """`engine` said that it does not load `version`; that says nothing of others."""
        self._loading[engine].discard(version)

    def loaded(self, engine: str) -> None:
        """`engine` said that a load is done: it reads none of them any more. Gives back what nobody wants, before the next
        version comes: that takes a while, in which nobody has to wait."""
        self._loading[engine].clear()
        task = asyncio.create_task(self._tidy(newest=0))
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _tidy(self, newest: int) -> None:
        async with self._deleting:  # a version of the same number is not pulled meanwhile
            await asyncio.to_thread(_delete, self._unwanted(newest))

    async def fetch(self, engine: str, source: str, version: int, deadline_s: float) -> Path:
        """The folder of `version`, whole, as `source` has it now. Raises FetchError."""
        self._wanted[engine] = version
        try:
            async with asyncio.timeout(deadline_s):
                await self._fetched(source, version)
        except TimeoutError as error:
            done = sum(one.pulled for one in self._fetches[version].download) if version in self._fetches else 0
            raise FetchError(
                504, f"version {version} is not here after {deadline_s:g} s: {done} bytes came from {source}, and are kept"
            ) from error
        return self.path(version)

    async def _fetched(self, source: str, version: int) -> None:
        while (fetch := self._fetches.get(version)) and fetch.stopped:
            await asyncio.wait([fetch.task])
        if fetch is None:
            fetch = self._fetches[version] = _Fetch(Source(source, self._tls))
            fetch.task = asyncio.create_task(self._run(fetch, version))
            fetch.task.add_done_callback(lambda task: task.exception())  # it may end when nobody waits any more
        fetch.waiting += 1
        try:
            await asyncio.wait([fetch.task])  # which it outlives when this caller goes away
        finally:
            fetch.waiting -= 1
            if not fetch.waiting and not fetch.task.done():
                fetch.stop()
        fetch.task.result()

    async def _run(self, fetch: _Fetch, version: int) -> None:
        try:
            with closing(fetch.source) as source:
                await self._tidy(newest=2)
                listing = await asyncio.to_thread(listing_of, source, version)
                if self._whole.get(version) == listing:
                    return
                if self._whole.pop(version, None):  # the run was started over: other files, since an engine may map these
                    await asyncio.to_thread(_delete, [self.path(version)])
                download = Download(source, listing, self._partial(version), self._free)
                fetch.download.append(download)
                if fetch.stopped:
                    download.stop()
                started = time.monotonic()
                await asyncio.to_thread(download.run)
            self._partial(version).rename(self.path(version))
            self._whole[version] = listing
            took = time.monotonic() - started
            log.info("version %d: %d bytes, %d pulled in %.2f s", version, listing.bytes, download.pulled, took)
        finally:
            del self._fetches[version]

    def _unwanted(self, newest: int) -> list[Path]:
        """Folders that may go, taken from the table; the newest ones may not."""
        busy = {*self._wanted.values(), *(version for versions in self._loading.values() for version in versions)}
        keep = {*busy, *self._fetches, *sorted({*self._whole, *self._fetches}, reverse=True)[:newest]}
        self._whole = {version: listing for version, listing in self._whole.items() if version in keep}
        there = [entry for entry in self._folder.iterdir() if entry.is_dir()]
        numbered = [(entry, entry.name.partition(".")[0]) for entry in there]
        return [entry for entry, number in numbered if number.isdigit() and int(number) not in keep]

    async def close(self, *, remove: bool) -> None:
        """Stop what is under way; `remove` also gives all memory back."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.stop()
        await asyncio.gather(*(fetch.task for fetch in fetches), *self._tidying, return_exceptions=True)
        if remove:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._lock.close()


def _delete(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
