"""A run's folder, as the learner writes it: incarnations, events, metrics, trajectories and the summary.

    incarnations.jsonl        one line per start of a learner, and one when it begins to train (after which update)
    events.jsonl              state changes, alarms and drops, each {time, kind, incarnation, ...}
    metrics.jsonl             one line per update; TensorBoard event files stand beside it
    trajectories/<update>.parquet   the rollouts of one update: columns to search by, and the whole record
    trajectories/<update>.superseded-<n>.parquet   the same update before incarnation n went back to a checkpoint
    summary.json              at the end

Files appear whole: lines are repaired after a kill, other files are written aside and renamed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.convert import trajectory_bytes, trajectory_parse
from common.files import replace_file
from common.types import Source, Trajectory
from learner.jsonlines import JsonLines, read_lines
from learner.metrics import INCARNATIONS, MetricsLog
from learner.summary import Summary

EVENTS = "events.jsonl"
TRAJECTORIES = "trajectories"
SUMMARY = "summary.json"

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("attempt", pa.int32()),
        ("group_id", pa.string()),
        ("domain", pa.string()),
        ("task_id", pa.string()),
        ("incarnation", pa.int32()),  # of the learner that trained on it
        ("update", pa.int32()),
        ("status", pa.string()),  # terminated, truncated
        ("reward", pa.float64()),  # the return: the sum of step rewards
        ("flags", pa.list_(pa.string())),
        ("source", pa.string()),  # policy, reference, external
        ("turns", pa.int32()),
        ("sampled_tokens", pa.int32()),  # by the policy; 0 for other sources
        ("lag_max", pa.int32()),  # in updates, over its tokens
        ("versions", pa.list_(pa.int64())),  # that sampled its tokens, rising
        ("record", pa.binary()),  # a serialized TrajectoryMessage
    ]
)


class RunFolder:
    """Opening it counts a new incarnation of the learner. Threads may share it; processes may not."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        (self.path / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        self._incarnations = JsonLines(self.path / INCARNATIONS, durable=True)
        earlier = read_lines(self.path / INCARNATIONS)
        self.incarnation = max((line["incarnation"] for line in earlier), default=0) + 1
        self._incarnations.append({"incarnation": self.incarnation, "time": time.time()})
        self._events = JsonLines(self.path / EVENTS)
        self._metrics: MetricsLog | None = None
        for leftover in (self.path / TRAJECTORIES).glob(".*"):
            leftover.unlink()

    def begin(self, update: int) -> None:
        """Training begins after `update`: 0 for a new run, the checkpoint's for a resumed one.

        What earlier incarnations wrote for later updates is superseded from here on: metrics by the rule in
        `learner.metrics.live`, files of trajectories by their name.
        """
        self._incarnations.append({"incarnation": self.incarnation, "begin": update, "time": time.time()})
        for file in (self.path / TRAJECTORIES).glob("*.parquet"):
            if file.stem.isdigit() and int(file.stem) > update:
                file.rename(file.with_name(f"{file.stem}.superseded-{self.incarnation}.parquet"))
        self._metrics = MetricsLog(self.path, self.incarnation, update)
        self.event("begin", {"update": update})

    def event(self, kind: str, fields: Mapping[str, Any] = {}) -> None:
        """Append one event. Every field is JSON or a NumPy number."""
        head = {"time": time.time(), "kind": kind, "incarnation": self.incarnation}
        self._events.append({**head, **fields, **head})  # the head comes first and nothing overrides it

    def metrics(self, update: int, values: Mapping[str, Any]) -> None:
        """One line of metrics; non-finite values become null and an event that names them.

        Raises RuntimeError before `begin`.
        """
        if self._metrics is None:
            raise RuntimeError("RunFolder.begin(update) comes before the first metrics")
        bad = self._metrics.write(update, values)
        if bad:
            self.event("metrics_not_finite", {"update": update, "names": bad, "values": [str(values[name]) for name in bad]})

    def trajectories(self, update: int, rollouts: Sequence[Trajectory], lags: Sequence[int]) -> Path:
        """Write the rollouts that `update` trained on; `lags[i]` is the largest lag of a token of `rollouts[i]`."""
        rows = [self._row(update, rollout, lag) for rollout, lag in zip(rollouts, lags, strict=True)]
        path = self.path / TRAJECTORIES / f"{update}.parquet"
        aside = path.with_name(f".{path.name}")
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), aside, compression="zstd")
        os.replace(aside, path)
        return path

    def _row(self, update: int, rollout: Trajectory, lag: int) -> dict[str, Any]:
        sampled = sum(len(step.action_ids) for step in rollout.steps) if rollout.source == Source.POLICY else 0
        return {
            "rollout_id": rollout.rollout_id,
            "attempt": rollout.attempt,
            "group_id": rollout.group_id,
            "domain": rollout.task.domain,
            "task_id": rollout.task.id,
            "incarnation": self.incarnation,
            "update": update,
            "status": rollout.status.name.lower(),
            "reward": rollout.total_reward,
            "flags": list(rollout.flags),
            "source": rollout.source.name.lower(),
            "turns": len(rollout.steps),
            "sampled_tokens": sampled,
            "lag_max": int(lag),
            "versions": sorted({run.version for step in rollout.steps for run in step.versions}),
            "record": trajectory_bytes(rollout),
        }

    def summary(self, values: Mapping[str, Any]) -> Path:
        """Check and write summary.json. Raises pydantic's ValidationError, also when the rollouts do not balance."""
        path = self.path / SUMMARY
        text = Summary.model_validate(dict(values)).model_dump_json(indent=2)
        replace_file(path, text.encode() + b"\n")
        return path

    def close(self) -> None:
        self._incarnations.close()
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()


def read_events(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """All events of the run in order, or those of one kind."""
    return [event for event in read_lines(run / EVENTS) if kind in ("", event["kind"])]


def read_trajectories(path: Path) -> list[tuple[dict[str, Any], Trajectory]]:
    """The rows of one file of trajectories, each with its record. Raises ConvertError when a record is damaged."""
    rows = pq.read_table(path).to_pylist()
    return [(row, trajectory_parse(row.pop("record"))) for row in rows]
