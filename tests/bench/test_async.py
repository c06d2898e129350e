"""The benchmark of asynchrony: its chances and its simulation against numbers made by hand, and a small real run."""

from __future__ import annotations

import math
import multiprocessing

import numpy as np
import pytest

from common.validate import check
from tools import standins
from tools.bench_async import ARMS, CAP, MEDIAN_S, TABLES, TOKENS, Durations, Outcome, played, print_table, row, run, simulate
from tools.bench_ingest import answer, turns

ARM = {arm.name: arm for arm in ARMS}
ONE = Durations("one second", lambda u: 1.0, 1.0)
BATCH = 64  # rollouts


def test_durations_have_the_median_and_the_mean_that_they_say():
    """lognormal: 0.2 exp(1/2) = 0.3297. Pareto: its least is 0.2 / 2^(2/3) = 0.12599; without a cap the mean is 3 * 0.12599 =
    0.37798, and the cap at 10 s takes ∫ from 10 of (0.12599 / x)^1.5 dx = 2 * 0.12599^1.5 / sqrt(10) = 0.02828."""
    lognormal, pareto = TABLES["lognormal"], TABLES["pareto"]
    assert lognormal.mean == pytest.approx(0.3297, abs=5e-5)
    assert pareto.mean == pytest.approx(0.37798 - 0.02828, abs=5e-5)
    for table in (lognormal, pareto):
        assert table.quantile(0.5) == pytest.approx(MEDIAN_S)
        quantiles = [table.quantile((k + 0.5) / 200_000) for k in range(200_000)]
        assert table.mean == pytest.approx(sum(quantiles) / len(quantiles), rel=2e-3)
    assert pareto.quantile(1 - 1e-9) == CAP * MEDIAN_S
    assert lognormal.quantile(0.8413447) == pytest.approx(MEDIAN_S * math.e, rel=1e-5)  # one sigma


def test_the_arms_are_those_of_the_table():
    assert {arm.name: arm.max_lag for arm in ARMS} == {"sync": 0, "one_ahead": 1, "lag1": 1, "lag2": 2, "lag4": 4}


def test_a_duration_is_its_seeds_and_an_update_takes_what_the_slots_need_for_a_batch():
    table = TABLES["lognormal"]
    assert table.of(7) == table.of(7) != table.of(8)
    assert table.update_s == pytest.approx(table.mean * 64 / 64)


def leased(tmp_path):
    control = ARM["lag1"].control(tmp_path)
    standins.publish(control, 1, 0)
    control.start_rl()
    return control.lease("actor-0", 1).assignments[0]


def test_every_token_has_the_version_of_its_moment(tmp_path):
    """From 0.5 s on for 2 s: token k stands at 0.5 + (k + 1) / 16 s. Version 2 is served from 1 s on (k = 7), 3 from 2.5 (31)."""
    asked = leased(tmp_path)
    made = played(asked, 0.5, 2.0, [0.0, 1.0, 2.5, np.inf])
    assert [(run.start, run.version) for run in made.steps[0].versions] == [(0, 1), (7, 2), (TOKENS - 1, 3)]
    check(made, standins.VOCABULARY, {1, 2, 3})
    assert (made.rollout_id, made.group_id, made.sampling) == (asked.rollout_id, asked.group_id, asked.sampling)


def test_a_barrier_alternates_and_one_ahead_overlaps():
    """Every rollout and every update takes 1 s. sync: 2 s an update, each side idle for half of it. One ahead: after the first
    batch, 1 s an update; each later batch begins with the update before it, whose weights come with its last token."""
    sync, ahead = simulate(ARM["sync"], ONE, 4), simulate(ARM["one_ahead"], ONE, 4)
    assert (sync.seconds, sync.rollouts, sync.live) == (8.0, 4 * BATCH, 4 * BATCH)
    assert (sync.slots_idle, sync.learner_idle) == (0.5, 0.5)
    assert sync.lags == {0: 4 * BATCH * TOKENS}
    assert sync.rate == 32.0
    assert ahead.seconds == 5.0
    assert (ahead.slots_idle, ahead.learner_idle) == (0.0, pytest.approx(0.2))  # the learner waits for the first batch alone
    assert ahead.lags == {0: BATCH * TOKENS + 3 * BATCH, 1: 3 * BATCH * (TOKENS - 1)}


def test_one_ahead_waits_for_stragglers_where_the_ledger_goes_on():
    """Rollouts take 1 or 3 s, an update 2 s, and every batch has one of 3 s: 3 s an update, and 2 for the last. With rare long
    ones, the same bound on lag brings more where nobody waits for the whole batch."""
    table = Durations("two kinds", lambda u: 1.0 if u < 0.5 else 3.0, 2.0)
    assert simulate(ARM["sync"], table, 6).seconds == 6 * 5
    assert simulate(ARM["one_ahead"], table, 6).seconds == 6 * 3 + 2
    assert simulate(ARM["lag2"], table, 6).seconds < 6 * 3 + 2
    rare = Durations("a few long ones", lambda u: 1.0 if u < 0.97 else 6.0, 1.15)
    assert simulate(ARM["lag1"], rare, 6).seconds < simulate(ARM["one_ahead"], rare, 6).seconds


@pytest.mark.parametrize("arm", ARMS, ids=[arm.name for arm in ARMS])
def test_no_simulated_token_is_trained_beyond_the_bound(arm):
    out = simulate(arm, TABLES["pareto"], 6)
    assert (out.updates, out.rollouts) == (6, 6 * BATCH)
    assert out.max_lag <= arm.max_lag
    assert out.lags.total() <= out.live * TOKENS
    assert out.live <= out.rollouts


def test_a_real_arm_trains_what_its_ideal_trains(capsys):
    """Two updates over the wire. Every number of the table comes out, and the actor is gone."""
    real, ideal = run(ARM["lag2"], TABLES["lognormal"], 2), simulate(ARM["lag2"], TABLES["lognormal"], 2)
    assert (real.updates, real.rollouts) == (ideal.updates, ideal.rollouts) == (2, 2 * BATCH)
    assert real.max_lag <= 2
    assert BATCH <= real.live <= 2 * BATCH
    assert 0 < real.slots_idle < 1
    assert 0 <= real.learner_idle < 1
    assert multiprocessing.active_children() == []
    sync = Outcome(TABLES["lognormal"], 2, 128, 128, 1.0, 2 * real.seconds), Outcome(TABLES["lognormal"], 2, 128, 128, 1.0, 3.0)
    found = row(ARM["lag2"], real, ideal, sync)
    assert found["speedup"] == pytest.approx(2.0)
    assert found["ideal_speedup"] == pytest.approx(3.0 / ideal.seconds)
    assert found["fraction_of_ideal"] == pytest.approx(ideal.seconds / real.seconds)
    print_table(TABLES["lognormal"], {"sync": found, "lag2": found})
    assert "| lag2 | " in capsys.readouterr().out


def test_trajectories_of_bench_ingest_are_valid_and_as_long_as_asked(tmp_path):
    made = answer(leased(tmp_path), turns(1003, 0))
    check(made, standins.VOCABULARY, {1})
    last = made.steps[-1]
    assert last.prefix_len + len(last.context_ids) + len(last.action_ids) == 1003
