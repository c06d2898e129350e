"""Evaluations beside training, with the clock set by hand."""

from __future__ import annotations

import threading

from learner.rollouts import Kind
from tests.control.scripted import (
    engine,
    failed,
    hand_in,
    in_background,
    lease,
    publish,
    started,
    step,
    trajectory,
)
from tests.processes import until


def test_097_evaluation_goes_first_and_leaves_training_untouched(tmp_path):
    control, _, _ = started(tmp_path / "with")
    plain, _, _ = started(tmp_path / "without")
    result = in_background(control.evaluate, "rl", 1, ["greedy", "sampled"])
    until(lambda: control.evaluation.open, "the evaluation to begin")
    assigned = lease(control, 6)
    assert {a.purpose for a in assigned} == {"eval"}
    assert {a.sampling.temperature for a in assigned} == {0.0, 1.0}
    assert sorted({a.task.id for a in assigned}) == ["heldout-0", "heldout-1", "heldout-2"]
    for a in assigned[:5]:
        assert hand_in(control, trajectory(a, reward=float(a.task.id != "heldout-2"))) == "STORED"
    assert hand_in(control, failed(assigned[5])) == "STORED"
    assert hand_in(control, failed(lease(control, 1)[0])) == "STORED"  # tried again first; then out of attempts
    greedy, sampled = result()
    assert (greedy["mode"], greedy["n"], greedy["success"]) == ("greedy", 3, 2 / 3)
    assert (sampled["mode"], sampled["n"], sampled["success"]) == ("sampled", 2, 1.0)
    assert set(greedy) == {"phase", "version", "split", "mode", "domain", "success", "n", "tasks", "ci95", "pass_k"}
    assert control.state()["sampler"] == plain.state()["sampler"]
    assert control.counts() == plain.counts()
    a, b = lease(control), lease(plain)
    assert [(x.rollout_id, x.sampling.seed, x.task.id) for x in a] == [(x.rollout_id, x.sampling.seed, x.task.id) for x in b]
    assert control.counts(Kind.EVAL)["evaluated"] == 5


def test_097_a_held_out_rollout_sent_to_training_is_refused(tmp_path):
    control, _, _ = started(tmp_path)
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    held = lease(control, 1)
    assert held[0].purpose == "eval"
    train = next(a for a in lease(control) if a.purpose == "train")
    disguised = trajectory(held[0], rollout_id=train.rollout_id, group_id=train.group_id)
    assert hand_in(control, disguised) == "REFUSED"
    sampled_greedily = trajectory(train, sampling=held[0].sampling)
    assert control.standing(1, (train.rollout_id, 1)).status == "DUPLICATE"
    again = [a for a in lease(control) if a.rollout_id == train.rollout_id]
    assert hand_in(control, trajectory(again[0], sampling=sampled_greedily.sampling)) == "REFUSED"
    assert control.reasons()["failed"] == {"refused:assignment": 1}
    control.finish()
    result()


def test_evaluation_waits_for_its_version_and_gives_up_at_its_deadline(tmp_path):
    control, clock, events = started(tmp_path)
    control.set_engines([engine(1)])
    result = in_background(control.evaluate, "rl", 2)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    assert all(a.purpose == "train" for a in lease(control))
    assert "no engine serves version 2: engine-0 is ready at version 1" in control.status()["sentence"]
    publish(control, 2, 0)
    control.set_engines([engine(2)])
    held = [a for a in lease(control) if a.purpose == "eval"]
    assert len(held) == 3
    hand_in(control, trajectory(held[0], version=2))
    hand_in(control, trajectory(held[1], version=1))  # of other weights: tried again
    clock.now = 31.0
    control.set_engines([engine(2)])
    assert result() == [] == control.evaluation.results  # what came first is no fair sample of the tasks
    (entry,) = events.of("evaluation")[0]["results"]
    assert (entry["n"], entry["success"], entry["version"]) == (1, 1.0, 2)
    assert events.of("evaluation")[0]["failed"] == 2
    assert events.of("evaluation_incomplete")[0]["rollouts"] == 2
    assert events.of("rollout_failed")[0]["reason"] == "other_version"
    assert hand_in(control, trajectory(held[2], version=2)) == "SUPERSEDED"


def test_evaluation_gives_up_on_rollouts_of_actors_that_vanish(tmp_path):
    control, clock, events = started(tmp_path, learner={"max_attempts": 1})
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    held = lease(control, 3)
    hand_in(control, trajectory(held[0]))
    clock.now = 11.0  # the lease is 10 s, the deadline of the evaluation 30 s
    control.set_engines([engine(1)])
    (entry,) = result()
    assert (entry["n"], events.of("evaluation")[0]["failed"]) == (1, 2)
    assert events.of("evaluation_incomplete") == []
    assert control.reasons(Kind.EVAL) == {"failed": {"lease_expired": 2}}


def test_a_stopped_evaluation_records_nothing(tmp_path):
    control, _, events = started(tmp_path)
    stop = threading.Event()
    result = in_background(control.evaluate, "rl", 1, (), stop.is_set)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    stop.set()
    control.set_engines([engine(1)])
    assert result() == [] == control.evaluation.results
    assert control.counts(Kind.EVAL)["cancelled"] == 3
    assert events.of("evaluation_incomplete")[0]["rollouts"] == 3


def test_097_samples_have_their_own_seeds_and_temperature_and_training_sees_nothing_of_them(tmp_path):
    """Four rollouts a task at temperature 0.6, half of them failing for good: what training would be handed out, what it knows
    of its tasks, and when it gives up are as without."""
    table = {"modes": ["sampled"], "samples": 4, "temperature": 0.6}
    control, _, events = started(tmp_path / "with", eval=table)
    plain, _, _ = started(tmp_path / "without")
    result = in_background(control.evaluate, "rl", 1, (), lambda: False, "rl 1.0.0")
    until(lambda: control.evaluation.open, "the evaluation to begin")
    assigned = lease(control, 12)
    assert {a.sampling.temperature for a in assigned} == {0.6}
    assert len({a.sampling.seed for a in assigned}) == 12
    for n, a in enumerate(assigned):
        hand_in(control, trajectory(a, reward=float(n % 2)) if n < 8 else failed(a))
    for a in lease(control, 4):
        hand_in(control, failed(a))
    (entry,) = result()
    assert (entry["n"], entry["tasks"], entry["success"]) == (8, 2, 0.5)
    assert [x["k"] for x in entry["pass_k"]] == [1, 2, 4]
    assert events.of("evaluation")[0]["failed"] == 4
    assert control._streak.count == plain._streak.count == 0
    with_it, without = control.state(), plain.state()
    assert with_it["sampler"] == without["sampler"]
    assert with_it["tokens"] == without["tokens"]
    a, b = lease(control), lease(plain)
    assert [(x.rollout_id, x.sampling, x.task.id) for x in a] == [(x.rollout_id, x.sampling, x.task.id) for x in b]


def test_an_evaluation_that_was_late_goes_on_where_it_was(tmp_path):
    control, clock, events = started(tmp_path)
    result = in_background(control.evaluate, "rl", 1, (), lambda: False, "rl 1.0.0")
    until(lambda: control.evaluation.open, "the evaluation to begin")
    first, *_ = lease(control, 3)
    hand_in(control, trajectory(first))
    clock.now = 31.0
    control.set_engines([engine(1)])
    assert result() == []
    again = in_background(control.evaluate, "rl", 1, (), lambda: False, "rl 1.0.0")
    until(lambda: control.evaluation.open, "the evaluation to go on")
    rest = [a for a in lease(control, 3) if a.purpose == "eval"]
    assert sorted(a.task.id for a in rest) == ["heldout-1", "heldout-2"]
    for a in rest:
        hand_in(control, trajectory(a, reward=0.0))
    (entry,) = again()
    assert (entry["n"], entry["success"]) == (3, 1 / 3)
    assert [event["kept"] for event in events.of("evaluation")] == [0, 1]


def test_training_that_fails_is_not_excused_by_an_evaluation_that_does_not(tmp_path):
    control, _, _ = started(tmp_path)
    control._streak.count = 7
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    for a in lease(control, 3):
        hand_in(control, trajectory(a))
    result()
    assert control._streak.count == 7


def test_one_of_two_engines_is_held_for_the_evaluation_and_training_goes_on_with_the_other(tmp_path):
    """The held one alone starts no training; what it samples is no training rollout's, and a held-out rollout may be of it."""
    control, _, _ = started(tmp_path)
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    control.set_engines([engine(1), engine(1, "updating", pool="eval")])
    assert {a.purpose for a in lease(control, 2)} == {"train"}
    assert "no engine serves version 1" in control.status()["sentence"]
    control.set_engines([engine(1, "updating"), engine(1, pool="eval")])
    held = lease(control, 100)
    assert [a.purpose for a in held] == ["eval"] * 3
    for a in held:
        assert hand_in(control, trajectory(a, steps=(step([3, 4], [(0, 1, "eval")], 1.0),))) == "STORED"
    assert result()[0]["success"] == 1.0
    control.set_engines([engine(1), engine(1, pool="eval")])
    (train, *_) = lease(control)
    assert hand_in(control, trajectory(train, steps=(step([3, 4], [(0, 1, "eval")], 1.0),))) == "REFUSED"
