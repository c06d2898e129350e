"""A run from its start to its summary, and the evaluation of what it left: real processes, real wire."""

import json
from collections import Counter

import numpy as np
import pytest

from common.record import segments
from common.types import StepKind
from learner.metrics import read_metrics
from learner.runfolder import read_events, read_trajectories
from learner.weights import read_versions
from tests.e2e.launched import OUTCOMES, WARM_ROLLOUTS, balanced
from tools import show

SUMMARY = {
    "config",
    "seed",
    "updates",
    "wall_seconds",
    "rollouts",
    "domains",
    "evals",
    "tokens",
    "lag",
    "stale_pool",
    "recompilations_after_warmup",
}
EVALUATION = {"phase", "version", "split", "mode", "domain", "success", "n", "tasks", "ci95", "pass_k"}


def test_a_whole_run_and_its_evaluation(launched, capsys):
    code, out = launched.launch("local")
    assert code == 0, out
    assert "restarts: none" in out
    assert launched.alive() == []
    summary = launched.summary()
    check_summary(summary)
    check_folder(launched, summary)
    check_shown(launched, capsys)

    code, out = launched.launch("eval", "--tasks", "8", "--mode", "sampled")
    assert code == 0, out
    assert launched.alive() == []
    result = json.loads((launched.run / "eval.json").read_text())
    (entry,) = result["evals"]
    assert (result["updates"], set(entry)) == (6, EVALUATION)
    assert (entry["phase"], entry["mode"], entry["n"], entry["split"]) == ("rl", "sampled", 8, "heldout")
    assert launched.summary() == summary
    assert launched.launch("status")[1].startswith(f"{launched.run} has finished; newest checkpoint: update 6.")


def test_a_run_whose_policy_sums_up_what_it_no_longer_sees(launched, capsys):
    """PPO over rollouts of several segments: every sampled token is in the loss, summaries too, and the engine sampled each
    from the prompt that the record says."""
    context = [f"--domains.0.context.{option}" for option in ("name=summary", "tokens=56", "summary_tokens=12", "keep=1")]
    code, out = launched.launch("local", *context, "--algorithm.advantage=gae", "--algorithm.critic=shared", "--warm.updates=60")
    assert code == 0, out
    summary, metrics = launched.summary(), read_metrics(launched.run)
    assert balanced(summary["rollouts"])
    assert (summary["rollouts"]["failed"], summary["recompilations_after_warmup"]) == (0, 0)
    assert metrics[0]["gap_max"] < 1e-4
    files = sorted((launched.run / "trajectories").glob("*.parquet"))
    rollouts = [[rollout for _, rollout in read_trajectories(path)] for path in files]
    update_of = read_versions(launched.run)
    for line, batch in zip(metrics, rollouts, strict=True):
        kinds = [Counter(step.kind for step in rollout.steps) for rollout in batch]
        assert line["segments"] == np.mean([len(segments(rollout)) for rollout in batch])
        assert line["turns"] == np.mean([count[StepKind.ACT] for count in kinds])
        assert line["rollout/summaries"] == np.mean([count[StepKind.SUMMARY] for count in kinds]) > 0
        versions = np.concatenate([segment.versions[segment.mask] for rollout in batch for segment in segments(rollout)])
        lags = line["update"] - 1 - np.array([update_of[version] for version in versions.tolist()])
        assert line["trained_tokens"] == (lags <= summary["config"]["learner"]["max_lag"]).sum()
    longest = max(rollouts[-1], key=lambda rollout: len(rollout.steps))
    capsys.readouterr()
    assert show.main([str(launched.run), longest.rollout_id]) == 0
    told = capsys.readouterr().out
    summaries = sum(step.kind == StepKind.SUMMARY for step in longest.steps)
    assert told.count("⟨summary ") == summaries > 0
    assert f"segment 1 of {len(segments(longest))}" in told


def check_shown(launched, capsys):
    """Every token of a rollout, as tools/show.py prints it."""
    row = launched.trained()[-1]
    (record,) = (
        r for _, r in read_trajectories(launched.run / "trajectories" / "6.parquet") if r.rollout_id == row["rollout_id"]
    )
    (segment,) = segments(record)
    capsys.readouterr()
    assert show.main([str(launched.run), row["rollout_id"], "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"rollout {row['rollout_id']}, attempt {record.attempt}, policy")
    assert f"return {record.total_reward:g}, {len(record.steps)} turns" in lines[2]
    tokens = [line.split() for line in lines if line.strip()[:1].isdigit() and len(line.split()) >= 4]
    assert [int(words[1]) for words in tokens] == segment.ids.tolist()
    sampled = [words for words in tokens if words[2] == "sampled"]
    assert [float(words[3]) for words in sampled] == pytest.approx(segment.logprobs[segment.mask].tolist(), abs=1e-4)
    assert [int(words[4]) for words in sampled] == segment.versions[segment.mask].tolist()
    assert show.main([str(launched.run), row["rollout_id"]]) == 0
    assert capsys.readouterr().out.count("⟨turn ") == len(record.steps)
    assert show.main([str(launched.run), "nobody"]) == 2
    assert show.main([str(launched.run), row["rollout_id"].partition("-")[0]]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("polyturn: error: no rollout 'nobody' in 6 files of ")
    assert "write more of the id" in told[1]


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
