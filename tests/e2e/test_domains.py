"""Two domains with an algorithm each, from configs/domains.toml, made small: real processes, real wire."""

from dataclasses import replace

import pytest

from learner.metrics import read_metrics
from tests.e2e.launched import REPOSITORY, balanced

SMALL = [
    *("--model.hidden_size=32", "--model.intermediate_size=64", "--model.num_layers=2", "--model.head_dim=8"),
    *(f"--domains.{i}.{key}" for i in range(2) for key in ("train_tasks=32", "heldout_tasks=8", "admission=4")),
    *(
        "--engine.slots=16",
        "--engine.prefill_slots=8",
        "--engine.prefill_chunk=64",
        "--engine.widths=[192]",
        "--actors.rollouts=32",
    ),
    *("--algorithm.group_size=4", "--algorithm.groups_per_update=6", "--algorithm.minibatches=1"),
    *("--warm.updates=3", "--warm.rollouts_per_update=8", "--warm.target_loss=0", "--learner.updates=3"),
    *("--learner.rows_per_microbatch=8", "--eval.tasks=8", "--eval.init=false"),
]


def test_ppo_and_grpo_in_one_run(launched):
    own = replace(launched, config=REPOSITORY / "configs" / "domains.toml")
    code, out = own.launch("local", *SMALL)
    assert code == 0, out
    summary, metrics = own.summary(), read_metrics(own.run)
    assert balanced(summary["rollouts"])
    assert summary["rollouts"]["failed"] == 0
    assert {(e["phase"], e["domain"]) for e in summary["evals"]} == {
        (phase, domain) for phase in ("warm", "rl") for domain in ("frozenlake", "arithmetic")
    }
    names = {name for line in metrics for name in line}
    assert {"policy_loss/frozenlake", "policy_loss/arithmetic", "entropy/frozenlake", "entropy/arithmetic"} <= names
    assert {name for name in names if name.startswith("explained_variance")} == {
        "explained_variance",
        "explained_variance/frozenlake",
    }
    for line in metrics:
        parts = [line[f"policy_loss/{domain}"] for domain in ("frozenlake", "arithmetic")]
        assert line["policy_loss"] == pytest.approx(sum(parts), abs=1e-6)
