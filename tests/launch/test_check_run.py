"""tools/check_run.py: what a finished run must hold, per domain."""

import json

import pytest

from common.cli import dump_toml, load
from tests.launch.stage import REPOSITORY
from tools import check_run

ROLLOUTS = {"dispatched": 9, "trained": 5, "filtered": 0, "stale": 1, "failed": 1, "cancelled": 2}


def evaluation(phase, domain, success, low, high):
    return {"phase": phase, "mode": "greedy", "domain": domain, "success": success, "ci95": [low, high]}


GOOD = [
    evaluation("warm", "a", 0.7, 0.6, 0.8),  # on the way of the warm start
    evaluation("warm", "a", 0.5, 0.4, 0.6),
    evaluation("rl", "a", 0.7, 0.61, 0.8),  # between updates: the last one counts
    evaluation("rl", "a", 0.9, 0.85, 0.95),
]


@pytest.fixture
def check(tmp_path, capsys):
    def run(evals=GOOD, overrides=(), asked=("--min-rl", "0.85", "--max-warm", "0.6", "--disjoint"), **changes):
        config = load(REPOSITORY / "configs" / "tiny.toml", overrides)
        summary = {"rollouts": ROLLOUTS, "updates": 6, "lag": {"max": 1}, "recompilations_after_warmup": 0, "evals": evals}
        (tmp_path / "config.toml").write_text(dump_toml(config))
        (tmp_path / "summary.json").write_text(json.dumps(summary | changes))
        options = list(asked)
        status = check_run.main([str(tmp_path), *options])
        return status, [line[7:] for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]

    return run


def test_a_run_that_holds_what_it_promises(check):
    assert check() == (0, [])


def test_chances_of_several_rollouts_rise_and_fall_with_their_number(check):
    def with_chances(*pairs, tasks=3):
        rows = [{"k": 2**n, "tasks": tasks, "pass_at": some, "pass_all": every} for n, (some, every) in enumerate(pairs)]
        return [*GOOD, evaluation("rl", "a", 0.9, 0.85, 0.95) | {"tasks": 3, "version": 7, "pass_k": rows}]

    assert check(with_chances((0.5, 0.5), (0.7, 0.3))) == (0, [])
    falls = "a: pass@k and pass^k of version 7: 1: 0.500 and 0.500, 2: 0.400 and 0.300"
    assert check(with_chances((0.5, 0.5), (0.4, 0.3))) == (1, [falls])
    assert check(with_chances((0.5, 0.5), (0.7, 0.6)))[0] == 1
    assert check(with_chances((0.5, 0.6)))[0] == 1
    assert check(with_chances((0.5, 0.5), (0.4, 0.3), tasks=2))[0] == 0  # over other tasks: nothing follows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollouts": ROLLOUTS | {"trained": 4}}, "one outcome: 9 = 8"),
        ({"updates": 5}, "updates: 5 of 6"),
        ({"lag": {"max": 2}}, "lag at most 1: 2"),
        ({"recompilations_after_warmup": 3}, "compilations after warm-up: 3"),
        ({"evals": GOOD[2:]}, "a: success after the warm start was not evaluated"),
        ({"evals": GOOD[:2]}, "a: success after RL was not evaluated"),
        ({"evals": [*GOOD[:3], evaluation("rl", "a", 0.84, 0.8, 0.9)]}, "a: success after RL 0.840 >= 0.85"),
        ({"evals": [evaluation("warm", "a", 0.61, 0.4, 0.8), *GOOD[2:]]}, "a: success after the warm start 0.610 <= 0.6"),
        ({"evals": [evaluation("warm", "a", 0.6, 0.4, 0.86), *GOOD[2:]]}, "a: intervals disjoint: RL from 0.850"),
        ({"evals": [*GOOD, evaluation("warm", "b", 0.7, 0.6, 0.8), evaluation("rl", "b", 0.9, 0.85, 0.95)]}, "b: success after"),
    ],
)
def test_what_is_missing_is_named(check, changes, words):
    status, failed = check(**changes)
    assert status == 1
    assert any(words in line for line in failed), failed


@pytest.mark.parametrize(("lag", "failed"), [(4, []), (5, ["lag of the stale pool at most 4: 5"])])
def test_the_stale_pool_has_a_bound_of_its_own(check, lag, failed):
    options = [f"--cross_policy.{key}" for key in ("engines=1", "refresh=2", "max_lag=4")]
    found = check(overrides=["--engine.count=2", *options], stale_pool={"share": 0.2, "lag": {"mean": 1.0, "max": lag}})
    assert found == (int(bool(failed)), failed)


def test_a_run_that_has_not_finished_is_one_line(tmp_path, capsys):
    assert check_run.main([str(tmp_path / "none")]) == 2
    assert "the run has not finished" in capsys.readouterr().err


def test_a_summary_that_is_cut_is_one_line(check, tmp_path, capsys):
    check()
    (tmp_path / "summary.json").write_text("{")
    assert check_run.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("polyturn: error: ")


# ---- the self-test --------------------------------------------------------------------------------------------------------

ROWS = [{"gap_mean": 2e-7, "kl_k3": 1e-14}, {"gap_mean": 3e-7, "kl_k3": 0.0}]
EVENTS = [
    *[{"kind": "weights_written", "version": version} for version in (1, 2)],
    {"kind": "engine", "state": "ready"},
    *[{"kind": "engine_updated", "name": "engine-0", "version": version} for version in (1, 2)],
]


@pytest.mark.parametrize(
    ("rows", "events", "words"),
    [
        (ROWS, EVENTS, ""),
        ([], EVENTS, "gap measured in 0 of 0 updates"),
        ([*ROWS, {"kl_k3": 0.0}], EVENTS, "gap measured in 2 of 3 updates"),
        ([*ROWS, {"gap_mean": 1.1e-5}], EVENTS, "gap flat: 2e-07 at first, moved by 1.1e-05, allowed is 1e-05"),
        ([ROWS[0], {"gap_mean": 2e-7, "kl_k3": 2e-5}], EVENTS, "k3 to the policy of any version: 2e-05"),
        (ROWS, EVENTS[:4], "canaries passed: engine-0 1; the newest version 2, everywhere 1"),
        (ROWS, EVENTS[:3], "canaries passed: none; the newest version 2, everywhere 0"),
        (
            ROWS,
            [*EVENTS, {"kind": "engine_updated", "name": "engine-1", "version": 1}],
            "engine-0 2, engine-1 1; the newest version 2",
        ),
        (ROWS, [*EVENTS, {"kind": "engine", "state": "quarantined"}], "engines quarantined: 1"),
        (ROWS, [*EVENTS, {"kind": "engine_gap"}], "updates whose engines and learner were apart: 1"),
    ],
)
def test_a_run_without_learning_must_agree_with_its_engines(check, tmp_path, rows, events, words):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    status, failed = check(asked=["--flat-gap"])
    assert status == int(bool(words))
    assert [words in line for line in failed] == [True] * bool(words), failed
    if "canaries" in words or "engines" in words:
        assert check(asked=["--proven"])[1] == failed
