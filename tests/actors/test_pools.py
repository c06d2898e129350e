"""Cross-policy sampling: which pool of engines samples which turn, and what the record says of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from actors.rollout import run_rollout
from common.seeds import turn_uses_stale_pool
from common.types import Assignment, EngineInfo, Finish, VersionRun
from common.waits import Wait
from learner.assignments import origins_of
from learner.rollouts import Origin
from tests.actors.servers import ScriptedDomain, answer, assignment, env_server, toy_parts, turns
from tests.fakes import DROP, Answer, FakeEngine
from tests.processes import eventually

TURNS = 6
PLAN = turns(*[[5, 2]] * TURNS)


def test_a_share_of_the_turns_uses_the_stale_pool_and_which_is_certain() -> None:
    """20,000 turns: the standard deviation of a binomial's share is at most sqrt(0.25 / 20000) = 0.0035; five of them."""
    for share in (0.1, 0.25, 0.6):
        chosen = [turn_uses_stale_pool(seed, turn, share) for seed in range(2_000) for turn in range(10)]
        assert abs(sum(chosen) / len(chosen) - share) < 5 * 0.0035
        assert chosen == [turn_uses_stale_pool(seed, turn, share) for seed in range(2_000) for turn in range(10)]
    assert not any(turn_uses_stale_pool(seed, 0, 0.0) for seed in range(2_000))


def cross_policy(share: float = 0.5, seed: int = 7, count: int = TURNS) -> Assignment:
    work = assignment(["he"] * (count - 1) + ["done"])
    return replace(work, stale_share=share, sampling=replace(work.sampling, seed=seed))


def table(*engines: tuple[FakeEngine, str, int]) -> list[EngineInfo]:
    """Ready, of (engine, pool, version)."""
    for engine, _, version in engines:
        engine.weight_version = str(version)
    return [EngineInfo(f"engine-{n}", e.url, pool, version, "ready") for n, (e, pool, version) in enumerate(engines)]


async def play(work: Assignment, engines: list[EngineInfo]):
    async with env_server(ScriptedDomain()) as server, toy_parts([f"127.0.0.1:{server.port}"], engines) as parts:
        return await run_rollout(work, parts, Wait())


async def test_held_out_rollouts_go_to_the_engine_that_is_held_for_them_and_nobody_else_does() -> None:
    """Where none is, they go where the others go. The held engine may be away for a while: then they wait for it."""
    with FakeEngine(reply=PLAN) as new, FakeEngine(reply=PLAN) as held:
        engines, work = table((new, "main", 9), (held, "eval", 4)), cross_policy(0.0)
        held_out = replace(work, purpose="eval")
        assert origins_of(await play(held_out, engines)) == (Origin(4, "eval"),)
        assert origins_of(await play(work, engines)) == (Origin(9, "main"),)
        assert origins_of(await play(held_out, engines[:1])) == (Origin(9, "main"),)
        wait = Wait()
        async with env_server(ScriptedDomain()) as server, toy_parts([f"127.0.0.1:{server.port}"], engines) as parts:
            parts.engines.places.update([engines[0], replace(engines[1], state="starting")])
            playing = asyncio.create_task(run_rollout(held_out, parts, wait))
            await eventually(lambda: (wait.name, wait.on) == ("engine.ready", "engines of eval"))
            parts.engines.places.update(engines)
            assert origins_of(await playing) == (Origin(4, "eval"),)


def drawn(work: Assignment, count: int = TURNS) -> list[str]:
    return ["stale" if turn_uses_stale_pool(work.sampling.seed, n, work.stale_share) else "main" for n in range(count)]


async def test_the_record_says_which_pool_version_and_engine_sampled_which_token() -> None:
    with FakeEngine(reply=PLAN) as new, FakeEngine(reply=PLAN) as old:
        work = cross_policy()
        record = await play(work, table((new, "main", 9), (old, "stale", 4)))
    pools = drawn(work)
    assert len(set(pools)) == 2
    runs = {"main": VersionRun(0, 9, "engine-0", "main"), "stale": VersionRun(0, 4, "engine-1", "stale")}
    assert [step.versions for step in record.steps] == [(runs[pool],) for pool in pools]
    assert origins_of(record) == (Origin(4, "stale"), Origin(9, "main"))
    assert record.metrics["stale_fallbacks"] == 0


async def test_a_rollout_keeps_an_engine_in_each_pool() -> None:
    """Two of each; the loads of equal engines alternate otherwise, as they are picked by load and name."""
    with FakeEngine(reply=PLAN) as a, FakeEngine(reply=PLAN) as b, FakeEngine(reply=PLAN) as c, FakeEngine(reply=PLAN) as d:
        engines = table((a, "main", 2), (b, "main", 2), (c, "stale", 1), (d, "stale", 1))
        a.script("/generate", DROP)  # the first turn of each pool moves to the second engine of it, and the others follow
        c.script("/generate", DROP)
        record = await play(cross_policy(), engines)
    used = {run.pool: {s.versions[0].engine for s in record.steps if s.versions[0].pool == run.pool} for run in runs_of(record)}
    assert used["main"] == {"engine-1"}
    assert used["stale"] == {"engine-3"}


def runs_of(record) -> list[VersionRun]:
    return [run for step in record.steps for run in step.versions]


async def test_without_a_ready_stale_engine_main_samples_and_it_is_counted() -> None:
    with FakeEngine(reply=PLAN) as new, FakeEngine(reply=PLAN) as old:
        work = cross_policy()
        ready, stale = table((new, "main", 9), (old, "stale", 4))
        for change in ({"state": "updating"}, {"version": 0}):
            record = await play(work, [ready, replace(stale, **change)])
            assert {run.pool for run in runs_of(record)} == {"main"}
            assert record.metrics["stale_fallbacks"] == drawn(work).count("stale")
        assert old.calls == []


async def test_a_turn_that_the_stale_pool_began_may_end_in_main() -> None:
    """The engine aborts it after two tokens and is gone: each token has its own version, and the turn counts once."""
    work = next(work for work in (cross_policy(seed=seed, count=1) for seed in range(50)) if drawn(work, 1) == ["stale"])
    with FakeEngine(reply=lambda prompt, sampling: [6, 2]) as new, FakeEngine() as old:
        engines = table((new, "main", 9), (old, "stale", 4))
        meta = {"weight_versions": [{"version": "4", "start": 0, "end": 2}]}
        old.script("/generate", Answer(200, answer([7, 5], "abort", **meta)), DROP)
        record = await play(work, engines)
    (step,) = record.steps
    assert step.action_ids.tolist() == [7, 5, 6, 2]
    assert step.versions == (VersionRun(0, 4, "engine-1", "stale"), VersionRun(2, 9, "engine-0", "main"))
    assert (step.finish, record.metrics["stale_fallbacks"], record.metrics["engine_retries"]) == (Finish.STOP, 1, 2)


async def test_main_never_falls_back_on_the_stale_pool() -> None:
    work = next(work for work in (cross_policy(seed=seed, count=1) for seed in range(50)) if drawn(work, 1) == ["main"])
    with FakeEngine(reply=PLAN) as new, FakeEngine(reply=PLAN) as old:
        ready, stale = table((new, "main", 9), (old, "stale", 4))
        busy, wait = replace(ready, state="updating"), Wait()
        async with env_server(ScriptedDomain()) as server, toy_parts([f"127.0.0.1:{server.port}"], [busy, stale]) as parts:
            playing = asyncio.create_task(run_rollout(work, parts, wait))
            await eventually(lambda: wait.name == "engine.ready")
            parts.engines.places.update([ready, stale])
            record = await playing
    assert [run.pool for run in runs_of(record)] == ["main"]
    assert old.calls == []
