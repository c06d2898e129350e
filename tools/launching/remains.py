"""What a run's folder says of the run when its learner does not: its processes, how old their logs are, the newest event."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learner.jsonlines import read_lines

STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "is dead", "D": "waits for a disk or a device"}
EVENT_FIELDS = 200  # characters of an event that are shown


def lines(run: Path, now: float | None = None) -> list[str]:
    """One sentence each; `now` is a time.time()."""
    now = time.time() if now is None else now
    try:
        return [*_processes(run, now), *_events(run, now)]
    except ValueError as error:  # a damaged line
        return [str(error)]


def _processes(run: Path, now: float) -> Iterator[str]:
    newest: dict[str, dict[str, Any]] = {}
    for event in read_lines(run / "launch_events.jsonl"):
        if event.get("kind") in ("started", "ended"):
            newest[str(event.get("process"))] = event
    for name, event in newest.items():
        log = run / "logs" / f"{name}.log"
        age = f"; its log is {now - log.stat().st_mtime:.0f} s old" if log.exists() else ""
        if event["kind"] == "ended":
            yield f"{name} {event.get('reason', 'ended')} {now - event['time']:.0f} s ago{age}."
        else:
            yield f"{name} (process {event['pid']}) {_state(event['pid'], run)}{age}."


def _state(pid: int, run: Path) -> str:
    """In words, by what the kernel says of the process; another one that has got its number names no such run."""
    proc = Path(f"/proc/{pid}")
    if not Path("/proc/self").exists():  # not Linux
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "is gone"
        except PermissionError:
            pass
        return "is alive"
    try:
        ours = os.fsencode(run) in (proc / "cmdline").read_bytes()
        state = (proc / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    if not ours and state != "Z":
        return "is gone"
    return STATES.get(state, "is alive")


def _events(run: Path, now: float) -> Iterator[str]:
    events = read_lines(run / "events.jsonl")
    if not events:
        return
    last = events[-1]
    fields = ", ".join(f"{key} {value}" for key, value in last.items() if key not in ("time", "kind", "incarnation"))
    yield f"The learner's newest event, {now - last['time']:.0f} s ago: {last['kind']}: {fields}"[:EVENT_FIELDS].rstrip(": ")
    late = next((event for event in reversed(events) if event["kind"] == "wait_past_deadline"), None)
    if late is not None:
        yield f"Past its deadline {now - late['time']:.0f} s ago:"
        yield from (f"  {said}" for said in late.get("stall", [])[:3])
