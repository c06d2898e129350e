"""Does a finished run hold what it promises? Reads summary.json, prints a line per check, exit status 1 on failure.

python tools/check_run.py runs/smoke --min-rl 0.85 --max-warm 0.6 --disjoint
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.cli import ConfigError, load
from common.config import RunConfig
from learner.canary import BOUNDS
from learner.jsonlines import read_lines


def checks(summary: dict[str, Any], config: RunConfig, args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    updates, max_lag, cross_policy = config.learner.updates, config.learner.max_lag, config.cross_policy
    rollouts = dict(summary["rollouts"])
    dispatched = rollouts.pop("dispatched")
    yield (
        f"every dispatched rollout has one outcome: {dispatched} = {sum(rollouts.values())} {rollouts}",
        dispatched == sum(rollouts.values()),
    )
    yield f"updates: {summary['updates']} of {updates}", summary["updates"] == updates
    yield f"lag at most {max_lag}: {summary['lag']['max']}", summary["lag"]["max"] <= max_lag
    if cross_policy.engines:
        lag = summary["stale_pool"]["lag"]["max"]
        yield f"lag of the stale pool at most {cross_policy.max_lag}: {lag}", lag <= cross_policy.max_lag
    yield f"compilations after warm-up: {summary['recompilations_after_warmup']}", not summary["recompilations_after_warmup"]
    if args.flat_gap:
        yield from _same_policy(args.run, config.model.dtype)
    if args.flat_gap or args.proven:
        yield from _proven(args.run)
    for entry in summary["evals"]:
        if entry.get("pass_k"):
            yield _ordered(entry)
    for domain in sorted({e["domain"] for e in summary["evals"]}):
        yield from _learned(domain, [e for e in summary["evals"] if e["domain"] == domain and e["mode"] == "greedy"], args)


def _same_policy(run: Path, dtype: str) -> Iterator[tuple[str, bool]]:
    """Of a run whose weights never change: engine and learner differ by the same at every update."""
    rows = list(read_lines(run / "metrics.jsonl"))
    gaps = [row["gap_mean"] for row in rows if "gap_mean" in row]
    allowed = BOUNDS[dtype] / 10
    moved = max((abs(gap - gaps[0]) for gap in gaps), default=0.0)
    yield f"gap measured in {len(gaps)} of {len(rows)} updates", len(gaps) == len(rows) > 0
    yield f"gap flat: {gaps[0] if gaps else 0:.2g} at first, moved by {moved:.2g}, allowed is {allowed:g}", moved <= allowed
    drift = max((row.get("kl_k3", 0.0) for row in rows), default=0.0)  # over all tokens: their versions are one policy
    yield f"k3 to the policy of any version: {drift:.2g}, allowed is {allowed:g}", drift <= allowed


def _proven(run: Path) -> Iterator[tuple[str, bool]]:
    """Every engine has proven every version that it was brought to, the last one among them, and no batch raised the alarm."""
    events = list(read_lines(run / "events.jsonl"))
    newest = max((event["version"] for event in events if event["kind"] == "weights_written"), default=0)
    passed: dict[str, list[int]] = {}
    for event in events:
        if event["kind"] == "engine_updated":
            passed.setdefault(event["name"], []).append(event["version"])
    failed = sum(event["kind"] == "engine" and event.get("state") == "quarantined" for event in events)
    counts = ", ".join(f"{name} {len(versions)}" for name, versions in sorted(passed.items()))
    last = min((max(versions) for versions in passed.values()), default=0)
    yield f"canaries passed: {counts or 'none'}; the newest version {newest}, everywhere {last}", 0 < newest == last
    yield f"engines quarantined: {failed}", not failed
    alarms = sum(event["kind"] == "engine_gap" for event in events)
    yield f"updates whose engines and learner were apart: {alarms}", not alarms


def _ordered(entry: dict[str, Any]) -> tuple[str, bool]:
    """Of k rollouts, one succeeds the more often the larger k is, and all do the less often; where every task has them all."""
    rows = [row for row in entry["pass_k"] if row["tasks"] == entry["tasks"]]
    some, every = [row["pass_at"] for row in rows], [row["pass_all"] for row in rows]
    said = ", ".join(f"{row['k']}: {row['pass_at']:.3f} and {row['pass_all']:.3f}" for row in rows)
    ok = some == sorted(some) and every == sorted(every, reverse=True) and all(e <= s for s, e in zip(some, every, strict=True))
    return f"{entry['domain']}: pass@k and pass^k of version {entry['version']}: {said}", ok


def _learned(domain: str, evals: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """What was asked of one domain's greedy success: the last evaluation of the warm start and the last of all."""
    warm = next((e for e in reversed(evals) if e["phase"] == "warm"), None)
    rl = next((e for e in reversed(evals) if e["phase"] == "rl"), None)
    if args.max_warm is not None:
        yield _bound(domain, "after the warm start", warm, "<=", args.max_warm)
    if args.min_rl is not None:
        yield _bound(domain, "after RL", rl, ">=", args.min_rl)
    if args.disjoint:
        low, high = rl["ci95"][0] if rl else 0.0, warm["ci95"][1] if warm else 1.0
        yield f"{domain}: intervals disjoint: RL from {low:.3f}, warm start up to {high:.3f}", low > high


def _bound(domain: str, when: str, found: dict[str, Any] | None, sign: str, bound: float) -> tuple[str, bool]:
    if found is None:
        return f"{domain}: success {when} was not evaluated", False
    ok = found["success"] <= bound if sign == "<=" else found["success"] >= bound
    return f"{domain}: success {when} {found['success']:.3f} {sign} {bound}", ok


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--min-rl", type=float, help="least held-out greedy success after RL")
    parser.add_argument("--max-warm", type=float, help="most held-out greedy success after the warm start")
    parser.add_argument("--disjoint", action="store_true", help="the two 95%% intervals must not meet")
    parser.add_argument(
        "--flat-gap", action="store_true", help="a run with learning rate 0: engine and learner stay as they were"
    )
    parser.add_argument("--proven", action="store_true", help="every version passed its canary, no engine was quarantined")
    args = parser.parse_args(argv)
    path = args.run / "summary.json"
    if not path.is_file():
        print(f"polyturn: error: {path} does not exist: the run has not finished", file=sys.stderr)
        return 2
    try:
        config = load(args.run / "config.toml")
        summary = json.loads(path.read_text())
    except (ConfigError, ValueError) as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for line, ok in checks(summary, config, args):
        print(("ok    " if ok else "FAILED"), line)
        failed += not ok
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
