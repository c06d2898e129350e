"""Trials: the same small policy learns from the same start under different settings, in one process (tools/inprocess.py).

A trial is an arm and a seed. All arms of a seed begin with one policy, which a supervised warm start has brought to a success of
warm.target_success, and draw from the same tasks; they end when the same number of rollouts has come to an outcome (trained or
filtered). Success is that of held-out tasks, sampled as in training, which is what training raises; greedy success is looked at
in the end.

Finished trials and warm starts are kept in a folder, by what they depend on, and not repeated.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from common.config import RunConfig
from common.files import replace_file
from learner.model import hf
from learner.rollouts import Kind
from learner.update import Trainer
from tools.benchmarks import head, interval
from tools.inprocess import LocalRun, Site

Tables = Mapping[str, Any]
Result = dict[str, Any]

GROUPS, SIZE = 8, 8  # of an update
UPDATES = 24
BUDGET = UPDATES * GROUPS * SIZE  # rollouts of a trial
POINTS = 4  # of a curve, after the first
WARM_LOOK = 4  # supervised updates from look to look at success

BASE: Tables = {
    "model": {
        **{"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        "tie_embeddings": False,
    },
    "domains": [
        {
            **{"name": "frozenlake", "train_tasks": 512, "heldout_tasks": 128},
            "options": {"size": 4, "hole_probability": 0.14},
            "limits": {"max_turns": 8, "max_new_tokens": 16, "max_tokens": 192},
        }
    ],
    "engine": {"slots": 64, "prefill_slots": 16, "prefill_chunk": 32, "max_length": 256, "widths": [64, 128, 192, 256]},
    "algorithm": {"groups_per_update": GROUPS, "group_size": SIZE, "minibatches": 2},
    "optimizer": {"lr": 3e-3, "warmup": 4},
    "warm": {"updates": 400, "rollouts_per_update": 32, "lr": 3e-3, "target_loss": 0.2, "target_success": 0.3},
    "learner": {"updates": UPDATES, "max_lag": 0, "row_length": 192, "rows_per_microbatch": 10},
    "eval": {"tasks": 128, "modes": ["greedy", "sampled"]},
}


@dataclass(frozen=True)
class Arm:
    """`tables` over BASE; whose credit an update takes is the trainer's."""

    name: str
    tables: Tables = field(default_factory=dict)
    trainer: type[Trainer] = Trainer


def merged(base: Tables, over: Tables) -> dict[str, Any]:
    """`over` counts, also inside of tables; the tables of a list one by one."""
    out = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            out[key] = merged(old, value)
        elif isinstance(old, list) and isinstance(value, list) and value and isinstance(value[0], Mapping):
            out[key] = [merged(a, b) for a, b in zip(old, value, strict=True)]
        else:
            out[key] = value
    return out


def config_of(tables: Tables, seed: int, base: Tables = BASE) -> RunConfig:
    """Raises ValueError for tables that do not go together."""
    return RunConfig.model_validate({**merged(base, tables), "seed": seed})


def one_core(cache: Path) -> None:
    """A trial takes one core, so that as many run side by side as there are; what one process compiled, the next one loads. To be
    called before JAX computes anything."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Trials:
    """Trials on one site. `folder` keeps them."""

    def __init__(self, site: Site, folder: Path, base: Tables = BASE) -> None:
        self._site, self._folder, self._base = site, folder, base
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, arm: Arm, seed: int, budget: int = BUDGET) -> Result:
        """The trial's result, made unless it is there."""
        config = config_of(arm.tables, seed, self._base)
        start = self.warm_start(seed)
        key = {"config": config.model_dump(), "trainer": arm.trainer.__name__, "budget": budget, "start": start["key"]}
        path = self._folder / f"{arm.name}-{seed}.json"
        found = _kept(path, key)
        if not found:
            begun = time.process_time()
            trainer = arm.trainer(config, self._site.spec, hf.load(self._folder / start["weights"])[1])
            found = {"key": key, "commit": head(), **learn(self._site, config, trainer, budget, start["success"])}
            found["cpu_seconds"] = time.process_time() - begun
            replace_file(path, json.dumps(found).encode())
        return found

    def warm_start(self, seed: int) -> Result:
        """The policy that all arms of a seed begin with: `weights`, a folder, and its `success`."""
        config = config_of({"algorithm": {"preset": "grpo"}}, seed, self._base)
        key = {"config": config.model_dump(include={"seed", "model", "domains", "warm", "eval"})}
        path = self._folder / f"start-{seed}.json"
        found = _kept(path, key)
        if not found:
            weights = f"start-{seed}"
            trainer = Trainer(config, self._site.spec)
            success, updates = warm(self._site, config, trainer)
            with LocalRun(self._site, config, trainer) as run:
                hf.write(run.tensors, self._site.spec, self._folder / weights, None)
            found = {"key": key, "weights": weights, "success": success, "updates": updates}
            replace_file(path, json.dumps(found).encode())
        return found


def _kept(path: Path, key: Any) -> Result:
    """What `path` has for `key`; empty when it has something else or nothing."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if found.get("key") == json.loads(json.dumps(key)) else {}


def warm(site: Site, config: RunConfig, trainer: Trainer) -> tuple[float, int]:
    """Supervised updates until one has a loss below warm.target_loss, and then held-out success, sampled, is warm.target_success:
    what it came to, and how many there were.

    Raises RuntimeError when warm.updates are not enough."""
    wanted, low = config.warm, 0  # updates since the loss was low enough
    with LocalRun(site, config, trainer) as run:
        run.control.start_warm()
        for update in range(1, wanted.updates + 1):
            loss = run.supervise()
            low += low > 0 or loss < wanted.target_loss
            if low % WARM_LOOK == 1:
                run.publish()
                if (success := run.evaluate("sampled")) >= wanted.target_success:
                    return success, update
    raise RuntimeError(
        f"seed {config.seed}: success is not {wanted.target_success} after warm.updates = {wanted.updates}: raise them"
    )


def learn(site: Site, config: RunConfig, trainer: Trainer, budget: int, first: float) -> Result:
    """Until `budget` rollouts have come to an outcome. `first`: held-out success before.

    The curve has success at POINTS further moments, and what had been played by then; `lags` the mean and the most of an update.
    """
    cost = dict.fromkeys(("played", "turns", "tokens"), 0)
    curve = [{"rollouts": 0, "update": 0, "success": first, **cost}]
    lags, entropies = [], []
    with LocalRun(site, config, trainer) as run:
        run.control.start_rl()
        while True:
            rollouts = settled(run)
            over = rollouts >= budget or run.update == config.learner.updates
            if over:
                run.control.finish()
            else:
                for trajectory in run.fill():
                    cost["played"] += 1
                    cost["turns"] += len(trajectory.steps)
                    cost["tokens"] += sum(len(step.action_ids) for step in trajectory.steps)
            if over or rollouts >= len(curve) * budget / POINTS:
                curve.append({"rollouts": rollouts, "update": run.update, "success": run.evaluate("sampled"), **cost})
            if over:
                return {"curve": curve, "greedy": run.evaluate("greedy"), "lags": lags, "entropies": entropies}
            batch, metrics = run.train()
            lags.append([batch.lag.mean, batch.lag.max])
            entropies.append(metrics["entropy"])


def settled(run: LocalRun) -> int:
    """Training rollouts with an outcome."""
    counts = run.control.counts(Kind.RL)
    return counts["dispatched"] - counts["open"]


# ---- what came of them ---------------------------------------------------------------------------------------------


def final(result: Result) -> float:
    return result["curve"][-1]["success"]


def area(result: Result) -> float:
    """Mean success over the rollouts of a trial: the area under its curve, by trapezoids."""
    points = [(point["rollouts"], point["success"]) for point in result["curve"]]
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points)) / points[-1][0]


def told(values: Sequence[float]) -> str:
    """Mean and interval."""
    low, high = interval(list(values))
    return f"{statistics.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def measured(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = interval(list(values))
    return {name: statistics.mean(values), f"{name}_low": low, f"{name}_high": high}


def paired(ours: Mapping[int, Result], theirs: Mapping[int, Result], what: Any) -> list[float]:
    """Differences of `what` (final, area) by seed, of the seeds that both have."""
    return [what(ours[seed]) - what(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
