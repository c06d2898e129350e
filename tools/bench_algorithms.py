"""Do the algorithms learn, and how much does lag cost them? Learning curves of presets on frozenlake, at lags 0, 2 and 8.

    python tools/bench_algorithms.py [--seeds 1 2 3 4 5] [--arms grpo ppo ...] [--lags 0 2 8]

Arms: grpo, ppo, ppo with V-trace, starpo_s (with its selection of groups), agentrl, each as its preset has it, with one
learning rate for all. And ppo with a wrong credit, `ppo_through_answers`: GAE whose recursion also runs over the environment's
tokens, as some public code has it. Every update trains on tokens that are exactly as old as the lag says (tools/inprocess.py);
arms of a seed share their first policy (tools/trials.py).

Prints tables and writes runs/bench/algorithms.json: held-out success at the end and the area under the curve, means over seeds
with 95 % intervals of Student's t, and differences by seed. Finished trials under runs/trials are kept. Seeds are the outer loop:
what is there when it is interrupted is balanced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from common.types import Status, Trajectory  # noqa: E402
from learner import advantages, temporal  # noqa: E402
from learner.examples import Live, of_rollout  # noqa: E402
from learner.pack import Example  # noqa: E402
from learner.report import Report  # noqa: E402
from learner.rows import Credit, Rollout, power  # noqa: E402
from learner.update import Trainer  # noqa: E402
from tools.benchmarks import write  # noqa: E402
from tools.inprocess import Site  # noqa: E402
from tools.trials import Arm, Result, Tables, Trials, area, config_of, final, measured, one_core, paired, told  # noqa: E402

LAGS = (0, 2, 8)


class ThroughAnswers(Trainer):
    """Advantages by GAE with the environment's tokens as steps of the recursion, like the policy's own: each decays, and has its
    value taken. What the critic and the policy train on stays the policy's tokens."""

    def prepare(
        self, groups: Sequence[Sequence[Trajectory]], live: Live, report: Report
    ) -> tuple[list[list[Rollout]], list[list[list[Credit]]], list[list[Example]]]:
        algorithm = self._config.algorithm
        batch, right, _ = super().prepare(groups, live, report)
        rollouts = [rollout for group in batch for rollout in group]
        found = [through_answers(rollout, algorithm.gamma, algorithm.gae_lambda) for rollout in rollouts]
        trained = np.concatenate([rollout.masks[0] for rollout in rollouts])
        white = np.split(
            np.asarray(advantages.whiten(jnp.concatenate([a for a, _ in found]), jnp.asarray(trained))),
            np.cumsum([len(a) for a, _ in found])[:-1],
        )
        wrong = iter(zip(white, found, strict=True))
        credits = []
        for group in right:
            credits.append([])
            for (own,) in group:
                gains, (_, returns) = next(wrong)
                credits[-1].append([replace(own, advantages=gains, returns=returns)])
        pairs = [zip(group, own, strict=True) for group, own in zip(batch, credits, strict=True)]
        return batch, credits, [[example for pair in group for example in of_rollout(*pair, algorithm)] for group in pairs]


def through_answers(rollout: Rollout, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """[T] each: advantages and returns of the sampled tokens of a rollout of one segment, 0 elsewhere, from GAE over every token
    from the first sampled one to the last."""
    ((segment,), (values,)) = rollout.segments, rollout.values
    size = power(len(segment.ids))  # few shapes are compiled
    rewards, mask, filled = np.zeros(size, np.float32), np.zeros(size, bool), np.zeros(size, np.float32)
    for index in segment.steps:
        own = np.flatnonzero(segment.mask & (segment.step_of == index))
        rewards[own[-1]] = rollout.trajectory.steps[index].reward
    sampled = np.flatnonzero(segment.mask)
    mask[sampled[0] : sampled[-1] + 1], filled[: len(values)] = True, values
    after = jnp.float32(rollout.after if rollout.trajectory.status == Status.TRUNCATED else 0.0)
    gains, returns = temporal.gae(jnp.asarray(rewards), jnp.asarray(filled), jnp.asarray(mask), after, gamma, lam)

    def sampled_only(x: jax.Array) -> np.ndarray:
        return np.where(segment.mask, np.asarray(x)[: len(segment.ids)], 0)

    return sampled_only(gains), sampled_only(returns)


PPO: Tables = {"algorithm": {"preset": "ppo"}}
ARMS = {
    "grpo": Arm("grpo", {"algorithm": {"preset": "grpo"}}),
    "ppo": Arm("ppo", PPO),
    "vtrace": Arm("vtrace", {"algorithm": {"preset": "ppo", "advantage": "vtrace", "old_policy": "proximal"}}),
    "starpo_s": Arm("starpo_s", {"algorithm": {"preset": "starpo_s", "groups_per_update": 2}, "tasks": {"select": "top_std"}}),
    "agentrl": Arm("agentrl", {"algorithm": {"preset": "agentrl"}}),
}
WRONG = Arm("ppo_through_answers", PPO, ThroughAnswers)


def arms_of(names: Sequence[str], lags: Sequence[int]) -> dict[tuple[str, int], Arm]:
    """By name and lag; in the order in which they are run."""
    out = {}
    for lag in lags:
        for name in names:
            tables = {**ARMS[name].tables, "learner": {"max_lag": lag}}
            out[name, lag] = replace(ARMS[name], name=f"{name}-lag{lag}", tables=tables)
        if lag == 0 and "ppo" in names:
            out[WRONG.name, 0] = replace(WRONG, name=f"{WRONG.name}-lag0")
    return out


Found = dict[tuple[str, int], dict[int, Result]]  # arm -> seed -> result


def table(found: Found) -> tuple[list[str], dict[str, float]]:
    """Rows for the screen, and measurements."""
    rows = [
        "| arm | lag | seeds | success at the end | area under the curve | area less that at lag 0 | greedy at the end | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measurements: dict[str, float] = {}
    for (name, lag), results in found.items():
        ends, areas, greedy = ([what(r) for r in results.values()] for what in (final, area, lambda r: r["greedy"]))
        arm = f"{name}_lag{lag}"
        measurements |= measured(f"{arm}_success", ends) | measured(f"{arm}_area", areas) | measured(f"{arm}_greedy", greedy)
        measurements[f"{arm}_seeds"] = len(results)
        loss = paired(results, found.get((name, 0), {}), area) if lag else []
        if loss:
            measurements |= measured(f"{arm}_area_less_lag0", loss)
        cpu = sum(r["cpu_seconds"] for r in results.values()) / len(results)
        cells = [name, str(lag), str(len(results)), told(ends), told(areas), told(loss) if loss else "", told(greedy)]
        rows.append(f"| {' | '.join(cells)} | {cpu:.0f} s |")
    right, wrong = found.get(("ppo", 0), {}), found.get((WRONG.name, 0), {})
    for label, what in (("success", final), ("area", area)):
        if right.keys() & wrong.keys():
            difference = paired(wrong, right, what)
            rows.append(f"\nGAE through the environment's tokens less GAE over the policy's own, {label}: {told(difference)}")
            measurements |= measured(f"through_answers_less_ppo_{label}", difference)
    return rows, measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="at most ten")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "trials", help="keeps finished trials")
    args = parser.parse_args()
    one_core(args.folder / "compiled")
    arms = arms_of(args.arms, args.lags)
    found: Found = {}
    with Site(config_of({}, 1)) as site:
        trials = Trials(site, args.folder)
        for seed in args.seeds:
            for key, arm in arms.items():
                result = found.setdefault(key, {})[seed] = trials.run(arm, seed)
                print(f"{arm.name} seed {seed}: {final(result):.3f}, area {area(result):.3f}", flush=True)
    rows, measurements = table(found)
    print("\n".join(rows))
    commits = {r["commit"] for results in found.values() for r in results.values()}
    write("algorithms", measurements, " ".join(sorted(commits)))


if __name__ == "__main__":
    main()
