"""The ledger, rule by rule."""

from __future__ import annotations

import json

import pytest

from common.types import Task
from learner.ledger import FINISHED_MEMORY, Ledger
from learner.rollouts import Group, Kind, Origin, Rollout, Standing, State
from tests.control.scripted import rules

TASK = Task("toy", "t", 0, {})
TRAINING = (Kind.RL, Kind.WARM)


def make(**changes) -> Ledger:
    ledger = Ledger(rules(**changes), 1)
    ledger.published(1, 0)
    return ledger


def lease(ledger: Ledger, count: int = 100, now: float = 0.0, kind: Kind = Kind.RL) -> list[Rollout]:
    for _ in range(max(0, ledger.capacity(kind))):
        ledger.open(kind, TASK)
    return ledger.lease("a", count, kind, now)


def deliver(ledger: Ledger, rollout: Rollout, *versions: int, stale: tuple[int, ...] = ()) -> None:
    """`versions` of main; `stale` are those of the stale pool."""
    origins = [Origin(version, "main") for version in versions or (() if stale else (1,))]
    ledger.delivered(rollout.id, (*origins, *(Origin(version, "stale") for version in stale)), ("f", 0))


def filled(ledger: Ledger, *versions: int) -> list[Group]:
    """Lease what there is and deliver all of it."""
    leased = lease(ledger)
    for rollout in leased:
        deliver(ledger, rollout, *versions)
    return [ledger.groups[rollout.group_id] for rollout in leased[::2] if rollout.group_id in ledger.groups]


def test_capacity_counts_open_groups_the_running_update_included():
    ledger = make()
    assert ledger.capacity(Kind.RL) == 4  # (max_lag 1 + 1) * groups_per_update 2 - 0
    filled(ledger)
    assert ledger.capacity(Kind.RL) == 0  # 4 groups wait
    assert len(ledger.take(Kind.RL)) == 2
    assert ledger.capacity(Kind.RL) == 0  # 2 wait, 2 train
    ledger.commit()
    assert ledger.capacity(Kind.RL) == 2  # 2 wait
    assert ledger.counts(Kind.RL)["trained"] == 4


def test_071_the_end_of_the_run_dispatches_no_more_than_the_updates_left_need():
    ledger = make(updates=2)
    filled(ledger)
    assert len(ledger.groups) == 4  # 2 updates * 2 groups
    for left in (1, 0):
        ledger.take(Kind.RL)
        ledger.commit()
        assert ledger.capacity(Kind.RL) == 0
        assert len(ledger.groups) == left * 2


def test_take_needs_enough_closed_groups_and_takes_the_oldest():
    ledger = make()
    leased = lease(ledger)
    for rollout in leased[2:7]:  # groups 1 and 2 are complete, group 3 has one of two, group 0 none
        deliver(ledger, rollout)
    assert [g.ordinal for g in ledger.ready(Kind.RL)] == [1, 2]
    for rollout in leased[:2]:
        deliver(ledger, rollout)
    assert [g.ordinal for g in ledger.take(Kind.RL)] == [0, 1]
    with pytest.raises(RuntimeError, match="while an update is running"):
        ledger.take(Kind.RL)


def test_drain_takes_everything_complete_once_an_update_is_full():
    ledger = make(take="drain")
    leased = lease(ledger)
    for rollout in leased[:2]:
        deliver(ledger, rollout)
    assert ledger.take(Kind.RL) == []
    for rollout in leased[2:6]:
        deliver(ledger, rollout)
    assert [g.ordinal for g in ledger.take(Kind.RL)] == [0, 1, 2]


def test_042_failed_members_never_become_rows_and_small_groups_are_filtered():
    ledger = make(group_size=4, groups_per_update=1, max_attempts=1)
    rollouts = lease(ledger)[:4]
    for rollout in rollouts[:2]:
        ledger.failed(rollout.id, "env_lost")
    for rollout in rollouts[2:]:
        deliver(ledger, rollout)
    (group,) = ledger.take(Kind.RL)
    assert [r.id for r in group.scored] == [r.id for r in rollouts[2:]]
    assert ledger.commit() == 2

    before = ledger.counts(Kind.RL)
    rollouts = lease(ledger)[:4]
    for rollout in rollouts[:3]:
        ledger.failed(rollout.id, "env_lost")
    deliver(ledger, rollouts[3])  # alone: nothing to compare with
    after = ledger.counts(Kind.RL)
    assert (after["failed"] - before["failed"], after["filtered"]) == (3, 1)
    assert ledger.reasons(Kind.RL) == {"failed": {"env_lost": 5}, "filtered": {"small_group": 1}}


def test_042_a_group_whose_members_all_fail_frees_its_place_at_once():
    ledger = make(max_attempts=1)
    rollouts = lease(ledger)
    assert ledger.capacity(Kind.RL) == 0
    for rollout in rollouts[:2]:
        ledger.failed(rollout.id, "env_lost")
    assert ledger.capacity(Kind.RL) == 1
    assert ledger.ready(Kind.RL) == []
    assert ledger.counts(Kind.RL)["failed"] == 2


def test_a_failure_is_tried_again_with_the_same_seed_until_attempts_run_out():
    ledger = make()
    first = lease(ledger, 1)[0]
    seed = first.seed
    ledger.failed(first.id, "env_lost")
    (again,) = ledger.lease("b", 1, Kind.RL, 1.0)
    assert (again.id, again.attempt, again.seed, again.actor) == (first.id, 2, seed, "b")
    ledger.failed(again.id, "env_lost")
    assert again.state is State.FAILED
    assert all(r.id != first.id for r in ledger.lease("b", 100, Kind.RL, 2.0))


def test_an_expired_lease_is_issued_again_and_the_old_attempt_superseded():
    ledger = make()
    (rollout,) = lease(ledger, 1)
    assert ledger.expire(9.9) == []
    assert ledger.expire(10.0) == [rollout]
    assert ledger.standing(rollout.id, 1) is Standing.EXPECTED  # nobody has begun it again
    ledger.lease("b", 1, Kind.RL, 11.0)
    assert ledger.standing(rollout.id, 1) is Standing.SUPERSEDED
    assert ledger.standing(rollout.id, 2) is Standing.EXPECTED
    assert ledger.standing(rollout.id, 3) is Standing.UNKNOWN
    ledger.expire(30.0)
    assert (rollout.state, rollout.reason) == (State.FAILED, "lease_expired")


def test_renew_extends_and_names_what_to_stop():
    ledger = make()
    one, two, three = lease(ledger, 3)
    assert ledger.renew("a", [(one.id, 1), (two.id, 1)], 8.0) == []
    ledger.expire(15.0)  # three was not renewed
    assert [one.state, two.state, three.state] == [State.LEASED, State.LEASED, State.PENDING]
    assert ledger.renew("a", [(three.id, 1)], 16.0) == []  # back before anybody else took it
    assert three.state is State.LEASED
    deliver(ledger, one)
    assert ledger.renew("a", [(one.id, 1)], 16.0) == []  # delivered, the acknowledgement is under way
    assert ledger.renew("b", [(two.id, 1), (two.id, 2), ("1-g999999-0", 1)], 16.0) == [
        (two.id, 1),
        (two.id, 2),
        ("1-g999999-0", 1),
    ]
    ledger.cancel(Kind.RL)
    assert ledger.renew("a", [(two.id, 1)], 16.0) == [(two.id, 1)]


def test_077_standing_of_repeated_and_foreign_deliveries():
    ledger = make(max_attempts=1)
    one, two = lease(ledger, 2)
    deliver(ledger, one)
    assert ledger.standing(one.id, 1) is Standing.DUPLICATE
    assert ledger.standing(two.id, 0) is Standing.UNKNOWN
    assert ledger.standing("1-g000099-0", 1) is Standing.UNKNOWN
    assert ledger.standing("no such id", 1) is Standing.UNKNOWN
    ledger.failed(two.id, "x")  # ends the group: one is filtered, two failed
    assert not ledger.holds(one.id)
    assert ledger.standing(one.id, 1) is Standing.DUPLICATE
    assert ledger.standing(one.id, 7) is Standing.SUPERSEDED


def test_memory_stays_bounded_and_old_ids_stay_known():
    ledger = make(group_size=1, groups_per_update=64, updates=10**6, max_attempts=1)
    first, total = "", 0
    while total <= FINISHED_MEMORY + 256:
        for rollout in lease(ledger, 128):
            first = first or rollout.id
            ledger.failed(rollout.id, f"reason {total}")
            total += 1
    assert len(ledger._finished) == FINISHED_MEMORY
    assert len(ledger._rollouts) == 0 == len(ledger.groups)
    assert sum(ledger.reasons(Kind.RL)["failed"].values()) == total
    assert len(ledger.reasons(Kind.RL)["failed"]) <= 65
    assert ledger.standing(first, 1) is Standing.SUPERSEDED  # forgotten in detail, but known to be over


# ---- kinds -------------------------------------------------------------------------------------------------


def test_warm_groups_are_single_have_no_lag_and_their_own_capacity():
    ledger = make(warm_updates=2, warm_rollouts=3)
    assert ledger.capacity(Kind.WARM) == 6
    leased = lease(ledger, kind=Kind.WARM)
    assert [r.id for r in leased] == [f"1-w{i:06d}-0" for i in range(6)]
    for rollout in leased:
        ledger.delivered(rollout.id, (), ("f", 0))
    ledger.update = 50
    assert len(ledger.take(Kind.WARM)) == 3
    ledger.commit()
    assert (ledger.warm_update, ledger.update, ledger.capacity(Kind.WARM)) == (1, 50, 0)
    ledger.take(Kind.WARM)
    ledger.commit()
    assert ledger.capacity(Kind.WARM) == 0
    assert ledger.counts(Kind.WARM)["trained"] == 6


def test_097_evaluation_touches_neither_capacity_nor_seeds_nor_batches():
    plain, mixed = make(), make()
    for i in range(5):
        mixed.open(Kind.EVAL, TASK, "eval", "toy", f"h{i}", "greedy")
    assert plain.capacity(Kind.RL) == mixed.capacity(Kind.RL)
    a, b = lease(plain), lease(mixed)
    assert [(r.id, r.seed) for r in a] == [(r.id, r.seed) for r in b]
    for rollout in mixed.lease("a", 5, Kind.EVAL, 0.0):
        deliver(mixed, rollout)
    assert mixed.take(Kind.RL) == []
    assert mixed.counts(*TRAINING) == plain.counts(*TRAINING)
    assert mixed.counts(Kind.EVAL)["evaluated"] == 5
    with pytest.raises(ValueError, match="outside capacity"):
        mixed.capacity(Kind.EVAL)


def test_078_every_member_of_every_group_has_its_own_seed_whoever_runs_it():
    def seeds(actors: int, run_seed: int = 7, ordinal: int = 0) -> dict[str, int]:
        ledger = make(group_size=4, groups_per_update=4, max_lag=0, seed=run_seed)
        ledger._opened[Kind.RL, "toy"] = ordinal
        for _ in range(4):
            ledger.open(Kind.RL, TASK)
        out = {}
        for i in range(16):
            (rollout,) = ledger.lease(f"a{i % actors}", 1, Kind.RL, 0.0)
            out[rollout.id] = rollout.seed
        return out

    two = seeds(2)
    assert len(set(two.values())) == 16
    assert seeds(4) == two == seeds(2)
    assert not set(two.values()) & set(seeds(2, ordinal=4).values())  # later groups
    assert not set(two.values()) & set(seeds(2, run_seed=8).values())


def test_039_groups_are_minted_when_scheduled_even_for_equal_tasks():
    ledger = make()
    one, two = ledger.open(Kind.RL, TASK), ledger.open(Kind.RL, TASK)
    assert one.id != two.id
    assert {r.group_id for r in one.rollouts} == {one.id}
    assert len({r.id for g in (one, two) for r in g.rollouts}) == 4


# ---- updates and checkpoints --------------------------------------------------------------------------------


def test_an_abandoned_update_is_filtered_and_not_counted_as_done():
    ledger = make()
    filled(ledger)
    ledger.take(Kind.RL)
    assert ledger.abandon("non_finite") == 4
    assert ledger.update == 0
    assert ledger.reasons(Kind.RL) == {"filtered": {"non_finite": 4}}
    assert ledger.capacity(Kind.RL) == 2


def test_restore_keeps_what_waits_and_issues_again_what_was_leased():
    ledger = make()
    ledger.open(Kind.EVAL, TASK, "eval")
    leased = lease(ledger)
    for rollout in leased[:5]:
        deliver(ledger, rollout)
    ledger.take(Kind.RL)
    saved = json.loads(json.dumps(ledger.state()))
    later = lease(ledger)  # the lost timeline goes on
    ledger.renew("a", [(leased[5].id, 1)], 5.0)

    restored = Ledger(rules(), 2)
    restored.restore(saved)
    assert restored.counts(Kind.RL) == {**ledger.counts(Kind.RL), "open": 8, "dispatched": 8}
    assert later == []
    assert restored.counts(Kind.EVAL)["cancelled"] == 1
    states = {r.id: r.state for r in restored.rollouts(Kind.RL)}
    assert [states[r.id] for r in leased] == [State.WAITING] * 5 + [State.PENDING] * 3
    assert restored.renew("a", [(leased[5].id, 1)], 5.0) == [(leased[5].id, 1)]
    assert restored.standing(leased[5].id, 1) is Standing.SUPERSEDED
    (again,) = restored.lease("b", 1, Kind.RL, 0.0)
    assert (again.id, again.seed, again.tries) == (leased[5].id, leased[5].seed, 1)
    assert again.attempt > rules().max_attempts  # never met by an attempt of the lost timeline
    assert restored.open(Kind.RL, TASK).id == "2-g000004"
    assert len(restored.take(Kind.RL)) == 2
    assert restored.standing("1-g000050-1", 1) is Standing.SUPERSEDED  # of the lost timeline
