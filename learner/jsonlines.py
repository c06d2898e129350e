"""Append-only files of JSON lines: one writer process, any number of readers, torn tails repaired.

A line is a record or it is not there: a process killed while it writes leaves a last line without a newline, which the
next `JsonLines` cuts off and every reader ignores. NaN and infinities are written as null.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson


class JsonLines:
    """The writer. Threads may share it. `durable` lines survive a power cut once `append` has returned."""

    def __init__(self, path: Path, durable: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._durable = durable
        self._lock = threading.Lock()
        self._file = open(path, "ab+")  # noqa: SIM115 - stays open until close()
        whole = _whole_lines(path.read_bytes())
        self._file.truncate(len(whole))

    def append(self, record: Mapping[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        with self._lock:
            self._file.write(line)
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; [] when there is no such file.

    Raises ValueError, which names the line, when one is not JSON.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), 1):
        try:
            records.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); remove the line or restore the file") from error
    return records


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
