"""What engines answer, and what becomes of the rollout that asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from actors.engines import NEUTRAL, Engines, EngineUnavailable, Generation, Request
from actors.places import PlaceRules
from actors.rollout import run_rollout
from common.seeds import turn_seed
from common.types import EngineInfo, Finish, Status, VersionRun, ids_array
from common.validate import Vocabulary
from common.waits import Wait
from learner.engine_api import EngineApi
from tests.actors.servers import ScriptedDomain, answer, assignment, env_server, play, prompts, ready, toy_parts, turns
from tests.actors.toy import toy_chat
from tests.fakes import DROP, HANG, LOSE, Answer, FakeEngine
from tests.processes import eventually


async def test_an_engine_that_dies_is_replaced_by_another() -> None:
    with FakeEngine(reply=turns([5, 2], [6, 2])) as first, FakeEngine(reply=turns([5, 2], [6, 2])) as second:
        first.script("/generate", DROP)
        domain = ScriptedDomain()
        async with env_server(domain) as server, toy_parts([f"127.0.0.1:{server.port}"], ready(first, second)) as parts:
            record = await run_rollout(assignment(["he", "done"]), parts, Wait())
    assert record.status == Status.TERMINATED
    assert [step.versions[0].engine for step in record.steps] == ["engine-1", "engine-1"]  # and it stays there
    assert record.metrics["engine_retries"] == 1
    assert len(domain.actions) == 2
    seeds = [body["sampling_params"]["sampling_seed"] for path, body in first.calls + second.calls if path == "/generate"]
    assert seeds == [turn_seed(7, 0), turn_seed(7, 0), turn_seed(7, 1)]  # a try has the seed of its turn
    rids = [body["rid"] for path, body in first.calls + second.calls if path == "/generate"]
    assert len(set(rids)) == 3


async def test_an_engine_that_restarts_serves_again_once_it_has_weights() -> None:
    """A restarted engine answers with version "default": nobody's policy."""
    with FakeEngine(reply=turns([5, 2])) as engine:
        nobodys = answer([5, 2], "stop", weight_versions=[{"version": "default", "start": 0, "end": 2}])
        engine.script("/generate", Answer(200, nobodys))
        record = await play(assignment(["done"]), engine)
    assert record.steps[0].versions == (VersionRun(0, 1, "engine-0", "main"),)
    assert record.metrics["engine_retries"] == 1


async def test_067_074_075_an_aborted_turn_goes_on_after_its_tokens() -> None:
    with FakeEngine(reply=lambda prompt, sampling: [6, 2]) as engine:
        older = [{"version": "3", "start": 0, "end": 2}]
        engine.script("/generate", Answer(200, answer([7, 5], "abort", weight_versions=older)))
        record = await play(assignment(["done"]), engine)
        prompt = record.steps[0].context_ids.tolist()
        assert [body["sampling_params"]["max_new_tokens"] for _, body in engine.calls] == [16, 14]
    assert record.steps[0].action_ids.tolist() == [7, 5, 6, 2]
    assert record.steps[0].versions == (VersionRun(0, 3, "engine-0", "main"), VersionRun(2, 1, "engine-0", "main"))
    assert prompts(engine)[-1] == [*prompt, 7, 5]
    assert record.steps[0].finish == Finish.STOP


async def test_an_engine_that_refuses_fails_the_rollout_with_its_message() -> None:
    with FakeEngine() as engine:
        engine.script("/generate", Answer(400, {"error": {"message": "longer than the model's context length"}}))
        record = await play(assignment(["done"]), engine)
    assert record.status == Status.FAILED
    assert "longer than the model's context length" in record.flags[0]
    assert record.metrics["engine_retries"] == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (answer([7, 2], "stop", output_token_logprobs=[[-0.5, 7, None]]), "2 output_ids, but 1 token logprobs"),
        (answer([7, 2], "stop", output_token_logprobs=[[-0.5, 7, None], [-0.5, 5, None]]), "or of other ids"),
        (answer([7, 2], "stop", output_token_logprobs=[[-0.5, 7, None], [None, 2, None]]), "logprob None"),
        (answer([7, 2], "stop", completion_tokens=3), "completion_tokens is 3, with 2 ids"),
        (answer([7, 360], "stop"), "sampled id 360"),
        (answer([7, 2], "weird"), "finish 'weird'"),
        (answer([], "stop"), "with 0 of at most"),
        (answer([7] * 17, "length"), "with 17 of at most 16"),
        (answer([7, 2], "stop", weight_versions=[{"version": "1", "start": 0, "end": 1}]), "do not cover 2 tokens"),
        (answer([7, 2], "stop", weight_versions=[{"version": "1", "start": 1, "end": 2}]), "do not cover 2 tokens"),
        ({"text": ""}, "an answer without"),
    ],
)
async def test_an_answer_that_breaks_the_record_is_not_trained(broken: dict, says: str) -> None:
    with FakeEngine() as engine:
        engine.script("/generate", Answer(200, broken))
        record = await play(assignment(["done"]), engine)
    assert record.status == Status.FAILED
    assert says in record.flags[0]


async def test_ids_outside_the_vocabulary_are_never_sent() -> None:
    with FakeEngine() as engine:
        chat = toy_chat()
        chat.codec.control["<|im_end|>"] = 2
        chat.codec.encode_text = lambda text: [384]
        record = await play(assignment(["done"]), engine, chat)
        assert engine.calls == []
    assert "prompt id 384 is outside 0..383" in record.flags[0]


async def test_it_says_how_much_came_from_the_engines_cache() -> None:
    engines = Engines(Vocabulary(384, 356), 60.0, PlaceRules(8))
    with FakeEngine() as engine:
        info = EngineInfo("engine-0", engine.url, "main", 1, "ready")
        engine.script("/generate", *(Answer(200, answer([7, 2], "stop", cached_tokens=count)) for count in (3, None)))
        ask = Request("r", ids_array([5, 6, 7, 8]), 2, 1.0, (2,), 0)
        assert [(await engines.generate(info, ask)).cached for _ in range(2)] == [3, 0]
    await engines.close()


async def test_076_an_engine_abort_is_resumed_and_bounded() -> None:
    with FakeEngine() as engine:
        engine.script("/generate", *[Answer(200, answer([], "abort", weight_versions=[]))] * 8)
        record = await play(assignment(["done"]), engine)
    assert record.status == Status.FAILED
    assert "8 tries of one turn" in record.flags[0]


# ---- one request, and every way it can end -------------------------------------------------------------------------------


@asynccontextmanager
async def client(*engines: FakeEngine, timeout_s: float = 20.0, concurrency: int = 8) -> AsyncIterator[Engines]:
    """At the end nothing is in flight, here or there."""
    found = Engines(Vocabulary(384, 356), timeout_s, PlaceRules(concurrency))
    found.places.update(ready(*engines))
    try:
        yield found
        assert +found.places.in_flight == {}
        await eventually(lambda: all(not engine.running and not engine.waiting for engine in engines))
    finally:
        await found.close()


async def ask(engines: Engines, rid: str = "r", most: int = 4) -> Generation:
    async with engines.places.take((), "main", lambda name, on, why: None) as engine:
        return await engines.generate(engine, Request(rid, np.array([5], np.int32), most, 1.0, (), 1))


def generations(engine: FakeEngine) -> int:
    return [path for path, _ in engine.calls].count("/generate")


def endless(prompt: list[int], sampling: dict) -> list[int]:
    return [7] * sampling["max_new_tokens"]


async def test_a_request_says_everything_that_changes_the_distribution() -> None:
    with FakeEngine() as engine:
        async with client(engine) as engines:
            await ask(engines)
        assert NEUTRAL.items() <= engine.calls[0][1]["sampling_params"].items()


async def test_a_lost_connection_is_not_tried_again_by_the_library() -> None:
    """Not even one that was kept open: aiohttp repeats what is idempotent, and a POST is not."""
    with FakeEngine() as engine:
        engine.script("/generate", Answer(200, answer([6], "length")), DROP)
        async with client(engine) as engines:
            await ask(engines)
            with pytest.raises(EngineUnavailable, match="ServerDisconnected"):
                await ask(engines)
        assert generations(engine) == 2


async def test_a_redirect_is_not_followed() -> None:
    with FakeEngine() as engine, FakeEngine() as other:
        engine.script("/generate", Answer(307, {"error": {"message": "elsewhere"}}, other.url + "/generate"))
        record = await play(assignment(["done"]), engine)
        assert other.calls == []
    assert record.flags[0].startswith("reason:EngineRefused: engine-0 answered HTTP 307")


async def test_a_caller_that_is_cancelled_ends_its_request() -> None:
    with FakeEngine(reply=endless, token_s=0.01) as engine:
        async with client(engine) as engines:
            asking = asyncio.create_task(ask(engines, "mine", 300))
            await eventually(lambda: engine.running)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert ("/abort_request", {"rid": "mine"}) in engine.calls


async def test_a_request_that_takes_too_long_gives_back_what_it_has() -> None:
    with FakeEngine(reply=endless, token_s=0.01) as engine:
        async with client(engine, timeout_s=0.3) as engines:
            part = await ask(engines, "long", 300)
        assert (part.finish, set(part.ids)) == (Finish.ABORT, {7})
        assert part.versions == (VersionRun(0, 1, "engine-0", "main"),)


async def test_a_request_that_was_answered_is_not_aborted() -> None:
    with FakeEngine() as engine:
        async with client(engine, timeout_s=0.2) as engines:
            await ask(engines)
            await asyncio.sleep(0.4)
        assert engine.posts() == []


async def test_a_pause_that_takes_too_long_gives_back_what_was_sampled_before_it() -> None:
    with FakeEngine(reply=endless, token_s=0.01) as engine:
        async with client(engine, timeout_s=0.5) as engines:
            asking = asyncio.create_task(ask(engines, "paused", 300))
            await eventually(lambda: engine.running and engine.running[0].output)
            await asyncio.to_thread(EngineApi(engine.url).pause)
            part = await asking
        assert part.finish == Finish.ABORT
        assert part.ids


async def test_073_an_abort_of_all_gives_back_what_there_is() -> None:
    with FakeEngine(reply=endless, token_s=0.01) as engine:
        async with client(engine) as engines:
            asking = [asyncio.create_task(ask(engines, f"r{n}", 300)) for n in range(4)]
            await eventually(lambda: len(engine.running) == 4)
            await asyncio.to_thread(EngineApi(engine.url).abort_all)
            assert {(await part).finish for part in asking} == {Finish.ABORT}


async def test_an_engine_that_restarts_in_the_middle_is_unavailable() -> None:
    with FakeEngine(reply=endless, token_s=0.01) as engine:
        async with client(engine) as engines:
            asking = asyncio.create_task(ask(engines, most=300))
            await eventually(lambda: engine.running)
            await asyncio.to_thread(engine.restart)
            with pytest.raises(EngineUnavailable):
                await asking


async def test_a_connection_that_is_lost_is_followed_by_an_abort() -> None:
    """An engine behind a broken connection may not have seen it break."""
    with FakeEngine() as engine:
        engine.script("/generate", LOSE)
        async with client(engine) as engines:
            with pytest.raises(EngineUnavailable):
                await ask(engines, "lost")
            await eventually(lambda: ("/abort_request", {"rid": "lost"}) in engine.calls)


NOBODYS = answer([6], "length", weight_versions=[{"version": "default", "start": 0, "end": 1}])


@pytest.mark.parametrize("failure", [Answer(503), Answer(429), Answer(500), Answer(200, NOBODYS), DROP, HANG], ids=str)
async def test_an_engine_that_does_not_serve_rests(failure: Answer | str) -> None:
    with FakeEngine() as engine:
        engine.script("/generate", failure)
        async with client(engine, timeout_s=0.2) as engines:
            with pytest.raises(EngineUnavailable):
                await ask(engines)
            assert engines.places.ready("main") == []
            engines.places.failed("engine-0", begun=float("inf"))
            await ask(engines)
            engines.places.failed("engine-0", begun=float("inf"))
            assert engines.places._rests["engine-0"].failures == 1  # served in between


ENDS = [HANG, DROP, LOSE, Answer(503), Answer(429), Answer(200, {"text": ""}), Answer(400), "cancel", "abort", "pause", "restart"]


@pytest.mark.parametrize("seed", range(6))
async def test_after_anything_nothing_is_in_flight_and_a_new_request_is_served(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with FakeEngine(reply=endless, token_s=0.002) as first, FakeEngine(reply=endless, token_s=0.002) as second:
        async with client(first, second, timeout_s=1.0, concurrency=2) as engines:
            asking = [asyncio.create_task(ask(engines, f"r{n}", int(rng.integers(1, 300)))) for n in range(12)]
            for end in rng.choice(len(ENDS), 8):
                await asyncio.sleep(float(rng.uniform(0, 0.1)))
                await happen(ENDS[end], (first, second)[rng.integers(2)], asking[rng.integers(12)])
            for each in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(each, Generation):
                    assert len(each.ids) == len(each.logprobs)
            first.unscript()
            second.unscript()
            engines.places.update(ready(first, second))
            assert (await ask(engines, "fresh")).ids == [7] * 4


async def happen(end: Answer | str, engine: FakeEngine, asking: asyncio.Task) -> None:
    match end:
        case "cancel":
            asking.cancel()
        case "abort":
            await asyncio.to_thread(EngineApi(engine.url).abort_all)
        case "pause":
            await asyncio.to_thread(EngineApi(engine.url).pause)
            asyncio.get_running_loop().call_later(0.2, lambda: setattr(engine, "paused", False))
        case "restart":
            await asyncio.to_thread(engine.restart)
            ready(engine)
        case _:
            engine.script("/generate", end)
