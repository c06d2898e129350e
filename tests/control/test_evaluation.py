"""What counts as success, and how sure we are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Sampling, Source, Task
from learner.assignments import EveryRolloutFails
from learner.evaluation import Evaluation, Job, fixed_tasks, pass_all, pass_at, powers, succeeded, wilson
from learner.ledger import Ledger
from learner.rollouts import Kind
from learner.scores import Attempt, Scores
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
        job.plan(f"r{i}", Attempt("greedy", "toy", f"t{i}", 0))
    job.score(job.rollouts.pop("r0"), True)
    job.score(job.rollouts.pop("r1"), False)
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
        "tasks": 2,
        "ci95": list(wilson(1, 2)),
        "pass_k": [],
    }
    assert (job.failed, job.total) == ({"toy": 2}, 4)


def test_pass_at_k_and_pass_to_the_k_golden():
    """Two tasks, four rollouts each, of which 1 and 3 succeed. pass@2: 1 - C(3,2)/C(4,2) = 1 - 3/6 and 1 - C(1,2)/6 = 1: .75.
    pass^2: C(1,2)/6 = 0 and C(3,2)/6 = 3/6: mean .25. pass@4: 1 and 1. pass^4: 0 and 0. k = 1: 1/4 and 3/4. A third task with
    one scored rollout of four, a success, counts for k = 1 alone: mean (1/4 + 3/4 + 1) / 3."""
    job = Job("rl", 3, "sampled", 4)
    for task, outcomes in {"a": [1, 0, 0, 0], "b": [1, 1, 0, 1], "c": [1]}.items():
        for n, outcome in enumerate(outcomes):
            job.score(Attempt("sampled", "toy", task, n), bool(outcome))
    (entry,) = job.results()
    assert (entry["n"], entry["tasks"], entry["success"]) == (9, 3, pytest.approx(2 / 3))
    assert entry["ci95"] == pytest.approx(wilson(2, 3))  # over tasks: rollouts of one are alike
    found = [(x["k"], x["tasks"], x["pass_at"], x["pass_all"]) for x in entry["pass_k"]]
    assert found == [(1, 3, pytest.approx(2 / 3), pytest.approx(2 / 3)), (2, 2, 0.75, 0.25), (4, 2, 1.0, 0.0)]
    assert entry["pass_k"][1]["pass_at_ci95"] == pytest.approx(wilson(1.5, 2))
    assert entry["pass_k"][1]["pass_all_ci95"] == pytest.approx(wilson(0.5, 2))
    assert Job("rl", 3, "sampled", 4).results() == []
    assert [powers(n) for n in (1, 2, 3, 4, 6)] == [[], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


@given(st.integers(1, 6), st.data())
def test_pass_k_by_enumeration(n, data):
    """The share of all subsets of k rollouts with a success, or with nothing else."""
    k, c = data.draw(st.integers(1, n)), data.draw(st.integers(0, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at(k, n, c) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_all(k, n, c) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_one_attempt_is_the_share_of_successes_to_the_last_bit():
    """1 - 9/10 is less than 1/10 in floating point: pass@1 would be below pass^1."""
    for n in range(1, 40):
        for c in range(n + 1):
            assert pass_at(1, n, c) == pass_all(1, n, c) == c / n


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_interval_of_a_mean_is_no_narrower_than_its_own_deviation_asks(values):
    """Numbers in [0, 1] with mean p have at most the variance p (1 - p), which Wilson's interval is made for."""
    p = sum(values) / len(values)
    variance = sum((x - p) ** 2 for x in values) / len(values)
    low, high = wilson(sum(values), len(values))
    for x in (low, high):
        assert abs(p - x) >= 1.959963984540054 * math.sqrt(max(0.0, x * (1 - x)) / len(values)) - 1e-7
    assert variance <= p * (1 - p) + 1e-9
    assert low - 1e-12 <= p <= high + 1e-12


def test_only_sampled_rollouts_are_several_a_task():
    evaluation = Evaluation({"toy": make_tasks("toy", "heldout", 3)}, samples=4)
    evaluation.start(Ledger(rules(), 1), "rl", 7, ["greedy", "sampled"])
    assert [(job.mode, job.total) for job in evaluation.jobs] == [("greedy", 3), ("sampled", 12)]


def test_an_evaluation_goes_on_with_what_was_scored_for_the_same_weights(tmp_path):
    """Killed after two of six: the next life runs the other four, under seeds that are the same; other weights begin anew."""
    tasks = {"toy": make_tasks("toy", "heldout", 3)}
    first = Evaluation(tasks, Scores(tmp_path), samples=2)
    ledger = Ledger(rules(), 1)
    assert first.start(ledger, "rl", 7, ["sampled"], "rl 1.0.5") == 0
    seeds = {first.jobs[0].rollouts[r.id]: r.seed for r in ledger.rollouts(Kind.EVAL)}
    assert len(set(seeds.values())) == 6
    one, two, *_ = first.open
    done = [first.jobs[0].rollouts[one], first.jobs[0].rollouts[two]]
    first.scored(one, True)
    first.scored(two, False)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"weights": "rl 1.0.5", "mode')  # the kill
    again = Evaluation(tasks, Scores(tmp_path), samples=2)
    other = Evaluation(tasks, Scores(tmp_path), samples=2)
    ledger = Ledger(rules(), 2)
    assert again.start(ledger, "rl", 9, ["sampled"], "rl 1.0.5") == 2
    left = {again.jobs[0].rollouts[r.id]: r.seed for r in ledger.rollouts(Kind.EVAL)}
    assert left == {attempt: seed for attempt, seed in seeds.items() if attempt not in done}
    for rollout_id in again.open:
        again.scored(rollout_id, True)
    (entry,), _ = again.finish()
    assert (entry["n"], entry["version"], entry["success"]) == (6, 9, pytest.approx((1 / 2 + 1 + 1) / 3))
    assert other.start(Ledger(rules(), 3), "rl", 9, ["sampled"], "rl 2.0.5") == 0
    assert other.start(Ledger(rules(), 4), "rl", 9, ["greedy"], "rl 1.0.5") == 0
    assert other.start(Ledger(rules(), 5), "rl", 9, ["sampled"]) == 0  # nothing is known of the weights


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


def test_a_domain_without_a_scored_rollout_has_no_result_and_does_not_keep_the_others_from_theirs():
    tasks = {name: make_tasks(name, "heldout", 3) for name in ("down", "up")}
    ledger, evaluation = Ledger(rules(), 1), Evaluation(tasks)
    evaluation.start(ledger, "rl", 7, ["greedy"])
    for rollout_id in evaluation.open:
        if ledger.find(rollout_id)[0].task.domain == "up":
            evaluation.scored(rollout_id, True)
        else:
            evaluation.given_up(rollout_id)
    (entry,), failed = evaluation.finish()
    assert (entry["domain"], entry["n"], failed) == ("up", 3, 3)
    assert evaluation.results == [entry]


def test_an_evaluation_without_a_single_scored_rollout_is_an_error_and_no_result():
    ledger, evaluation = Ledger(rules(), 1), Evaluation({"toy": make_tasks("toy", "heldout", 3)})
    evaluation.start(ledger, "rl", 7, ["greedy"])
    for rollout_id in evaluation.open:
        evaluation.given_up(rollout_id)
    with pytest.raises(EveryRolloutFails, match="every greedy held-out rollout of domain 'toy' failed for good, so version 7"):
        evaluation.finish()
    assert evaluation.results == evaluation.jobs == []
