"""Several domains through the control plane: what a batch waits for, in words and for how long; evaluations and a resume with a
domain that does not answer."""

from __future__ import annotations

import json
from collections import Counter

from learner.control import Control
from learner.rollouts import Kind
from tests.control.scripted import (
    Clock,
    EventLog,
    engine,
    failed,
    hand_in,
    in_background,
    lease,
    make_control,
    publish,
    started,
    trajectory,
)
from tests.processes import until

TWO = [{"name": name, "train_tasks": 6, "heldout_tasks": 4} for name in ("down", "up")]
TABLES = {
    "domains": TWO,
    "algorithm": {"group_size": 2, "groups_per_update": 4, "minibatches": 1},
    "learner": {"updates": 6, "max_lag": 1, "domain_wait_s": 30.0, "lease_s": 1000.0},
}


def play(control: Control, *domains: str) -> None:
    """Lease everything; rollouts of `domains` are answered."""
    for a in lease(control):
        if a.task.domain in domains:
            assert hand_in(control, trajectory(a, max(control.ledger.versions))) == "STORED"


def update(control: Control) -> dict[str, int]:
    """The domains of an update that is made."""
    batch = control.take(0)
    control.commit(batch)
    version = max(control.ledger.versions) + 1
    publish(control, version, control.ledger.update)
    control.set_engines([engine(version)])
    return dict(Counter(group[0].task.domain for group in batch.groups))


def test_a_batch_waits_for_a_domain_and_says_so_and_then_goes_on_without_it(tmp_path):
    control, clock, events = started(tmp_path, **TABLES)
    play(control, "up")
    assert control.take(0) is None
    said = "learner waits for 2 groups of down: rollout 1-g000000-0 is with actor-0"
    assert control.status()["sentence"] == f"{said}, for 0.0 s"
    clock.now = 29.9
    assert control.take(0) is None
    assert control.status()["sentence"] == f"{said}, silent for 30 s"
    assert events.of("domain_late") == []
    clock.now = 30.0
    assert update(control) == {"up": 4}
    (late,) = events.of("domain_late")
    assert (late["domain"], late["groups"], late["update"]) == ("down", 2, 0)
    assert late["alarm"].startswith("the batch has waited 30 s for down")
    found = control.status()["domains"]
    assert {name: (row["open"], row["share"], row["state"]) for name, row in found.items()} == {
        "down": (4, 1, "late"),
        "up": (0, 8, ""),
    }
    assert (found["up"]["rollouts"]["trained"], found["down"]["rollouts"]["open"]) == (8, 8)
    for _ in range(3):  # nobody waits for it any more
        play(control, "up")
        assert update(control) == {"up": 4}
    assert update(control) == {"up": 4}
    assert control.take(0) is None
    assert control.status()["sentence"].startswith("learner waits for 4 groups of any domain (down is late)")
    lease(control)
    assert control.status()["sentence"].startswith("learner waits for 4 groups of up (down is late)")
    assert control.counts()["open"] == 2 * (4 + 4)  # of down what it held all the time, of up the last batch
    assert len(events.of("domain_late")) == 1


def test_two_domains_that_are_missing_are_named_with_their_numbers(tmp_path):
    control, _, _ = started(tmp_path, **TABLES)
    lease(control)
    assert control.take(0) is None
    assert control.status()["sentence"].startswith("learner waits for 4 groups of 2 of down, 2 of up: rollout 1-g000000-0")


def test_the_time_for_a_domain_begins_with_the_wait_and_again_with_each_that_is_given_up(tmp_path):
    three = [*TWO, TWO[0] | {"name": "slow"}]
    algorithm = TABLES["algorithm"] | {"groups_per_update": 3}
    control, clock, events = started(tmp_path, **TABLES | {"domains": three, "algorithm": algorithm})
    clock.now = 500.0  # the learner computed
    play(control, "up")
    assert control.take(0) is None
    clock.now = 529.0
    for a in lease(control, 1):
        raise AssertionError(f"{a.rollout_id}: everything is leased")
    assert control.take(0) is None
    assert events.of("domain_late") == []
    clock.now = 530.0
    assert sum(update(control).values()) == 3 if control.ledger.ready(Kind.RL)[2:] else control.take(0) is None
    assert [event["domain"] for event in events.of("domain_late")] == ["down", "slow"]


def test_the_next_domain_has_its_own_time_also_when_the_wait_was_interrupted(tmp_path):
    """A batch of one group of each of three domains; down hangs, and so does what the others open in its place."""
    tables = {"domains": [*TWO, TWO[0] | {"name": "slow"}], "algorithm": TABLES["algorithm"] | {"groups_per_update": 3}}
    control, _, events = started(tmp_path, **TABLES | tables | {"learner": TABLES["learner"] | {"max_lag": 0}})
    play(control, "up", "slow")
    late = lambda: [event["domain"] for event in events.of("domain_late")]  # noqa: E731
    assert control.dispatch.take(Kind.RL, 30.0) == []
    assert late() == ["down"]
    assert {a.task.domain for a in lease(control)} == {"up"}
    assert control.dispatch.take(Kind.RL, 59.9) == []
    assert control.dispatch.take(Kind.RL, 5.0) == []  # an evaluation came between: a new wait
    assert control.dispatch.take(Kind.RL, 34.9) == []
    assert late() == ["down"]
    assert control.dispatch.take(Kind.RL, 35.0) == []
    assert late() == ["down", "up"]


def test_an_evaluation_and_the_end_of_a_run_do_not_wait_for_a_domain_that_refuses_everything(tmp_path):
    control, clock, events = started(tmp_path, **TABLES | {"learner": {**TABLES["learner"], "updates": 2, "max_attempts": 1}})
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    for a in lease(control, 6):
        hand_in(control, trajectory(a) if a.task.domain == "up" else failed(a))
    (entry,) = result()
    assert (entry["domain"], entry["n"]) == ("up", 3)
    assert events.of("evaluation")[0]["alarm"] == "no held-out rollout of down was scored: version 1 has no result there"
    for _ in range(2):
        for _ in range(3):
            for a in lease(control):
                hand_in(control, trajectory(a, max(control.ledger.versions)) if a.task.domain == "up" else failed(a))
        assert update(control) == {"up": 4}
    assert control.ledger.update == 2
    assert clock.now == 0.0  # without any waiting
    assert lease(control) == []
    control.finish()
    assert control.counts()["open"] == 0


def test_a_resumed_run_waits_for_nobody_that_was_late(tmp_path):
    control, clock, _ = started(tmp_path, **TABLES)
    play(control, "up")
    control.take(0)
    clock.now = 30.0
    update(control)
    play(control, "up")
    again = make_control(tmp_path, Clock(), EventLog(), incarnation=2, **TABLES)
    again.restore(json.loads(json.dumps(control.state())))
    publish(again, 10, 1)
    again.set_engines([engine(10)])
    again.start_rl()
    assert update(again) == {"up": 4}
