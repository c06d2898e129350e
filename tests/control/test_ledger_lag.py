"""How old tokens may be: lag by version and by pool, and what becomes of rollouts that are over age."""

from __future__ import annotations

import json

import pytest

from learner.ledger import Ledger
from learner.rollouts import Kind, Origin, Standing, State
from tests.control.scripted import rules
from tests.control.test_ledger import deliver, lease, make


def at_update(ledger: Ledger, update: int) -> None:
    for version in range(2, update + 2):
        ledger.published(version, version - 1)
    ledger.update = update


def test_068_staleness_is_measured_when_the_batch_leaves():
    """Versions 3 and 4 hold updates 3 and 4. Used by update 9 with max_lag 4: lags 6 and 5, although only one version passed
    in flight. A token of version 5 has lag exactly 4 and is kept."""
    for newest, kept in ((4, False), (5, True)):
        ledger = Ledger(rules(max_lag=4), 1)
        for version in range(1, 10):
            ledger.published(version, version)
        ledger.update = 3
        rollouts = lease(ledger, 4)
        for rollout in rollouts:
            deliver(ledger, rollout, 3, newest)
        ledger.update = 9
        assert bool(ledger.take(Kind.RL)) is kept
        assert (rollouts[0].state is State.STALE) is not kept


def test_068_only_the_stale_rollout_leaves_not_its_group():
    ledger = make(max_lag=1)
    one, two, three, four = lease(ledger, 4)
    deliver(ledger, one, 1)
    at_update(ledger, 2)
    for rollout in (two, three, four):
        deliver(ledger, rollout, 2, 3)  # lags 1 and 0
    groups = ledger.take(Kind.RL)
    assert [r.state for r in groups[0].rollouts] == [State.STALE, State.TRAINING]
    assert [r.id for r in groups[0].scored] == [one.id, two.id]  # its reward stays in the statistics
    ledger.commit()
    counts = ledger.counts(Kind.RL)
    assert (counts["stale"], counts["trained"]) == (1, 3)


def test_069_lag_zero_means_one_policy_and_ten_updates_are_lag_ten():
    ledger = make(max_lag=0, on_stale="drop")
    at_update(ledger, 1)
    one, two, three, four = lease(ledger, 4)
    deliver(ledger, one, 2)
    deliver(ledger, two, 1, 2)  # spans an update
    deliver(ledger, three, 2)
    deliver(ledger, four, 2)
    ledger.take(Kind.RL)
    assert [r.state for r in (one, two, three)] == [State.TRAINING, State.STALE, State.TRAINING]
    assert make().lag(1) == 0
    ledger.update = 10
    assert ledger.lag(1) == 10
    assert ledger.lag(77) > 10**8  # never published


def test_079_restart_issues_over_age_rollouts_again_until_attempts_run_out():
    ledger = make(max_lag=0, on_stale="restart")
    rollouts = lease(ledger, 4)
    for rollout in rollouts:
        deliver(ledger, rollout, 1)
    at_update(ledger, 1)
    assert ledger.take(Kind.RL) == []
    assert {r.state for r in rollouts} == {State.PENDING}
    assert ledger.standing(rollouts[0].id, 1) is Standing.DUPLICATE
    for rollout in ledger.lease("a", 4, Kind.RL, 1.0):
        deliver(ledger, rollout, 1)
    ledger.purge()
    assert {r.state for r in rollouts} == {State.STALE}
    assert ledger.reasons(Kind.RL) == {"stale": {"lag": 4}}


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_the_lag_bound_of_a_token_is_that_of_its_pool(on_stale):
    """Main's bound is 1, the stale pool's 4. At update 4, version 1 has lag 4, version 2 lag 3, version 4 lag 1."""
    ledger = make(max_lag=1, stale_max_lag=4, on_stale=on_stale)
    at_update(ledger, 4)
    one, two, three, four = rollouts = lease(ledger, 4)
    deliver(ledger, one, stale=(1,))
    deliver(ledger, two, 2)
    deliver(ledger, three, 2, stale=(1,))
    deliver(ledger, four, 4, stale=(2,))
    ledger.take(Kind.RL)
    mixed = State.TRAINING if on_stale == "mask" else State.STALE  # its token of main is over-age
    assert [r.state for r in rollouts] == [State.TRAINING, State.STALE, mixed, State.TRAINING]
    assert not ledger.live(Origin(1, "main"))
    ledger.abandon("later")
    ledger.update = 5
    assert not ledger.live(Origin(1, "stale"))


def test_origins_survive_a_checkpoint():
    ledger = make(stale_max_lag=4)
    at_update(ledger, 3)
    for rollout in lease(ledger, 2):
        deliver(ledger, rollout, 4, stale=(2,))
    again = Ledger(ledger.rules, 2)
    again.restore(json.loads(json.dumps(ledger.state())))
    delivered = [r for r in again.rollouts(Kind.RL) if r.state is State.WAITING]
    assert [r.origins for r in delivered] == [(Origin(4, "main"), Origin(2, "stale"))] * 2
    again.update = 6  # 4 is of update 3 and over-age, 2 is of update 1: lag 5 > 4
    assert {r.id for r in again.purge()} == {r.id for r in delivered}
    again = Ledger(ledger.rules, 3)
    again.restore(json.loads(json.dumps(ledger.state())))
    again.update = 5  # lag 4: live where the pool is remembered
    assert again.purge() == []
