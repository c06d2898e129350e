"""Runs in one process and the trials on them: what they play is what the wire brings, lag is what it is said to be, finished
trials stay, and the numbers of the tables are the right ones."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from flax import nnx

from actors.conversation import conversation
from actors.rollout import run_rollout
from common.config import RunConfig
from common.record import segments
from common.types import EngineInfo, Status
from common.validate import check
from common.waits import Wait
from envserver.domains import load_domain
from learner.model import hf
from learner.report import Report
from learner.rows import Rollout
from learner.serving.api import Served, Server
from learner.update import Trainer
from tests.actors.servers import env_server, parts_of
from tests.learner_math.build import chain, rollout
from tools import bench_curriculum
from tools.bench_algorithms import ARMS, LAGS, WRONG, ThroughAnswers, arms_of, table, through_answers
from tools.inprocess import ENGINE, REFILLS, LocalRun, Site, engine_shape
from tools.trials import BASE, Arm, Trials, area, config_of, merged, paired

TINY = merged(
    BASE,
    {
        "model": {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
        "domains": [{"train_tasks": 16, "heldout_tasks": 8, "limits": {"max_turns": 6}}],
        "engine": {"slots": 4, "prefill_slots": 2, "widths": [256]},
        "algorithm": {"groups_per_update": 2, "group_size": 2},
        "learner": {"updates": 2, "rows_per_microbatch": 2},
        "eval": {"tasks": 4},
        "warm": {"updates": 1, "rollouts_per_update": 2, "target_loss": 100.0, "target_success": 0.0},
    },
)
GRPO = {"algorithm": {"preset": "grpo", "entropy": 0.01}}  # weights move although nothing succeeds


def tiny(tables=GRPO, seed: int = 1) -> RunConfig:
    return config_of(tables, seed, TINY)


@pytest.fixture(scope="module")
def site():
    with Site(tiny()) as site:
        yield site


@pytest.fixture(scope="module")
def weights(site):
    """Of a policy that ends a turn after a few tokens, so that rollouts have several: hidden states share a
    direction, along which lies the end token's row of the head. Other logits are far from uniform, too."""
    end = conversation(site.files, tiny().chat).end_id

    def changed(place, value):
        value = 4 * value
        if place == ("embedding",):
            value += 0.5
        if place == ("head", "kernel"):
            value[:, end] = 0.12
        return value

    flat = nnx.to_flat_state(hf.random_state(site.spec, 3))
    return nnx.from_flat_state([(place, nnx.Param(changed(place, variable[...]))) for place, variable in flat])


@pytest.fixture(scope="module")
def built(site, weights):
    """Compiled once. (One that has trained at a lag keeps policies by version, and versions begin anew in every run.)"""
    trainer = Trainer(tiny(), site.spec, weights)
    return trainer, trainer.state_tree()


@pytest.fixture
def fresh(built):
    """A trainer as it was built."""
    trainer, start = built

    def made():
        trainer.restore_tree(start)
        return trainer

    return made


def tokens(trajectory):
    return [(step.context_ids.tolist(), step.action_ids.tolist(), step.reward, step.finish) for step in trajectory.steps]


def logprobs(trajectory):
    return np.concatenate([step.action_logprobs for step in trajectory.steps])


# ---- what is played ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine_server(site, tensors, version):
    """The same engine behind HTTP, on loopback."""
    places = [place for place, _ in nnx.to_flat_state(hf.abstract_state(site.spec))]
    params = hf.on_device({place: tensors[hf.hf_name(place)] for place in places}, "float32")
    served = Served(site.spec, (), engine_shape(tiny().engine), "float32", "", "auto", str(version))
    server = Server(hf.build_stored(site.spec, params, "float32"), served)
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.start()
    try:
        host, port = runner.addresses[0][:2]
        yield EngineInfo(ENGINE, f"http://{host}:{port}", "main", version, "ready")
    finally:
        await runner.cleanup()
        server.close()


async def over_the_wire(site, config, assigned, tensors):
    """The rollouts of `assigned`, by actors that reach engine and environments over HTTP and gRPC."""
    domain = load_domain("frozenlake", config.domains[0].options, "")
    async with env_server(domain) as envs, engine_server(site, tensors, 1) as engine:
        addresses = {"frozenlake": [f"127.0.0.1:{envs.port}"]}
        async with parts_of(conversation(site.files, config.chat), site.vocabulary, addresses, [engine]) as parts:
            return await asyncio.gather(*[run_rollout(a, parts, Wait()) for a in assigned])


def test_rollouts_are_those_of_actors_over_the_wire(site, fresh):
    """Same assignments, same weights: same ids, same rewards, the engine's logprobs but for rounding."""
    config = tiny()
    with LocalRun(site, config, fresh()) as run:
        run.control.start_rl()
        assigned = run.control.lease("actor-0", 4096).assignments
        here = site.play(assigned)
        there = asyncio.run(over_the_wire(site, config, assigned, run.tensors))
    assert len(here) == 4
    for own, other in zip(here, there, strict=True):
        check(own, site.vocabulary, {1})
        assert tokens(own) == tokens(other)
        assert [step.versions for step in own.steps] == [step.versions for step in other.steps]
        assert (own.rollout_id, own.status, own.flags) == (other.rollout_id, other.status, other.flags)
        np.testing.assert_allclose(logprobs(own), logprobs(other), atol=1e-5)
    assert len({json.dumps(tokens(own)[0][1]) for own in here}) > 1  # they are different rollouts
    assert max(len(own.steps) for own in here) > 2


def test_a_run_repeats_itself_bit_for_bit(site, fresh):
    """More rollouts than play at one time."""
    config = tiny({**GRPO, "learner": {"max_lag": 1}})
    found = []
    for _ in range(2):
        with LocalRun(site, config, fresh()) as run:
            run.control.start_rl()
            found.append(run.fill())
            run.train()
            found[-1].append(run.trainer.state_tree())
    (*first, before), (*second, after) = found
    assert len(first) == 8
    assert [tokens(t) for t in first] == [tokens(t) for t in second]
    assert all(logprobs(a).tobytes() == logprobs(b).tobytes() for a, b in zip(first, second, strict=True))
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


# ---- lag -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_every_token_is_exactly_as_old_as_the_lag(site, weights, lag):
    """Version v holds v - 1 updates. Update u trains on tokens of version u + 1 - min(u, lag), and on no others."""
    config = tiny({**GRPO, "learner": {"max_lag": lag, "updates": 5}})
    with LocalRun(site, config, Trainer(config, site.spec, weights)) as run:
        run.control.start_rl()
        for update in range(5):
            for played in run.fill():
                check(played, site.vocabulary, run.control.ledger.versions)
                assert {r.version for step in played.steps for r in step.versions} == {update + 1}
            batch, metrics = run.train()
            versions = {r.version for t in batch.trajectories for step in t.steps for r in step.versions}
            assert versions == {update + 1 - min(update, lag)}
            assert (batch.lag.mean, batch.lag.max) == (min(update, lag), min(update, lag))
            assert all(mask.all() for masks in batch.live.values() for mask in masks)
            assert metrics["gap_mean"] < 1e-5
        assert run.control.counts()["trained"] == run.control.counts()["dispatched"] == 5 * 4


# ---- trials --------------------------------------------------------------------------------------------------------


def test_a_trial_of_two_updates_is_made_once(site, tmp_path):
    trials = Trials(site, tmp_path, TINY)
    arm = Arm("grpo-lag1", {**GRPO, "learner": {"max_lag": 1}})
    made = trials.run(arm, 1, budget=8)
    assert [(point["rollouts"], point["update"]) for point in made["curve"]] == [(0, 0), (4, 1), (8, 2)]
    assert made["lags"] == [[0.0, 0], [1.0, 1]]
    assert made["curve"][-1]["played"] == 8
    assert 8 <= made["curve"][-1]["turns"] <= 48
    assert made["curve"][0]["success"] == trials.warm_start(1)["success"]
    assert Trials(site, tmp_path, TINY).run(arm, 1, budget=8) == made
    changed = trials.run(replace(arm, tables={**GRPO, "optimizer": {"lr": 1e-4}}), 1, budget=0)
    assert (changed["key"] != made["key"], changed["lags"]) == (True, [])


def test_a_rollout_that_fails_ends_the_run(site, fresh):
    """No reference is done in one turn: a run that tried again would never end."""
    config = tiny({**GRPO, "domains": [{"limits": {"max_turns": 1}}]})
    with LocalRun(site, config, fresh()) as run:
        run.control.start_warm()
        with pytest.raises(RuntimeError, match="does not solve it in 1 turns"):
            run.fill()


def test_a_selection_that_finds_nothing_ends_the_run(site, fresh):
    """A policy that never succeeds: every group has equal rewards, and makes room for another."""
    config = tiny({**GRPO, "tasks": {"select": "signal", "max_refills": 100}, "domains": [{"limits": {"max_turns": 1}}]})
    with LocalRun(site, config, fresh()) as run:
        run.control.start_rl()
        with pytest.raises(RuntimeError, match="selection leaves too few groups"):
            run.fill()
        assert run.control.reasons() == {"filtered": {"no_signal": 4 * REFILLS}}


def test_every_arm_has_a_configuration():
    arms = arms_of(list(ARMS), LAGS)
    assert len(arms) == 5 * 3 + 1
    for (name, lag), arm in arms.items():
        config = config_of(arm.tables, 1)
        drawn = config.algorithm.groups_per_update / (0.25 if name == "starpo_s" else 1)
        assert (config.learner.max_lag, drawn * config.algorithm.group_size) == (lag, 64)
    assert config_of(arms[WRONG.name, 0].tables, 1) == config_of(arms["ppo", 0].tables, 1)
    assert {key for key, arm in arms.items() if arm.trainer is not Trainer} == {(WRONG.name, 0)}
    for each in (*bench_curriculum.BUDGETS, *bench_curriculum.TASKS):
        config_of(each.tables, 1)


# ---- GAE through the environment's tokens --------------------------------------------------------------------------


def two_turns(status=Status.TERMINATED, after=0.0):
    """Two tokens of the policy, two of the environment, two of the policy; reward 1 at the end."""
    made = rollout(chain([([1], [2, 3], 0.0), ([4, 5], [6, 7], 1.0)]), status=status)
    (segment,) = segments(made)
    return Rollout(made, [segment], [segment.mask], [np.array([9.0, 0.1, 0.2, 0.9, -0.5, 0.4, 0.6])], after)


def test_credit_through_answers_decays_at_their_tokens_and_takes_their_values():
    """γ .99, λ .95, so γλ .9405, from the right: .4; .194 + .9405·.4 = .5702; (.396 + .5) + .9405·.5702 = 1.432273; (-.495 - .9)
    + .9405·1.432273 = -.047947; (.891 - .2) + .9405·(-.047947) = .645906; (.198 - .1) + .9405·.645906 = .705474."""
    gains, returns = through_answers(two_turns(), 0.99, 0.95)
    np.testing.assert_allclose(gains, [0, 0.705474, 0.645906, 0, 0, 0.5702, 0.4], atol=1e-6)
    np.testing.assert_allclose(returns, [0, 0.805474, 0.845906, 0, 0, 0.9702, 1.0], atol=1e-6)


def test_credit_through_answers_goes_on_at_the_critics_value_where_a_rollout_was_cut():
    """The last token: 1 + .99·.5 - .6."""
    gains, _ = through_answers(two_turns(Status.TRUNCATED, 0.5), 0.99, 0.95)
    assert gains[-1] == pytest.approx(0.895)


def test_without_decay_it_is_the_right_credit():
    """γ = λ = 1: the reward less the token's value."""
    gains, _ = through_answers(two_turns(), 1.0, 1.0)
    np.testing.assert_allclose(gains, [0, 0.9, 0.8, 0, 0, 0.6, 0.4], atol=1e-6)


def test_an_update_with_it_has_other_advantages_whitened_over_the_policys_tokens(site, weights):
    config = tiny({"algorithm": {"preset": "ppo"}})
    trainer = ThroughAnswers(config, site.spec, weights)
    tree = trainer.state_tree()
    kernel = tree["params/value_head/kernel"]  # 0 at first, as are all rewards here
    trainer.restore_tree(tree | {"params/value_head/kernel": np.linspace(-1, 1, len(kernel), dtype=np.float32)})
    with LocalRun(site, config, trainer) as run:
        run.control.start_rl()
        run.fill()
        batch = run.take()
        right, wrong = (
            [e for group in prepare(trainer, batch.groups, batch.live, Report())[2] for e in group]
            for prepare in (Trainer.prepare, ThroughAnswers.prepare)
        )
    for own, other in zip(right, wrong, strict=True):
        assert np.array_equal(own.mask, other.mask)
        assert not np.allclose(own.advantages, other.advantages)
        assert not other.advantages[~other.mask].any()
    both = np.concatenate([e.advantages[e.mask] for e in wrong])
    assert both.mean() == pytest.approx(0, abs=1e-5)
    assert both.std() == pytest.approx(1, abs=1e-2)


# ---- statistics ----------------------------------------------------------------------------------------------------


def result(*successes, step=10, greedy=0.5):
    curve = [{"rollouts": step * i, "update": i, "success": s} for i, s in enumerate(successes)]
    return {"curve": curve, "greedy": greedy, "cpu_seconds": 30.0, "commit": "c"}


def test_the_area_is_by_trapezoids_and_differences_are_by_seed():
    """(.2 + .4)/2 and (.4 + .8)/2 over two equal steps: .45. A step three times as long counts three times: (.3 + 3·.6)/4."""
    assert area(result(0.2, 0.4, 0.8)) == pytest.approx(0.45)
    uneven = result(0.2, 0.4, 0.8)
    uneven["curve"][-1]["rollouts"] = 40
    assert area(uneven) == pytest.approx(0.525)
    ours, theirs = {1: result(0.0, 1.0), 2: result(0.0, 0.6)}, {2: result(0.0, 0.2), 3: result(0.0, 0.0)}
    assert paired(ours, theirs, area) == [pytest.approx(0.2)]


def test_the_table_has_intervals_and_what_lag_costs():
    """Areas .5 and .7 at lag 0, .4 and .5 at lag 8: differences -.1 and -.2, mean -.15, and half a t-interval of two is 12.706·
    .0707/√2 = .635."""
    found = {
        ("ppo", 0): {1: result(0.5, 0.5), 2: result(0.7, 0.7)},
        ("ppo", 8): {1: result(0.4, 0.4), 2: result(0.5, 0.5)},
        (WRONG.name, 0): {1: result(0.6, 0.6), 2: result(0.7, 0.7)},
    }
    rows, measurements = table(found)
    assert measurements["ppo_lag8_area_less_lag0"] == pytest.approx(-0.15)
    assert measurements["ppo_lag8_area_less_lag0_low"] == pytest.approx(-0.785, abs=1e-3)
    assert measurements["through_answers_less_ppo_area"] == pytest.approx(0.05)
    assert "| ppo | 8 | 2 | 0.450 " in rows[3]
    rows, measurements = bench_curriculum.table(
        [Arm("a"), Arm("b")],
        {name: {1: with_cost(r)} for name, r in (("a", result(0.2, 0.2)), ("b", result(0.5, 0.5)))},
    )
    assert measurements["b_area_more"] == pytest.approx(0.3)
    assert measurements["b_turns"] == 40


def with_cost(found):
    found["curve"][-1] |= {"turns": 40, "tokens": 160, "update": 1}
    return found
