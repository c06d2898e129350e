"""The parts of a learner, its checkpoints (all of it at one moment) and its summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.config import RunConfig
from common.waits import LEARNER
from learner.batch import Lag
from learner.checkpoints import Checkpoints
from learner.control import Control
from learner.jsonlines import read_lines
from learner.publisher import Publisher
from learner.router import Router
from learner.runfolder import RunFolder
from learner.update import Trainer

log = logging.getLogger("learner.run")

CHECKPOINT_S = 300.0  # until one is on disk, before that is told as late


@dataclass
class Totals:
    """What the summary adds up over the run; saved with every checkpoint."""

    seconds: float = 0.0  # of earlier incarnations
    made_by: int = 0  # the incarnation that made the newest update; 0: there was none yet
    warm_end: int = 0  # the supervised update that is the last, once the loss was low enough; 0: warm.updates is
    warm_evaluated: int = 0  # supervised updates behind the newest evaluation of the warm start
    warm_below: int = 0  # supervised updates since the loss was low enough
    warm_losses: list[float] = field(default_factory=list)  # of the newest supervised updates
    lag_tokens: float = 0.0  # sum of lag over trained tokens of main
    lag_max: int = 0
    tokens: int = 0
    stale_lag_tokens: float = 0.0  # the same of the stale pool
    stale_lag_max: int = 0
    stale_tokens: int = 0

    def add(self, lag: Lag, stale: Lag) -> None:
        """The tokens that an update trained on."""
        self.lag_tokens += lag.mean * lag.tokens
        self.lag_max = max(self.lag_max, lag.max)
        self.tokens += lag.tokens
        self.stale_lag_tokens += stale.mean * stale.tokens
        self.stale_lag_max = max(self.stale_lag_max, stale.max)
        self.stale_tokens += stale.tokens

    def stale_pool(self) -> dict[str, Any]:
        """An entry of summary.json."""
        return {
            "share": self.stale_tokens / max(1, self.tokens + self.stale_tokens),
            "lag": {"mean": self.stale_lag_tokens / max(1, self.stale_tokens), "max": self.stale_lag_max},
        }


@dataclass(eq=False)
class Run:
    """The parts of a learner."""

    config: RunConfig
    path: Path
    folder: RunFolder
    control: Control
    trainer: Trainer
    publisher: Publisher
    checkpoints: Checkpoints
    server: grpc.Server
    stop: Callable[[], bool]
    router: Router | None = None  # in front of the engines, where there is one
    totals: Totals = field(default_factory=Totals)
    started: float = field(default_factory=time.monotonic)  # of this process: time.monotonic()
    update: int = 0  # RL updates done
    version: int = 0  # the newest published weights
    canary_ids: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int32))  # [N] int32
    ended: dict[str, tuple[int, int]] = field(default_factory=dict)  # domain -> rollouts that had ended and failed, at last
    saved: dict[str, Any] = field(default_factory=dict)  # control state of the checkpoint that is being written

    def seconds(self) -> float:
        return self.totals.seconds + time.monotonic() - self.started

    @property
    def last_warm_update(self) -> int:
        """The supervised update after which the warm start is over."""
        return self.totals.warm_end or self.config.warm.updates

    @property
    def weights(self) -> str:
        """Names the present parameters: an incarnation makes an update once, and a rolled-back one is made by another."""
        return f"{self.totals.made_by}.{self.control.ledger.warm_update}.{self.update}"

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Of a checkpoint: warm updates, then `warm.updates` (also when fewer were made) plus policy updates. It rises over
        the whole run."""
        warm = self.control.ledger.warm_update
        return warm if warm < self.last_warm_update else self.config.warm.updates + self.update

    def save(self) -> None:
        """One moment: parameters, optimizer, ledger, sampler, spool offsets, evaluations, totals."""
        self.committed()
        totals = asdict(replace(self.totals, seconds=self.seconds()))
        state = {"update": self.update, "control": self.control.state(), "totals": totals}
        if self.checkpoints.save(self.step, self.trainer.state_tree(), state):
            self.saved = state["control"]

    def committed(self) -> None:
        """Wait for the checkpoint before; what only older ones needed of the spool can go."""
        with self.control.waits.wait(LEARNER, "checkpoint", "the checkpoint before", CHECKPOINT_S):
            self.checkpoints.wait()
        if self.saved:
            self.control.committed(self.saved)
            self.saved = {}

    def restore(self) -> None:
        """Go on from the newest committed checkpoint; without one the run starts at its beginning."""
        if self.checkpoints.latest() is None:
            self.folder.event("resume_from_start", {"reason": "no committed checkpoint"})
            return
        newest = self.checkpoints.latest()
        step, arrays, state = self.checkpoints.restore()
        if step != newest:
            self.folder.event("checkpoint_damaged", {"step": newest, "restored": step})
        self.trainer.restore_tree(arrays)
        self.control.restore(state["control"])
        self.totals, self.update = Totals(**state["totals"]), state["update"]
        # What was done after the checkpoint took its time too, although it is done again.
        spent = [line["seconds"] for line in read_lines(self.path / "metrics.jsonl") if "seconds" in line]
        self.totals.seconds = max([self.totals.seconds, *spent])
        log.info("resumed at step %d, after update %d, as incarnation %d", self.step, self.update, self.folder.incarnation)

    # ---- the end -------------------------------------------------------------------------------------------

    def summarize(self) -> None:
        """Close the books: whatever is open is cancelled, so that the outcomes add up to what was dispatched."""
        self.control.finish()
        totals = self.totals
        domains = [domain.name for domain in self.config.domains]
        self.folder.summary(
            {
                "config": self.config.model_dump(),
                "seed": self.config.seed,
                "updates": self.update,
                "wall_seconds": self.seconds(),
                "rollouts": self._ended(""),
                "domains": {domain: self._ended(domain) for domain in domains} if len(domains) > 1 else {},
                "evals": self.control.evaluation.results,
                "tokens": dict(self.control.tokens),
                "lag": {"mean": totals.lag_tokens / max(1, totals.tokens), "max": totals.lag_max},
                "stale_pool": totals.stale_pool() if self.config.cross_policy.engines else None,
                "recompilations_after_warmup": self.publisher.recompilations(),
            }
        )

    def _ended(self, domain: str) -> dict[str, int]:
        return {name: n for name, n in self.control.counts(domain=domain).items() if name != "open"}
