"""Do the committed configurations learn? Runs each with several seeds, and with all advantages zero as a control.

    python tools/bench_learning.py --configs smoke smoke_ppo arithmetic --seeds 1 2 3

Prints a table and writes runs/bench/learning.json. Every number is held-out greedy success on the same tasks. Finished
runs under runs/learning/ are kept and not repeated while their configuration stays the same, so that an interrupted benchmark
goes on where it stopped; "commit" names the commits that they were made with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from common.cli import load  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402
from tools.launching.preflight import resolve_paths  # noqa: E402
from tools.launching.runs import finished, read_json  # noqa: E402


def run(name: str, seed: int, label: str, base: Path, more: Sequence[str]) -> dict[str, Any]:
    """The summary of one run, started unless it has finished before with the same configuration; `more` overrides it."""
    run_name = f"{name}-{label}{seed}"
    overrides = [f"--seed={seed}", f"--name={run_name}", *more]
    wanted = resolve_paths(load(ROOT / "configs" / f"{name}.toml", overrides), [ROOT])
    summary = read_json(base / run_name / "summary.json")
    if not finished(base / run_name, wanted) or summary["config"] != wanted.model_dump():
        command = [sys.executable, "tools/launch.py", "local", f"configs/{name}.toml", "--overwrite", "--runs", str(base)]
        subprocess.run([*command, *overrides], cwd=ROOT, check=True)
        summary = read_json(base / run_name / "summary.json") | {"commit": head()}
        (base / run_name / "summary.json").write_text(json.dumps(summary))
    return summary


def success(summary: dict[str, Any], phase: str) -> float:
    """Of the phase's last greedy evaluation, mean over the domains."""
    last = {e["domain"]: e["success"] for e in summary["evals"] if e["phase"] == phase and e["mode"] == "greedy"}
    return statistics.mean(last.values())


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["smoke", "smoke_ppo", "arithmetic"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning")
    args = parser.parse_args()
    measurements: dict[str, float] = {}
    rows: list[str] = []
    commits: set[str] = set()
    for config in args.configs:
        for control in (False, True):
            name = f"{config}{'_control' if control else ''}"
            label, more = "control-" if control else "", [f"--algorithm.zero_advantages={str(control).lower()}"]
            summaries = [run(config, seed, label, args.runs.resolve(), more) for seed in args.seeds]
            commits |= {s["commit"] for s in summaries if "commit" in s}
            warm = [success(s, "warm") for s in summaries]
            rl = [success(s, "rl") for s in summaries]
            wall = [s["wall_seconds"] for s in summaries]
            for key, values in (("warm", warm), ("rl", rl), ("wall_seconds", wall)):
                measurements[f"{name}.{key}.mean"] = statistics.mean(values)
                measurements[f"{name}.{key}.min"] = min(values)
                measurements[f"{name}.{key}.max"] = max(values)
            rows.append(f"| {name} | {len(warm)} | {spread(warm)} | {spread(rl)} | {min(rl):.3f} | {max(wall):.0f} s |")
    print("| configuration | seeds | after warm start | after RL | worst seed | longest run |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    write("learning", measurements, " ".join(sorted(commits)))


if __name__ == "__main__":
    main()
