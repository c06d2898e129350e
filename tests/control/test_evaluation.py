"""What counts as success, and how sure we are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Sampling, Source, Task
from learner.assignments import EveryRolloutFails
from learner.evaluation import Evaluation, Job, fixed_tasks, succeeded, wilson
from learner.ledger import Ledger
from learner.rollouts import Kind
from tests.control.scripted import make_tasks, rules, trajectory


class Asked:
    """An assignment's fields, as `trajectory` reads them."""

    rollout_id, attempt, group_id, source = "1-g000000-0", 1, "1-g000000", Source.POLICY
    task, sampling = Task("toy", "t", 0, {}), Sampling(1.0, 8)


@pytest.mark.parametrize(
    ("metrics", "reward", "want"),
    [({}, 1.0, True), ({}, 0.5, False), ({}, 0.51, True), ({"success": 1.0}, 0.0, True), ({"success": 0.0}, 1.0, False)],
)
def test_success_is_the_environments_metric_else_the_return(metrics, reward, want):
    assert succeeded(trajectory(Asked, reward=reward, metrics=metrics)) is want


def test_wilson_golden():
    """8 of 10, z = 1.96: centre (.8 + 3.8415/20) / (1 + .38415) = .71674; half 1.95996/1.38415 *
    sqrt(.8 * .2 / 10 + 3.8415/400) = 1.41601 * sqrt(.016 + .0096037) = .22658."""
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.71674 - 0.22658, abs=2e-5), pytest.approx(0.71674 + 0.22658, abs=2e-5))
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 50)[0] == 0.0
    assert wilson(50, 50)[1] == pytest.approx(1.0)


@given(st.integers(1, 500), st.data())
def test_wilson_bounds_solve_the_score_equation(n, data):
    """Both ends satisfy |p - x| = z * sqrt(x (1 - x) / n)."""
    k = data.draw(st.integers(0, n))
    low, high = wilson(k, n)
    assert 0 <= low <= k / n + 1e-12
    assert k / n <= high + 1e-12 <= 1 + 1e-9
    for x in (low, high):
        assert abs(abs(k / n - x) - 1.959963984540054 * math.sqrt(max(0.0, x * (1 - x)) / n)) < 1e-7


def test_failed_rollouts_are_left_out_of_n():
    job = Job("rl", 3, "greedy")
    for i in range(4):
        job.plan(f"r{i}", "toy")
    job.scored("r0", True)
    job.scored("r1", False)
    job.given_up("r2")
    job.given_up("r3")
    (entry,) = job.results()
    assert entry == {
        "phase": "rl",
        "version": 3,
        "split": "heldout",
        "mode": "greedy",
        "domain": "toy",
        "success": 0.5,
        "n": 2,
    } | {"ci95": list(wilson(1, 2))}
    assert job.failed == {"toy": 2}


def test_the_held_out_tasks_are_always_the_first_ones():
    tasks = {"toy": make_tasks("toy", "heldout", 4)}
    assert [t.id for t in fixed_tasks(tasks, 2)["toy"]] == ["heldout-0", "heldout-1"]
    with pytest.raises(ValueError, match=r"eval\.tasks 5 exceeds the 4 held-out tasks of domain 'toy'"):
        fixed_tasks(tasks, 5)


def test_seeds_are_the_same_in_every_evaluation_and_differ_between_modes_and_tasks():
    ledger = Ledger(rules(), 1)
    seeds = []
    for version in (1, 2):
        evaluation = Evaluation({"toy": make_tasks("toy", "heldout", 3)})
        evaluation.start(ledger, "rl", version, ["greedy", "sampled"])
        seeds.append([r.seed for r in ledger.rollouts(Kind.EVAL)])
        ledger.cancel(Kind.EVAL)
        assert evaluation.finish()[1] == 6
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6


def test_an_evaluation_without_a_single_scored_rollout_is_an_error_and_no_result():
    ledger, evaluation = Ledger(rules(), 1), Evaluation({"toy": make_tasks("toy", "heldout", 3)})
    evaluation.start(ledger, "rl", 7, ["greedy"])
    for rollout_id in evaluation.open:
        evaluation.given_up(rollout_id)
    with pytest.raises(EveryRolloutFails, match="every greedy held-out rollout of domain 'toy' failed for good, so version 7"):
        evaluation.finish()
    assert evaluation.results == evaluation.jobs == []
