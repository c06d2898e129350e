"""Numbers per update: metrics.jsonl for programs, TensorBoard event files for people.

After a resume, updates beyond the checkpoint are made again. Nothing is deleted: each line carries the incarnation of
the learner that wrote it, incarnations.jsonl says after which update each incarnation began, and `live` tells the lines
that still belong to the run. TensorBoard gets a session mark, which makes it drop the points that were superseded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from learner.jsonlines import JsonLines, read_lines

METRICS = "metrics.jsonl"
INCARNATIONS = "incarnations.jsonl"


class MetricsLog:
    """The writer, of one incarnation that begins after update `begin`."""

    def __init__(self, run: Path, incarnation: int, begin: int) -> None:
        self._incarnation = incarnation
        self._lines = JsonLines(run / METRICS)
        self._board = EventFileWriter(str(run))
        start = SessionLog(status=SessionLog.START)  # TensorBoard forgets earlier points from this step on
        self._board.add_event(Event(wall_time=time.time(), step=begin + 1, session_log=start))

    def write(self, update: int, values: Mapping[str, Any]) -> list[str]:
        """One line, on disk when this returns. Values are numbers, or short strings (not for TensorBoard).

        Non-finite values become null; their names are returned.
        """
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float | np.number)}
        bad = [name for name, number in numbers.items() if not math.isfinite(number)]
        now = time.time()
        head = {"update": update, "incarnation": self._incarnation, "time": now}
        self._lines.append({**head, **values, **head})  # the head comes first and nothing overrides it
        points = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items() if name not in bad]
        self._board.add_event(Event(wall_time=now, step=update, summary=Summary(value=points)))
        self._board.flush()
        return bad

    def close(self) -> None:
        self._board.close()
        self._lines.close()


def begins(run: Path) -> dict[int, int]:
    """Incarnation -> the update after which it began, for those that trained."""
    return {line["incarnation"]: line["begin"] for line in read_lines(run / INCARNATIONS) if "begin" in line}


def live(lines: Iterable[dict[str, Any]], begins: Mapping[int, int]) -> list[dict[str, Any]]:
    """The lines that no later incarnation took back: it began at or after their update."""
    return [
        line
        for line in lines
        if all(begin >= line["update"] for incarnation, begin in begins.items() if incarnation > line["incarnation"])
    ]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, superseded lines left out, in the order of updates."""
    return sorted(live(read_lines(run / METRICS), begins(run)), key=lambda line: line["update"])
