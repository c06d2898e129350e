"""A run that is killed and resumed from its checkpoint ends as one that was never interrupted, to the last bit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.types import Assignment, Trajectory
from learner.checkpoints import Checkpoints
from learner.control import Control
from learner.model.spec import ModelSpec
from learner.rollouts import Kind, State
from learner.update import Trainer
from tests.control.scripted import Clock, config, engine, hand_in, make_control, publish, step, trajectory

SPEC = ModelSpec(100, 16, 32, 2, 2, 1, 8, 10_000.0)
UPDATES = 9
TABLES: dict[str, dict[str, Any]] = {
    "learner": {"updates": UPDATES, "max_lag": 2, "rows_per_microbatch": 2, "lease_s": 10.0},
    "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup": 3, "decay_steps": 30},
}


def recorded(asked: Assignment, version: int) -> Trajectory:
    """The rollout that this seed stands for, whenever and by whomever it is played."""
    rng = np.random.default_rng(asked.sampling.seed)
    made = step(rng.integers(3, 90, 4).tolist(), [(0, version)], float(rng.integers(3)))
    return trajectory(asked, steps=(made,))


@dataclass
class Life:
    """One process of the learner, from its start to its kill."""

    folder: Path
    incarnation: int
    trainer: Trainer  # as the process before left it: compiled once

    def __post_init__(self) -> None:
        self.control: Control = make_control(self.folder, Clock(), None, self.incarnation, **TABLES)
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.update, self.version = 0, 1000 * self.incarnation
        self.rates: list[float] = []

    def resume(self) -> None:
        _, arrays, state = self.checkpoints.restore()
        self.trainer.restore_tree(arrays)
        self.control.restore(state["control"])
        self.update, self.rates = state["update"], state["rates"]

    def go(self, until: int, save_at: int = 0) -> None:
        """Actors lease all that they can and answer a part of it, with what is served then."""
        self.publish()
        self.control.start_rl()
        held = self.control.lease("a", 100).assignments
        while self.update < until:
            for _ in range(3):
                assert hand_in(self.control, recorded(held.pop(0), self.version)) == "STORED"
            batch = self.control.take(0)
            if batch is not None:
                metrics = self.trainer.policy_update(batch.groups, batch.live)
                self.control.commit(batch)
                self.update += 1
                self.rates.append(metrics["lr"])
                self.publish()
                if self.update == save_at:
                    state = {"update": self.update, "control": self.control.state(), "rates": self.rates}
                    assert self.checkpoints.save(self.update, self.trainer.state_tree(), json.loads(json.dumps(state)))
            held += self.control.lease("a", 100).assignments

    def publish(self) -> None:
        self.version += 1
        publish(self.control, self.version, self.update)
        self.control.set_engines([engine(self.version)])

    def ends(self) -> dict[str, Any]:
        """Whatever a run is made of, but for the names of incarnations: they are in ids, attempts and versions."""
        state, known = self.control.state(), self.control.ledger.versions
        rollouts = [r for group in state["ledger"]["groups"] for r in group["rollouts"]]
        for rollout in rollouts:
            rollout["origins"] = [(known[version], pool) for version, pool in rollout["origins"]]
            for name in ("attempt", "answered", "place", "leased_at", "expires", "tries"):
                del rollout[name]
        del state["ledger"]["incarnation"], state["ledger"]["versions"], state["spool"]
        parameters = {name: array.tobytes() for name, array in self.trainer.state_tree().items()}
        return {"control": re.sub(r'"\d+-([gwe]\d)', r'"\1', json.dumps(state)), "lr": self.rates, "parameters": parameters}

    def close(self) -> None:
        self.checkpoints.close()


def test_resume_equals_no_interruption(tmp_path: Path) -> None:
    """Saved after update 4, killed two updates later: what was done since is done again."""
    trainer = Trainer(config(**TABLES), SPEC)
    start = trainer.state_tree()
    whole = Life(tmp_path / "whole", 1, trainer)
    whole.go(UPDATES)
    wanted = whole.ends()
    trainer.restore_tree(start)
    first = Life(tmp_path / "cut", 1, trainer)
    first.go(6, save_at=4)
    first.close()
    second = Life(tmp_path / "cut", 2, trainer)
    second.resume()
    assert second.update == 4
    states = {rollout.state for rollout in second.control.ledger.rollouts(Kind.RL)}
    assert {State.WAITING, State.PENDING} <= states, "else nothing is read from the spool, or issued again"
    second.go(UPDATES)
    assert second.rates == whole.rates
    assert len(set(whole.rates)) == UPDATES
    assert second.ends() == wanted
    for life in (whole, second):
        life.close()
