"""The inbox: deliveries on disk before they are acknowledged. Append-only spool files of framed messages.

A frame is MAGIC, length, CRC-32, payload (a serialized TrajectoryMessage). Bytes reach the operating system before `append`
returns, so they survive the death of this process; `sync` makes them survive the machine's. Every start writes a new file
and cuts the torn frame that a killed predecessor may have left at the end of its last one.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

MAGIC = b"PTS1"
HEADER = struct.Struct("<4sII")  # magic, payload bytes, CRC-32 of the payload
ROTATE_BYTES = 64 * 2**20
UNSYNCED_FILES = 16  # full files that the disk may not have yet; with one more the oldest is waited for
QUARANTINE_BYTES = 256 * 2**20  # refused messages are kept up to here; later ones are only counted

Place = tuple[str, int]  # spool file and offset of a frame


class SpoolError(ValueError):
    """The bytes at a place are not a whole frame."""


class Inbox:
    """Spool files in `folder`, one open for appending. Not thread-safe, but for `sync`."""

    def __init__(self, folder: Path, incarnation: int, checkpoints: int = 1, rotate_bytes: int = ROTATE_BYTES) -> None:
        """Files that the newest `checkpoints` checkpoints need are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rotate_bytes = rotate_bytes
        self.cut_bytes = sum(cut_torn_tail(path) for path in folder.glob("*.spool"))
        taken = [int(path.stem.split("-")[1]) for path in folder.glob(f"{incarnation:04d}-*.spool")]
        self._prefix, self._number = f"{incarnation:04d}", max(taken, default=-1)
        self._file = -1
        self._name, self._size = "", 0
        self._needed: deque[list[str]] = deque(maxlen=checkpoints)  # files, by each of them
        self._syncing = threading.Lock()
        self._unsynced: deque[int] = deque()  # closed for appending; oldest first

    def append(self, payload: bytes) -> Place:
        """Write one frame. Raises OSError (nothing is left behind then)."""
        if self._file < 0 or self._size >= self._rotate_bytes:
            self.rotate()
            self._sync(UNSYNCED_FILES)
            self._open()
        self._size, at = self._write(self._file, self._size, payload), self._size
        return self._name, at

    def read(self, place: Place) -> bytes:
        """The payload at `place`. Raises SpoolError when its file, its frame or its checksum is gone."""
        name, offset = place
        try:
            with open(self._folder / name, "rb") as file:
                file.seek(offset)
                return _read_frame(file)
        except OSError as error:
            raise SpoolError(f"inbox/{name}: {error.strerror}") from error

    def rotate(self) -> None:
        """No more goes into the open file; the next append begins another one."""
        if self._file >= 0:
            self._unsynced.append(self._file)
            self._file = -1

    def sync(self) -> None:
        """Return when what stands in files before the last `rotate` survives the machine's death. The disk may take its time:
        other threads may append meanwhile."""
        self._sync(0)

    def _sync(self, left: int) -> None:
        with self._syncing:  # a file that another thread has begun to sync is on the disk behind this line
            while len(self._unsynced) > left:
                file = self._unsynced.popleft()
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    def committed(self, names: list[str]) -> None:
        """A checkpoint that needs these files is on disk."""
        self._needed.append(names)

    def keep_only(self, names: Collection[str]) -> list[str]:
        """Delete all other spool files but those of checkpoints and the open one; returns what went."""
        kept = {self._open_name, *names, *chain.from_iterable(self._needed)}
        gone = [path for path in self._folder.glob("*.spool") if path.name not in kept]
        for path in gone:
            path.unlink()
        return sorted(path.name for path in gone)

    def quarantine(self, payload: bytes) -> None:
        """Keep a refused message for inspection, within QUARANTINE_BYTES."""
        file = os.open(self._folder / "quarantine", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            if size + len(payload) <= QUARANTINE_BYTES:
                self._write(file, size, payload)
        finally:
            os.close(file)

    @property
    def _open_name(self) -> str:
        return self._name if self._file >= 0 else ""

    def _open(self) -> None:
        self._number += 1
        self._name, self._size = f"{self._prefix}-{self._number:06d}.spool", 0
        self._file = os.open(self._folder / self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    @staticmethod
    def _write(file: int, at: int, payload: bytes) -> int:
        """Write a frame at the end; returns the new size."""
        header = HEADER.pack(MAGIC, len(payload), zlib.crc32(payload))
        size = len(header) + len(payload)
        try:
            done = os.writev(file, [header, payload])
            while done < size:  # a write may be cut short by a signal or a full disk
                done += os.write(file, (header + payload)[done:])
        except OSError:
            os.ftruncate(file, at)
            os.lseek(file, at, os.SEEK_SET)
            raise
        return at + size


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and payload of every whole frame, up to the first that is not."""
    with open(path, "rb") as file:
        while True:
            at = file.tell()
            try:
                yield at, _read_frame(file)
            except SpoolError:
                return


def cut_torn_tail(path: Path) -> int:
    """Truncate after the last whole frame; returns how many bytes went. Lengths are walked, only the last frame is checked
    byte for byte: a killed writer leaves nothing else broken."""
    size = path.stat().st_size
    last = end = 0
    with open(path, "rb") as file:
        while end < size:
            file.seek(end)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or header[:4] != MAGIC or end + HEADER.size + HEADER.unpack(header)[1] > size:
                break
            last, end = end, end + HEADER.size + HEADER.unpack(header)[1]
        try:
            file.seek(last)
            if end:
                _read_frame(file)
        except SpoolError:
            end = last
    if end < size:
        os.truncate(path, end)
    return size - end


def _read_frame(file) -> bytes:  # noqa: ANN001 - an open binary file
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise SpoolError(f"{file.name}: the file ends at {file.tell()}")
    magic, length, crc = HEADER.unpack(header)
    payload = file.read(length) if magic == MAGIC else b""
    if magic != MAGIC or len(payload) != length or zlib.crc32(payload) != crc:
        raise SpoolError(f"{file.name}: no whole frame ends at {file.tell()}")
    return payload
