"""What a run's folder says about the run: is it alive, has it a checkpoint, has it finished. Reads files; imports no JAX."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from common.config import RunConfig

LOOKS = 5


class Refusal(Exception):
    """The command cannot be carried out; the message names the value and the fix, on one line."""


def find(text: str, base: Path) -> Path:
    """The run folder that `text` names: a path, or a name below `base`. Raises Refusal."""
    for folder in (Path(text), base / text):
        if (folder / "config.toml").is_file():
            return folder.resolve()
    known = sorted(path.parent.name for path in base.glob("*/config.toml"))
    raise Refusal(f"{text}: no run there (no config.toml); runs in {base}: {', '.join(known) or 'none'}")


def is_run(folder: Path) -> bool:
    """Whether a launcher has worked there: other programs have a config.toml too."""
    return (folder / "launcher.lock").is_file()


class Lock:
    """One launcher per run. The kernel drops the lock when its holder dies, however it dies."""

    def __init__(self, run: Path) -> None:
        self._path = run / "launcher.lock"
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Raises Refusal when another launcher holds it."""
        file = self._path.open("a+")
        for left in reversed(range(LOOKS)):  # who only looks holds it for an instant, see is_running
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if left:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise Refusal(
                    f"{self._path.parent} is running (launcher process {holder}); stop it with `kill {holder}`,"
                    " or use another --name"
                ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def free(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def is_running(run: Path) -> bool:
    """Whether a launcher holds the run's lock now."""
    try:
        with (run / "launcher.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def checkpoint_steps(run: Path) -> list[int]:
    """Steps with a committed checkpoint, rising: warm updates, then `warm.updates` plus policy updates."""
    from learner.checkpoints import committed_steps

    return committed_steps(run / "checkpoints")


def newest_checkpoint(run: Path, config: RunConfig) -> str:
    """ "update 12", "warm update 40", or "" without a checkpoint."""
    step, warm = max(checkpoint_steps(run), default=None), config.warm.updates
    if step is None:
        return ""
    return f"update {step - warm}" if step >= warm else f"warm update {step}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when the file is not there, not whole or something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def finished(run: Path, config: RunConfig) -> bool:
    """Whether the run made all its updates."""
    updates = read_json(run / "summary.json").get("updates", 0)
    return isinstance(updates, int) and updates >= config.learner.updates


class EventLog:
    """launch_events.jsonl: what the launcher did and saw. events.jsonl belongs to the learner."""

    def __init__(self, run: Path) -> None:
        self._file = (run / "launch_events.jsonl").open("a")

    def add(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run is more than its diary
            self._file.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
