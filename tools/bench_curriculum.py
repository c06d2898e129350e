"""Do turn budgets, selections and samplers help a network? On frozenlake, GRPO without lag, from the starts of bench_algorithms.

    python tools/bench_curriculum.py [--seeds 1 2 3 4 5] [--compare turns tasks]

Budgets: rollouts of training with 6 turns at most all the time (the shortest way has 6 moves), with 12, and with 6, 8 and 12 in
three stages (ScalingInter-RL). Held-out rollouts have 12. Tasks: `tasks.select` all, signal, top_std and mass, and sampler
"variance", on 48 training tasks, so that each is met often enough to be judged; 8 turns. Eight groups of eight are drawn for
an update (top_std keeps two of them; signal draws more, as long as groups of equal rewards come).

All arms of a comparison have the same number of rollouts, filtered ones included. Prints tables and writes
runs/bench/curriculum.json; finished trials are kept as those of bench_algorithms.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from tools.benchmarks import write  # noqa: E402
from tools.inprocess import Site  # noqa: E402
from tools.trials import UPDATES, Arm, Result, Tables, Trials, area, config_of, final, measured, merged, one_core, paired, told  # noqa: E402

GRPO: Tables = {"algorithm": {"preset": "grpo"}}
LONG: Tables = {
    **GRPO,
    "domains": [{"limits": {"max_turns": 12, "max_tokens": 256}}],
    "learner": {"row_length": 256, "rows_per_microbatch": 8},
}
FEW: Tables = {**GRPO, "domains": [{"train_tasks": 48}]}
NEVER = UPDATES + 1  # the second stage does not come


def arm(name: str, base: Tables, **tables: Tables) -> Arm:
    return Arm(name, merged(base, tables))


# Of each comparison the first arm is what the others are compared with.
BUDGETS = [
    arm("turns-long", LONG),
    arm("turns-short", LONG, curriculum={"kind": "stages", "turns": [6, 12], "every": NEVER}),
    arm("turns-stages", LONG, curriculum={"kind": "stages", "turns": [6, 8, 12], "every": UPDATES // 3}),
]
TASKS = [
    arm("tasks-all", FEW),
    arm("tasks-signal", FEW, tasks={"select": "signal", "max_refills": 100}),
    arm("tasks-top_std", FEW, tasks={"select": "top_std"}, algorithm={"groups_per_update": 2}),
    arm("tasks-mass", FEW, tasks={"select": "mass", "max_refills": 100}),
    arm("tasks-variance", FEW, tasks={"sampler": "variance"}),
]
COMPARISONS = {"turns": BUDGETS, "tasks": TASKS}


def table(arms: list[Arm], found: dict[str, dict[int, Result]]) -> tuple[list[str], dict[str, float]]:
    """Rows for the screen, and measurements."""
    base = arms[0].name
    head = ["arm", "seeds", "success at the end", "area under the curve", f"area less that of {base}"]
    rows = [f"| {' | '.join([*head, 'turns', 'sampled tokens', 'updates'])} |", "|---|---|---|---|---|---|---|---|"]
    measurements: dict[str, float] = {}
    for name in (arm.name for arm in arms if arm.name in found):
        results = list(found[name].values())
        ends, areas, more = [final(r) for r in results], [area(r) for r in results], paired(found[name], found[base], area)
        last = [r["curve"][-1] for r in results]
        cost = {what: sum(point[what] for point in last) / len(last) for what in ("turns", "tokens", "update")}
        key = name.replace("-", "_")
        measurements |= measured(f"{key}_success", ends) | measured(f"{key}_area", areas) | measured(f"{key}_area_more", more)
        measurements |= {f"{key}_{what}": value for what, value in cost.items()} | {f"{key}_seeds": len(results)}
        cells = [name, str(len(results)), told(ends), told(areas), told(more) if name != base else ""]
        cells += [f"{cost['turns']:,.0f}", f"{cost['tokens']:,.0f}", f"{cost['update']:.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows, measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="at most ten")
    parser.add_argument("--compare", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "trials", help="keeps finished trials")
    args = parser.parse_args()
    one_core(args.folder / "compiled")
    found: dict[str, dict[int, Result]] = {}
    with Site(config_of({}, 1)) as site:
        trials = Trials(site, args.folder)
        for seed in args.seeds:
            for each in (arm for name in args.compare for arm in COMPARISONS[name]):
                result = found.setdefault(each.name, {})[seed] = trials.run(each, seed)
                print(f"{each.name} seed {seed}: {final(result):.3f}, area {area(result):.3f}", flush=True)
    measurements: dict[str, float] = {}
    for name in args.compare:
        rows, more = table(COMPARISONS[name], found)
        print("\n".join(rows) + "\n")
        measurements |= more
    commits = {r["commit"] for results in found.values() for r in results.values()}
    write("curriculum", measurements, " ".join(sorted(commits)))


if __name__ == "__main__":
    main()
