"""The learner's report as text: golden lines, and no report that makes it fail."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tools.launching import report as words
from tools.launching.supervisor import child_environment, complaint, describe_status, tail
from tools.launching.view import picture

FULL = {
    "phase": "rl",
    "update": 12,
    "updates": 30,
    "success": {"frozenlake": 0.6254},
    "lag": {"mean": 0.4, "max": 2},
    "tokens_per_s": 3120.4,
    "rollouts": {"dispatched": 5000, "open": 500, "trained": 4400, "filtered": 64, "stale": 32, "failed": 3, "cancelled": 1},
    "engines": [
        {"name": "engine-0", "pool": "main", "state": "ready", "version": 13, "reason": ""},
        {"name": "engine-1", "pool": "stale", "state": "quarantined", "version": 12, "reason": "canary off by 0.3"},
    ],
    "actors": [{"id": "actor-0", "running": 256, "age_s": 0.84, "outcome/STORED": 9.0, "outcome/LOST": 2.0}],
    "waits": [{"owner": "learner", "name": "take", "on": "1-g000004-2", "seconds": 12.06, "deadline": 120.0}],
    "stall": [
        "root cause: env-frozenlake-0 has been silent for 94 s",
        "learner waits for 3 groups of frozenlake: rollout 1-g000004-2 on actor-0 waits for env-frozenlake-0 (env.step)",
    ],
    "evals": [
        {"phase": "warm", "version": 1, "mode": "greedy", "domain": "frozenlake", "success": 0.5, "n": 128, "ci95": [0.41, 0.59]}
    ],
    "sentence": "learner waits for 3 groups",
}


def test_status_in_sentences():
    assert words.sentences(FULL) == [
        *FULL["stall"],
        "Phase rl, update 12/30.",
        "Success in training: frozenlake 0.625.",
        "Off-policy: lag 0.40 mean, 2 max (updates).",
        "Speed: 3,120 sampled tokens/s.",
        "Rollouts: 5,000 dispatched, 500 open, 4,400 trained, 64 filtered, 32 stale, 3 failed, 1 cancelled.",
        "Engines: engine-0 ready, version 13; engine-1 (stale pool) quarantined, version 12 (canary off by 0.3).",
        "Actors: actor-0 runs 256 rollouts, heard 0.8 s ago, 2 lost.",
        "eval warm: frozenlake 0.500 [0.410, 0.590] greedy, n 128, version 1.",
    ]


def test_several_domains_have_a_sentence_each():
    counts = {"dispatched": 80, "open": 60, "trained": 16, "failed": 4}
    domains = {
        "frozenlake": {"open": 12, "share": 12, "ready": 3, "state": "", "rollouts": counts},
        "arithmetic": {"open": 1, "share": 1, "ready": 0, "state": "late", "rollouts": {}},
    }
    assert words.domains({"domains": domains}) == [
        "frozenlake has 12 of 12 groups open, 3 complete; 80 dispatched, 60 open, 16 trained, 4 failed",
        "arithmetic has 1 of 1 groups open, 0 complete (late)",
    ]
    assert "Domain arithmetic has 1 of 1 groups open, 0 complete (late)." in words.sentences(FULL | {"domains": domains})


def test_an_evaluation_with_several_rollouts_a_task():
    chances = [{"k": k, "pass_at": 0.5 + k / 10, "pass_all": 0.5 - k / 20} for k in (1, 2, 4)]
    row = FULL["evals"][0] | {"mode": "sampled", "n": 512, "pass_k": chances}
    assert words.evaluation(row) == (
        "eval warm: frozenlake 0.500 [0.410, 0.590] sampled, n 512, version 1, "
        "pass@2 0.700, pass@4 0.900, pass^2 0.400, pass^4 0.300"
    )


def shown(report, reachable=True) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture("local demo", report, reachable, {"learner": "running", "actor-0": "waits to restart"}))
    return console.file.getvalue()


def test_the_live_table_has_everything():
    text = shown(FULL)
    parts = ["update 12/30", "frozenlake 0.625", "lag 0.40 mean, 2 max", "3,120 tokens/s", "4,400 trained", "canary off by 0.3"]
    for part in [*parts, "actor-0 runs 256", "eval warm", "learner waits for 3 groups of frozenlake", "actor-0 waits to restart"]:
        assert part in text
    assert "the learner does not answer" in shown(FULL, reachable=False)
    assert "the learner does not answer" in shown({}, reachable=False)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
rows = st.lists(
    st.dictionaries(
        st.sampled_from(sorted({key for k in ("engines", "waits", "evals", "actors") for key in FULL[k][0]})), anything
    )
)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional={key: anything | rows if isinstance(FULL[key], list) else anything for key in FULL}))
def test_no_report_makes_the_view_fail(report):
    words.line(report)
    words.sentences(report)
    words.summary(report, {})
    shown(report)


def test_a_summary_as_a_table():
    values = {
        "updates": 30,
        "wall_seconds": 181.23,
        "rollouts": {"dispatched": 5, "trained": 5, "stale": 0},
        "lag": {"mean": 1, "max": 2},
    }
    assert words.summary(values, {"actor-0": 2})[:3] == [
        "  updates         30",
        "  wall clock      181.2 s",
        "  rollouts        5 dispatched, 5 trained, 0 stale",
    ]
    assert words.summary(values, {"actor-0": 2})[-1] == "  restarts        actor-0 2"


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exited with status 3"), (-9, "was killed by SIGKILL"), (-250, "was killed by signal 250")]
)
def test_exit_statuses_have_names(status, words):
    assert describe_status(status) == words


def test_the_tail_of_a_log_begins_with_the_last_start(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"polyturn: error: an old start\n")
    start = log.stat().st_size
    log.write_bytes(log.read_bytes() + b"one\n\n\xfftwo\n" + b"x" * 400)
    assert tail(log, start) == ["one", "�two", "x" * 300]
    assert tail(log, start, 1) == ["x" * 300]
    assert complaint(log, start) == ""
    assert complaint(log, 0) == "an old start"
    assert tail(tmp_path / "nowhere.log") == []


def test_the_environment_of_programs():
    bare = child_environment({"HOME": "/h"}, accelerator=False)
    quick_end = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    assert bare == {"HOME": "/h", "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu", **quick_end}
    assert child_environment({"JAX_PLATFORMS": "tpu"}, accelerator=False)["JAX_PLATFORMS"] == "tpu"
    shared = child_environment({}, accelerator=True)
    assert shared == {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **quick_end}
