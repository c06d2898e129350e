"""How many rollouts learning takes when four tasks in five are too easy or impossible, by how tasks are chosen.

    python tools/bench_sampling.py [--seeds 1 2 3 4 5] [--target 0.9] [--small]

A task is a chain of one to three skills; a turn picks one of four actions by a softmax over the present skill's logits, a wrong
action ends the episode, all right ones pay 1. Two tasks in five are chains of skills that the policy has from the start, two in
five end with a skill that has no right action, one in five has to be learned and shares its skills with others: long ones hardly
ever pay before short ones are learned.

Real: task samplers, selection, the ledger with its capacities (`Dispatch`, `Ledger`), GRPO's advantages and AdamW. A stand-in:
the policy (a table of logits in place of a network) and its environment; there are no processes and no lag. Learning is by plain
gradient ascent (REINFORCE), where a step is as long as its gradient, and by AdamW, which takes steps of one length and so makes
up for a part of what groups without signal cost. The target is the exact success expected on the tasks that can be learned.

Prints a table and writes runs/bench/sampling.json: rollouts that were played until the target, filtered ones included, and the
ratio to uniform sampling of the same seed, mean over seeds with a 95 % interval of Student's t. rollouts_ratio_variance_uniform
is that of plain gradient ascent, ..._adamw that of AdamW. `--small` looks at one seed and a low target, and writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from bisect import bisect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from common.config import RunConfig  # noqa: E402
from common.types import Task  # noqa: E402
from learner import optimizer  # noqa: E402
from learner.advantages import grpo  # noqa: E402
from learner.dispatch import Dispatch  # noqa: E402
from learner.ledger import Ledger  # noqa: E402
from learner.rollouts import Group, Kind, Origin, Rules, State  # noqa: E402
from tools.benchmarks import head, interval, write  # noqa: E402

TASKS, SKILLS, KNOWN, ACTIONS = 250, 60, 12, 4
ONE_HOT = np.eye(ACTIONS)
COMPARE = jax.jit(partial(grpo, ddof=1))
LOGIT = 6.0  # of the right action of a skill that is known from the start: right in 99 of 100 turns
UPDATES = 3000  # after so many the target counts as not reached
RATES = {"reinforce": 10.0, "adamw": 0.01}  # learning rates

ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "variance": {"sampler": "variance"},
    "limr": {"sampler": "limr"},
    "signal": {"select": "signal", "max_refills": 100},
    "top_std": {"select": "top_std"},
    "mass": {"select": "mass", "max_refills": 100},
    "variance_signal": {"sampler": "variance", "select": "signal", "max_refills": 100},
}


def config_of(arm: str, seed: int, rule: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "seed": seed,
            "domains": [{"name": "skills", "train_tasks": TASKS, "limits": {"max_turns": 3}}],
            "algorithm": {"group_size": 8, "groups_per_update": 16, "minibatches": 1},
            "learner": {"updates": UPDATES, "max_lag": 0},
            "optimizer": {"lr": RATES[rule]},
            "tasks": ARMS[arm],
        }
    )


def make_tasks(seed: int) -> list[Task]:
    """Of five tasks two are known, two are impossible (skill -1 has no right action) and one is to be learned."""
    rng = np.random.default_rng(seed)
    tasks = []
    for index in range(TASKS):
        kind = ("easy", "easy", "impossible", "impossible", "learnable")[index % 5]
        length = int(rng.integers(1, 4))
        skills = rng.integers(0, KNOWN, length) if kind == "easy" else rng.integers(KNOWN, SKILLS, length)
        if kind == "impossible":
            skills[-1] = -1
        tasks.append(Task("skills", f"train-{index}", index, {"kind": kind, "skills": skills.tolist()}))
    return tasks


@dataclass
class Play:
    """A rollout: skills met and actions chosen."""

    skills: list[int]
    actions: list[int]
    reward: float


class Policy:
    """[SKILLS, ACTIONS] logits; action 0 is right."""

    def __init__(self, config: RunConfig, rule: str) -> None:
        """`rule`: of RATES."""
        logits = np.zeros((SKILLS, ACTIONS), np.float32)
        logits[:KNOWN, 0] = LOGIT
        self._apply = jax.jit(optimizer.make_apply(config.optimizer)) if rule == "adamw" else None
        self._rate = config.optimizer.lr
        self._state = optimizer.initial(config.optimizer, {"logits": jnp.asarray(logits)})
        self._read()

    def _read(self) -> None:
        logits = np.asarray(self._state.params["logits"], np.float64)
        odds = np.exp(logits - logits.max(1, keepdims=True))
        self.probabilities = odds / odds.sum(1, keepdims=True)
        self._bounds = self.probabilities.cumsum(1)[:, :-1].tolist()

    def success(self, task: Task) -> float:
        skills = task.payload["skills"]
        return 0.0 if -1 in skills else float(np.prod(self.probabilities[skills, 0]))

    def play(self, task: Task, seed: int) -> Play:
        draws = np.random.default_rng(seed).random(3).tolist()
        play = Play([], [], 0.0)
        for skill, uniform in zip(task.payload["skills"], draws, strict=False):
            action = bisect(self._bounds[skill], uniform) if skill >= 0 else -1
            play.skills.append(skill)
            play.actions.append(action)
            if action != 0:
                return play
        play.reward = 1.0
        return play

    def update(self, groups: list[list[Play]]) -> None:
        """A step along the mean over turns of advantage times the gradient of the log-probability."""
        gradient, turns = np.zeros((SKILLS, ACTIONS), np.float32), 0
        for group in groups:
            rewards = np.array([play.reward for play in group], np.float32)
            compared = np.asarray(COMPARE(rewards, np.ones(len(group), bool)))
            for play, advantage in zip(group, compared, strict=True):
                for skill, action in zip(play.skills, play.actions, strict=True):
                    turns += 1
                    if skill >= 0 and advantage:
                        gradient[skill] -= advantage * (ONE_HOT[action] - self.probabilities[skill])
        gradient /= max(1, turns)
        if self._apply:
            self._state, _ = self._apply(self._state, {"logits": gradient}, -1.0)
        else:
            self._state = self._state._replace(params={"logits": self._state.params["logits"] - self._rate * gradient})
        self._read()


def fill(dispatch: Dispatch, ledger: Ledger, policy: Policy, plays: dict[str, Play]) -> tuple[list[Group], int]:
    """The groups of the next update, and how many rollouts were played for them."""
    played = 0
    while not (groups := dispatch.take(Kind.RL)):
        for rollout in dispatch.lease("bench", 64, Kind.RL, 0.0):
            group, _ = ledger.find(rollout.id)
            play = plays[rollout.id] = policy.play(group.task, rollout.seed)
            ledger.delivered(rollout.id, (Origin(1, "main"),), ("", 0), play.reward)
            dispatch.record(group, play.reward > 0)
            played += 1
    return groups, played


def rollouts_until(arm: str, seed: int, rule: str, target: float) -> tuple[int, float]:
    """Rollouts played until the mean success over tasks that can be learned is `target`; and that success."""
    config, tasks = config_of(arm, seed, rule), make_tasks(seed)
    ledger = Ledger(Rules.of(config), 1)
    dispatch = Dispatch(config, {"skills": tasks}, ledger, lambda kind, detail: None)
    policy = Policy(config, rule)
    learnable = [task for task in tasks if task.payload["kind"] == "learnable"]
    total, success = 0, 0.0
    for update in range(UPDATES):
        ledger.published(1, update)  # no lag
        plays: dict[str, Play] = {}
        groups, played = fill(dispatch, ledger, policy, plays)
        total += played
        policy.update([[plays[r.id] for r in group.rollouts if r.state is State.TRAINING] for group in groups])
        ledger.commit()
        success = statistics.mean(map(policy.success, learnable))
        if success >= target:
            break
    return total, success


def compare(rule: str, arms: list[str], seeds: list[int], target: float) -> dict[str, float]:
    """Measurements of `rule`, and a table on the screen."""
    measurements: dict[str, float] = {}
    base: list[int] = []
    ending = "" if rule == "reinforce" else f"_{rule}"
    print(f"| {rule}: tasks | rollouts until the target, by seed | mean | of uniform, mean and 95 % | reached |")
    print("|---|---|---|---|---|")
    for arm in arms:
        found = [rollouts_until(arm, seed, rule, target) for seed in seeds]
        played = [total for total, _ in found]
        base = base or played
        ratios = [ours / uniform for ours, uniform in zip(played, base, strict=True)]
        mean, (low, high) = statistics.mean(ratios), interval(ratios)
        reached = sum(success >= target for _, success in found)
        cells = [arm, ", ".join(f"{total:,}" for total in played), f"{statistics.mean(played):,.0f}"]
        print("|", " | ".join([*cells, f"{mean:.3f} [{low:.3f}, {high:.3f}]", f"{reached} of {len(found)}"]), "|", flush=True)
        name = f"rollouts_ratio_{arm}_uniform{ending}"
        measurements |= {name: mean, f"{name}_low": low, f"{name}_high": high, f"rollouts_{arm}{ending}": statistics.mean(played)}
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="at most ten")
    parser.add_argument("--target", type=float, default=0.9, help="mean success over the tasks that can be learned")
    parser.add_argument("--small", action="store_true", help="one seed, two samplers, a low target; writes nothing")
    args = parser.parse_args()
    if args.small:
        compare("reinforce", ["uniform", "variance"], args.seeds[:1], 0.3)
        return
    measurements = compare("reinforce", list(ARMS), args.seeds, args.target)
    measurements |= compare("adamw", ["uniform", "variance", "signal"], args.seeds, args.target)
    write("sampling", measurements, head())


if __name__ == "__main__":
    main()
