"""Context policies side by side: the same tasks, seeds and model, and a history that is kept, windowed or summed up.

    python tools/bench_contexts.py --policies append window discard summary --seeds 1 2 3

After Agent-R1's comparison of append-only, sliding window and summaries. Runs configs/contexts.toml with each policy, prints a
table and writes runs/bench/contexts.json. Success is on held-out tasks, greedy; finished runs under runs/contexts/ are kept and
not repeated while their configuration stays the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from learner.metrics import read_metrics  # noqa: E402
from tools.bench_learning import run, spread, success  # noqa: E402
from tools.benchmarks import write  # noqa: E402

POLICIES = {
    "append": (),
    "window": ("name=window", "turns=1"),
    "recent": ("observations=1",),
    "discard": ("name=discard", "tokens=280"),
    "summary": ("name=summary", "tokens=280", "summary_tokens=32", "keep=1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "contexts")
    parser.add_argument("overrides", nargs="*", help="--a.b=value for every run, after --")
    args = parser.parse_args()
    base = args.runs.resolve()
    measurements: dict[str, float] = {}
    rows: list[str] = []
    commits: set[str] = set()
    for policy in args.policies:
        options = [f"--domains.0.context.{option}" for option in POLICIES[policy]]
        summaries = [run("contexts", seed, f"{policy}-", base, [*options, *args.overrides]) for seed in args.seeds]
        commits |= {summary["commit"] for summary in summaries if "commit" in summary}
        metrics = [read_metrics(base / f"contexts-{policy}-{seed}") for seed in args.seeds]
        columns = {
            "warm": [success(summary, "warm") for summary in summaries],
            "rl": [success(summary, "rl") for summary in summaries],
            "segments": [statistics.mean(line["segments"] for line in lines) for lines in metrics],
            "segment_tokens": [statistics.mean(line["segment_tokens"] for line in lines) for lines in metrics],
            "wall_seconds": [summary["wall_seconds"] for summary in summaries],
        }
        for key, values in columns.items():
            measurements |= {f"{policy}.{key}.mean": statistics.mean(values), f"{policy}.{key}.min": min(values)}
            measurements[f"{policy}.{key}.max"] = max(values)
        cost = f"{statistics.mean(columns['segments']):.1f} | {statistics.mean(columns['segment_tokens']):.0f}"
        wall = f"{statistics.mean(columns['wall_seconds']):.0f} s"
        rows.append(
            f"| {policy} | {spread(columns['warm'])} | {spread(columns['rl'])} | {min(columns['rl']):.3f} | {cost} | {wall} |"
        )
    print("| history | after warm start | after RL | worst seed | segments | tokens a rollout | time |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    write("contexts", measurements, " ".join(sorted(commits)))


if __name__ == "__main__":
    main()
