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
    assert set(greedy) == {"phase", "version", "split", "mode", "domain", "success", "n", "ci95"}
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
