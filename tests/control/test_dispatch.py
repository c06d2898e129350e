"""Selection, curricula, locked domains and outages, through the control plane as actors and the training loop meet it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from common.types import Assignment
from learner.control import Control
from learner.dispatch import NothingToLearn
from learner.service import serve
from tests.control.scripted import (
    Clock,
    EventLog,
    ScriptedActor,
    engine,
    failed,
    hand_in,
    in_background,
    lease,
    make_control,
    publish,
    started,
    step,
    trajectory,
)
from tests.processes import until


def learn(control: Control, updates: int, solve: Callable[[Assignment], float]) -> list[Assignment]:
    """Make `updates` updates; `solve` gives the reward of a rollout. Returns what was handed out."""
    out = []
    for _ in range(updates):
        version = max(control.ledger.versions)
        control.set_engines([engine(version)])
        out += (assigned := lease(control))
        for a in assigned:
            assert hand_in(control, trajectory(a, version, solve(a))) == "STORED"
        control.commit(control.take(0))
        publish(control, version + 1, control.ledger.update)
    return out


def answer(control: Control, *rewards: float) -> None:
    """Lease as many rollouts and deliver them."""
    for a, reward in zip(lease(control, len(rewards)), rewards, strict=True):
        assert hand_in(control, trajectory(a, reward=reward)) == "STORED"


# ---- selection --------------------------------------------------------------------------------------------


def test_groups_without_signal_are_refilled_and_seen_by_the_sampler(tmp_path):
    control, _, _ = started(tmp_path, tasks={"select": "signal", "sampler": "variance"})
    answer(control, 0, 0, 1, 1, 0, 1)
    assert control.take(0) is None
    assert control.reasons() == {"filtered": {"no_signal": 4}}
    assert control.status()["sentence"].startswith(
        "learner waits for 1 group of any domain (2 were filtered for equal rewards since the last update)"
    )
    assert len(control.delivered.trajectories) == 2
    assert sum(x.n for x in control.dispatch.sampler.statistics["toy"].values()) == 6
    answer(control, 1, 0)
    batch = control.take(0)
    assert [[t.total_reward for t in group] for group in batch.groups] == [[0, 1], [1, 0]]
    control.commit(batch)
    assert control.counts() == {
        **{"dispatched": 8, "open": 0, "trained": 4, "filtered": 4},
        **dict.fromkeys(("stale", "failed", "cancelled"), 0),
    }


def test_a_run_in_which_no_group_has_signal_says_so_and_ends(tmp_path):
    """max_refills 1 and 2 groups an update: an alarm after 2 groups, the end after 20."""
    control, _, events = started(tmp_path, tasks={"select": "signal", "max_refills": 1})
    answer(control, 0, 0)
    assert control.take(0) is None
    assert events.of("nothing_to_learn") == []
    answer(control, 1, 1)
    for _ in range(2):
        assert control.take(0) is None  # told once
    (told,) = events.of("nothing_to_learn")
    assert told["alarm"].startswith("2 groups in a row were filtered, because their rollouts had equal rewards")
    for _ in range(17):
        answer(control, 0, 0)
    assert control.take(0) is None
    answer(control, 0, 0)
    with pytest.raises(NothingToLearn, match=r"^20 groups in a row were .*; choose other tasks, tasks\.sampler"):
        control.take(0)


def test_the_alarm_is_given_again_after_an_update(tmp_path):
    control, _, events = started(tmp_path, tasks={"select": "signal", "max_refills": 1})
    for _ in range(2):
        answer(control, 0, 0, 1, 1)
        assert control.take(0) is None
        answer(control, 0, 1, 1, 0)
        control.commit(control.take(0))
    assert [event["update"] for event in events.of("nothing_to_learn")] == [0, 1]


def test_an_empty_choice_abandons_the_update_and_alarms_after_some_in_a_row(tmp_path):
    control, _, events = started(tmp_path, tasks={"select": "mass", "max_refills": 2})
    for count in (0, 1):
        answer(control, 0, 0, 1, 1)
        assert control.take(0) is None
        assert len(events.of("nothing_to_learn")) == count
    assert events.of("update_abandoned") == [{"update": 0, "groups": 2, "reason": "no_spread"}] * 2
    answer(control, 0, 0, 0, 1)
    assert [len(group) for group in control.take(0).groups] == [2]


def test_starpo_s_waits_for_all_its_candidates(tmp_path):
    control, _, _ = started(tmp_path, tasks={"select": "top_std", "share": 0.5})
    assert control.take(0) is None
    assert control.status()["sentence"].startswith("learner waits for 4 groups")
    assert len(lease(control, 1000)) == 2 * 4 * 2  # (max_lag 1 + 1) * 4 candidates, groups of 2


# ---- curricula --------------------------------------------------------------------------------------------

STAGES = {"curriculum": {"kind": "stages", "turns": [1, 3], "every": 1}}


def test_the_stage_of_a_group_travels_with_each_assignment(tmp_path):
    """Stage 1 until the first update: groups that opened before keep its budget, also when they are issued again."""
    control, _, events = started(tmp_path, **STAGES)
    server, port = serve(control, "127.0.0.1:0")
    actor = ScriptedActor(port)
    first = actor.lease(6)
    assert [(a.stage, a.limits.max_turns) for a in first] == [(1, 1)] * 6
    two = step([3, 4], [(0, 1)])
    long = trajectory(first[0], steps=(two, step([5, 6], [(0, 1)], 1.0)))
    assert actor.deliver(long) == "REFUSED"  # two turns
    for a in first[1:4]:
        actor.deliver(trajectory(a))
    (again,) = actor.lease(1)
    assert (again.rollout_id, again.attempt, again.stage, again.limits.max_turns) == (first[0].rollout_id, 2, 1, 1)
    actor.deliver(trajectory(again))
    control.commit(control.take(5))
    actor.deliver(failed(first[4]))
    later = {a.rollout_id: (a.stage, a.limits.max_turns) for a in actor.lease(4)}
    assert later.pop(first[4].rollout_id) == (1, 1)
    assert set(later.values()) == {(2, 3)}
    told = [(event["stage"], event["before"], event["max_turns"], event["update"]) for event in events.of("curriculum_stage")]
    assert told == [(1, 0, {"toy": 1}, 0), (2, 1, {"toy": 3}, 1)]
    actor.close()
    server.stop(0).wait()


def test_evaluations_and_references_have_the_whole_budget(tmp_path):
    control = make_control(tmp_path, **STAGES | {"warm": {"updates": 1, "rollouts_per_update": 3}})
    publish(control, 1, 0)
    control.set_engines([engine(1)])
    control.start_warm()
    assert {(a.stage, a.limits.max_turns) for a in lease(control, 3)} == {(0, 10)}
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    held_out = lease(control, 3)
    assert {(a.purpose, a.stage, a.limits.max_turns) for a in held_out} == {("eval", 0, 10)}
    for a in held_out:
        hand_in(control, trajectory(a))
    result()


def test_a_resumed_run_is_in_the_stage_that_it_was_in(tmp_path):
    tables = {"curriculum": {"kind": "success", "turns": [1, 3], "mastered": 0.75, "window": 4}}
    control, _, events = started(tmp_path, **tables)
    first = lease(control, 6)
    for a in first[:4]:
        hand_in(control, trajectory(a))  # 4 of 4
    assert [a.stage for a in lease(control)] == [2, 2]
    assert [event["stage"] for event in events.of("curriculum_stage")] == [1, 2]
    told = EventLog()
    again = make_control(tmp_path, Clock(), told, incarnation=2, **tables)
    again.restore(json.loads(json.dumps(control.state())))
    publish(again, 2, 0)
    again.set_engines([engine(2)])
    again.start_rl()
    reissued = lease(again)
    assert [(a.group_id, a.stage, a.limits.max_turns) for a in reissued] == [
        *[(first[4].group_id, 1, 1)] * 2,
        *[("1-g000003", 2, 3)] * 2,
    ]
    again.commit(again.take(0))
    assert {a.stage for a in lease(again)} == {2}
    assert told.of("curriculum_stage") == []  # it was told before


# ---- locked domains ---------------------------------------------------------------------------------------

TWO = [{"name": name, "train_tasks": 6, "heldout_tasks": 4} for name in ("a", "b")]
MANY = {"algorithm": {"group_size": 2, "groups_per_update": 8, "minibatches": 1}, "learner": {"updates": 1000, "max_lag": 1}}


def domains_of(assigned: list[Assignment]) -> Counter[str]:
    return Counter(a.task.domain for a in assigned)


def test_a_domain_opens_when_another_is_good_enough_and_stays_open(tmp_path):
    """64 rollouts (32 groups of 2) are looked at; 4 updates are 64 rollouts."""
    locked = [TWO[0], TWO[1] | {"unlock": {"a": 0.6}}]
    control, _, events = started(tmp_path / "1", domains=locked, **MANY)
    assert set(domains_of(learn(control, 8, lambda a: float(a.rollout_id.endswith("0"))))) == {"a"}  # one in two
    saved = json.loads(json.dumps(control.state()))
    again = make_control(tmp_path / "1", Clock(), EventLog(), incarnation=2, domains=locked, **MANY)
    again.restore(saved)
    assert again.dispatch.locked == {"b": {"a": 0.6}}
    learn(control, 8, lambda a: 1.0)
    assert [event["domain"] for event in events.of("domain_unlocked")] == ["b"]
    assert domains_of(learn(control, 16, lambda a: 0.0))["b"] > 50  # although success in a is gone again
    assert len(events.of("domain_unlocked")) == 1
    other = make_control(tmp_path / "2", Clock(), EventLog(), incarnation=2, domains=locked, **MANY)
    other.restore(control.state())
    assert other.dispatch.locked == {}


def test_each_domain_that_is_waited_for_has_to_be_good_once(tmp_path):
    three = [*TWO, TWO[1] | {"name": "c", "unlock": {"a": 0.6, "b": 0.6}}]
    control, _, events = started(tmp_path, domains=three, **MANY)
    learn(control, 16, lambda a: float(a.task.domain == "a"))
    assert control.dispatch.locked == {"c": {"b": 0.6}}
    learn(control, 16, lambda a: float(a.task.domain == "b"))
    assert control.dispatch.locked == {}
    assert [event["domain"] for event in events.of("domain_unlocked")] == ["c"]


def test_references_of_a_locked_domain_are_learned(tmp_path):
    locked = [TWO[0], TWO[1] | {"unlock": {"a": 0.6}}]
    control = make_control(tmp_path, domains=locked, warm={"updates": 3, "rollouts_per_update": 16})
    control.start_warm()
    assert set(domains_of(lease(control))) == {"a", "b"}


# ---- outages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "variance", "limr"])
def test_087_an_outage_is_told_and_takes_nothing_of_the_domains_share(tmp_path, sampler):
    """Domain a has 1/4 of the groups, and is all zero for 45 updates. Of the 40 groups of 5 updates after it, 10 are its share;
    fewer than 3 come with a chance of 1e-3 (binomial, 40, 1/4; the seed is fixed)."""
    shared = [TWO[0] | {"weight": 1.0}, TWO[1] | {"weight": 3.0}]
    control, _, events = started(tmp_path, domains=shared, tasks={"sampler": sampler}, **MANY)
    half = lambda a: float(a.rollout_id.endswith("0"))  # noqa: E731
    learn(control, 40, half)
    assert events.of("domain_success_dropped") == []
    outage = learn(control, 45, lambda a: half(a) * (a.task.domain == "b"))
    (told,) = events.of("domain_success_dropped")
    assert told["domain"] == "a"
    assert told["alarm"].startswith("success in a fell from 0.5")
    assert domains_of(outage)["a"] > 0.15 * len(outage)
    after = learn(control, 5, half)
    assert domains_of(after)["a"] >= 3 * 2


# ---- resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "variance", "limr"])
def test_a_resumed_run_draws_the_tasks_that_it_would_have_drawn(tmp_path, sampler):
    tables = {"domains": TWO, "tasks": {"sampler": sampler}, **MANY}
    control, _, _ = started(tmp_path, **tables)
    learn(control, 5, lambda a: float(a.task.seed > 2))
    again = make_control(tmp_path, Clock(), EventLog(), incarnation=2, **tables)
    again.restore(json.loads(json.dumps(control.state())))
    assert json.dumps(again.dispatch.state()) == json.dumps(control.dispatch.state())
    again.set_engines([engine(max(control.ledger.versions))])
    again.start_rl()
    publish(again, max(control.ledger.versions), control.ledger.update)
    drawn = [[(a.task.domain, a.task.id) for a in learn(c, 4, lambda a: float(a.task.seed > 2))] for c in (control, again)]
    assert drawn[0] == drawn[1]
