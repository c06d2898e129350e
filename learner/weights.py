"""The published weights on disk: `weights/<version>/` and `versions.jsonl` of a run's folder.

A version is written aside, renamed, and then marked with an empty file DONE: a folder without DONE does not exist for
anyone, and is removed at the next start. A version number is recorded in versions.jsonl before anybody hears of it, so
that numbers never repeat, whatever is killed and wherever a run is rolled back to.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from learner.jsonlines import JsonLines, read_lines

DONE = "DONE"


def read_versions(run: Path) -> dict[int, int]:
    """Version -> update, in the order in which they were published."""
    return {line["version"]: line["update"] for line in read_lines(run / "versions.jsonl")}


class WeightFolder:
    """Not thread-safe by itself; the publisher calls `allocate` and `retire` under its lock, `write` from one thread."""

    def __init__(self, run: Path, incarnation: int) -> None:
        self._folder = run.resolve() / "weights"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._incarnation = incarnation
        self._index = JsonLines(run / "versions.jsonl", durable=True)
        self._updates = read_versions(run)
        folders = [entry for entry in self._folder.iterdir() if entry.is_dir()]
        numbers = [int(entry.name) for entry in folders if entry.name.isdigit()]
        self._next = max([0, *self._updates, *numbers]) + 1
        for entry in folders:
            if not (entry / DONE).exists():
                shutil.rmtree(entry)

    def allocate(self, update: int) -> int:
        """A number that was never used, bound to `update` for ever."""
        version = self._next
        self._next += 1
        self._index.append({"version": version, "update": update, "incarnation": self._incarnation, "time": time.time()})
        self._updates[version] = update
        return version

    def updates(self) -> dict[int, int]:
        """Version -> update, of every version ever allocated (a skipped one included)."""
        return dict(self._updates)

    def path(self, version: int) -> Path:
        """Absolute: engines open it from wherever they were started."""
        return self._folder / str(version)

    def write(self, version: int, save: Callable[[Path], None]) -> None:
        """`save` fills an empty folder; afterwards the version is there, whole."""
        aside = self._folder / f".{version}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save(aside)
        aside.rename(self.path(version))
        (self.path(version) / DONE).touch()

    def stored(self) -> list[int]:
        """Versions that are there, whole, oldest first."""
        return sorted(int(entry.parent.name) for entry in self._folder.glob(f"*/{DONE}") if entry.parent.name.isdigit())

    def retire(self, keep: Collection[int], below: int | None = None) -> list[Path]:
        """Unmark every whole version but `keep`, of those smaller than `below`: it is gone for everyone. Returns the folders,
        for `delete`. (A version may become whole at any moment: without the bound it could be taken for an old one.)"""
        gone = [self.path(v) for v in self.stored() if v not in keep and (below is None or v < below)]
        for folder in gone:
            (folder / DONE).unlink()
        return gone

    @staticmethod
    def delete(folders: list[Path]) -> None:
        """Remove retired folders; slow with large weights, so the publisher does it outside its lock."""
        for folder in folders:
            shutil.rmtree(folder)

    def close(self) -> None:
        self._index.close()


def leaves(params: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a nested mapping."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", np.asarray(value)


CHUNK = 2**18  # values: stays in a processor's cache


def nonfinite(array: np.ndarray) -> int:
    """How many values of a float array are not finite, by their bits: np.isfinite takes ten times as long for bfloat16."""
    bits = np.dtype(f"u{array.dtype.itemsize}")
    infinity = np.full(1, np.inf, array.dtype).view(bits)[0]
    magnitude = bits.type(np.iinfo(bits).max >> 1)  # all bits but the sign
    flat = array.reshape(-1).view(bits)
    room, bad = np.empty(min(CHUNK, flat.size), bits), 0
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        values = np.bitwise_and(part, magnitude, out=room[: part.size])
        if values.max() >= infinity:
            bad += int(np.count_nonzero(values >= infinity))
    return bad
