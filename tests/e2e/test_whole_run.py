"""A run from its start to its summary, and the evaluation of what it left: real processes, real wire."""

import json
from collections import Counter

from learner.metrics import read_metrics
from learner.runfolder import read_events
from tests.e2e.launched import OUTCOMES, WARM_ROLLOUTS, balanced

SUMMARY = {"config", "seed", "updates", "wall_seconds", "rollouts", "evals", "tokens", "lag", "recompilations_after_warmup"}
EVALUATION = {"phase", "version", "split", "mode", "domain", "success", "n", "ci95"}


def test_a_whole_run_and_its_evaluation(launched):
    code, out = launched.launch("local")
    assert code == 0, out
    assert "restarts: none" in out
    assert launched.alive() == []
    summary = launched.summary()
    check_summary(summary)
    check_folder(launched, summary)

    code, out = launched.launch("eval", "--tasks", "8", "--mode", "sampled")
    assert code == 0, out
    assert launched.alive() == []
    result = json.loads((launched.run / "eval.json").read_text())
    (entry,) = result["evals"]
    assert (result["updates"], set(entry)) == (6, EVALUATION)
    assert (entry["phase"], entry["mode"], entry["n"], entry["split"]) == ("rl", "sampled", 8, "heldout")
    assert launched.summary() == summary
    assert launched.launch("status")[1].startswith(f"{launched.run} has finished; newest checkpoint: update 6.")


def check_summary(summary):
    assert set(summary) == SUMMARY
    assert (summary["config"]["name"], summary["seed"], summary["updates"]) == ("tiny", 1, 6)
    assert set(summary["rollouts"]) == {"dispatched", *OUTCOMES}
    assert balanced(summary["rollouts"])
    assert summary["rollouts"]["failed"] == 0
    assert {name: set(entry) for name, entry in enumerate(summary["evals"])} == dict.fromkeys(range(3), EVALUATION)
    assert [(e["phase"], e["mode"], e["domain"], e["n"]) for e in summary["evals"]] == [
        (phase, "greedy", "frozenlake", 16) for phase in ("init", "warm", "rl")
    ]
    init, warm, rl = (e["version"] for e in summary["evals"])
    assert 1 == init < warm < rl
    assert summary["recompilations_after_warmup"] == 0
    assert 0 <= summary["lag"]["mean"] <= summary["lag"]["max"] <= summary["config"]["learner"]["max_lag"]
    assert summary["tokens"]["sampled"] >= summary["tokens"]["trained"] > 0


def check_folder(launched, summary):
    metrics, rows = read_metrics(launched.run), launched.trained()
    assert [line["update"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["optimizer_steps"] == 2 for line in metrics)
    assert metrics[0]["gap_max"] < 1e-4  # engine and learner agree about version 2, before any policy update
    assert Counter(row["update"] for row in rows) == dict.fromkeys(range(1, 7), 16)
    assert len({row["rollout_id"] for row in rows}) == len(rows)  # nothing was trained twice
    stale = sum(line["stale"] for line in metrics)  # these count in their groups' statistics only
    assert len(rows) - stale == summary["rollouts"]["trained"] - WARM_ROLLOUTS
    assert {row["source"] for row in rows} == {"policy"}
    assert summary["tokens"]["trained"] == sum(line["trained_tokens"] for line in metrics)
    assert launched.checkpoints() == [4, 6]
    assert [event["phase"] for event in read_events(launched.run, "phase")] == ["warm", "rl", "done"]
