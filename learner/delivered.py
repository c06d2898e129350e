"""Delivered rollouts of training that have not ended: their bytes in the spool, their trajectories in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.convert import ConvertError, trajectory_parse
from common.types import Trajectory
from learner.inbox import Inbox, Place, SpoolError
from learner.ledger import Ledger
from learner.rollouts import TRAINING, State


class Delivered:
    """Of one ledger. Not thread-safe, but for `sync`."""

    def __init__(self, folder: Path, incarnation: int, checkpoints: int, ledger: Ledger) -> None:
        """`folder` of the spool; files that the newest `checkpoints` checkpoints need are kept."""
        self.inbox = Inbox(folder, incarnation, checkpoints)
        self.trajectories: dict[str, Trajectory] = {}  # by rollout id
        self._ledger = ledger

    def keep(self, trajectory: Trajectory, data: bytes) -> Place:
        """`data` is the trajectory on the wire; returns where it stands. Raises OSError (nothing is kept then)."""
        place = self.inbox.append(data)
        self.trajectories[trajectory.rollout_id] = trajectory
        return place

    def forget(self) -> None:
        """Let go of trajectories whose group has ended."""
        self.trajectories = {name: x for name, x in self.trajectories.items() if self._ledger.holds(name)}

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def files(self) -> list[str]:
        """That a checkpoint of this moment needs. Further deliveries go to another file."""
        self.inbox.rotate()
        return sorted(self._open_files())

    def committed(self, files: list[str]) -> None:
        """A checkpoint that needs `files` is on disk: what neither it, nor a kept one, nor an open rollout needs goes."""
        self.inbox.committed(files)
        self.inbox.keep_only(self._open_files())

    def restore(self, files: list[str]) -> Mapping[str, Any]:
        """Read again what the restored ledger has as delivered. What cannot be read is issued again; returns why, by rollout."""
        self.inbox.committed(files)
        self.trajectories, lost = {}, {}
        for rollout in [r for r in self._ledger.rollouts(*TRAINING) if r.state in (State.WAITING, State.STALE)]:
            try:
                self.trajectories[rollout.id] = trajectory_parse(self.inbox.read(rollout.place))
            except (SpoolError, ConvertError) as error:
                lost[rollout.id] = str(error)
                self._ledger.lost(rollout.id)
        return lost

    def _open_files(self) -> set[str]:
        return {rollout.place[0] for rollout in self._ledger.rollouts(*TRAINING) if rollout.place[0]}
