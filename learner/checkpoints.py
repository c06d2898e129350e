"""Checkpoints on Orbax: named arrays and a JSON state of one moment, saved in the background, committed as one.

A step exists once Orbax has renamed its folder and marked it; whatever is not marked was cut off by a crash and is as
good as absent. Older steps are deleted after a newer one is committed, so one is there at every instant.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger("learner.checkpoints")

COMMIT_MARK = "commit_success.txt"  # Orbax writes it last


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def committed_steps(folder: str | Path) -> list[int]:
    """Steps that can be restored, rising. Reads names only, and imports neither JAX nor Orbax."""
    path = Path(folder)
    if not path.is_dir():
        return []
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and (p / COMMIT_MARK).is_file())


class Checkpoints:
    """The checkpoints of a run. One thread saves.

    `keep` committed steps stay. Orbax copies what it is given before `save` returns; a failure in the background is raised
    by the next `save` or `wait`.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        import orbax.checkpoint as ocp  # takes seconds; `committed_steps` must not

        self._args, self._folder = ocp.args, Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._newest = -1  # of this timeline: the last step that was saved or restored here

    def save(self, step: int, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Begin to save; False when `step` is the one saved last, and stays as it is.

        Steps at or above `step` that this timeline did not save are from before a rollback; they give way.
        Raises CheckpointError for arrays that are not finite (a sick state must not push out a healthy one), for a step
        that goes backwards, and for the failure of the save before.
        """
        self.wait()
        if step == self._newest:
            return False
        if step < self._newest:
            raise CheckpointError(f"step {step} comes after step {self._newest} was saved; restore an older step to go back")
        named = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in named.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise CheckpointError(f"step {step} is not saved: {name} is not finite")
        for stale in self._manager.all_steps(read=True):
            if stale >= step:
                self._manager.delete(stale)
        items = {"arrays": self._args.StandardSave(named), "state": self._args.JsonSave(dict(state))}
        try:
            begun = self._manager.save(step, args=self._args.Composite(**items), force=True)
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} in {self._folder} failed: {error}") from error
        if not begun:
            raise CheckpointError(f"Orbax did not save step {step} in {self._folder}")
        self._newest = step
        return True

    def wait(self) -> None:
        """Until the save in the background is committed. Raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            failed, self._newest = self._newest, -1
            raise CheckpointError(f"checkpoint {failed} in {self._folder} failed: {error}") from error

    def latest(self) -> int | None:
        """The newest committed step."""
        steps = committed_steps(self._folder)
        return steps[-1] if steps else None

    def restore(self, step: int | None = None) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
        """The newest committed step that can be read, or the one named: its number, arrays and state. Later saves go on from
        there, and remove the newer ones.

        Raises CheckpointError if there is none.
        """
        steps = committed_steps(self._folder)
        wanted = steps[::-1] if step is None else [step] if step in steps else []
        if not wanted:
            raise CheckpointError(
                f"no committed checkpoint {'' if step is None else f'{step} '}in {self._folder}; it has {steps}"
            )
        items = {"arrays": self._args.StandardRestore(), "state": self._args.JsonRestore()}
        problems = []
        for step in wanted:
            try:
                found = self._manager.restore(step, args=self._args.Composite(**items))
                break
            except Exception as error:  # Orbax lets through whatever its storage raises
                problems.append(f"{step} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                log.error("checkpoint %s", problems[-1])
        else:
            raise CheckpointError(f"no checkpoint in {self._folder} can be read: {'; '.join(problems)}")
        self._newest = step
        return step, {name: np.asarray(array) for name, array in found["arrays"].items()}, found["state"]

    def close(self) -> None:
        """Finish the save in the background; raise CheckpointError if it failed."""
        try:
            self.wait()
        finally:
            self._manager.close()
