"""What engines answer, and what becomes of the rollout that asked."""

from __future__ import annotations

import asyncio

import pytest

from actors.agents import Wait
from actors.engines import Engines, Request
from actors.rollout import run_rollout
from common.seeds import turn_seed
from common.types import EngineInfo, Finish, Status, VersionRun, ids_array
from common.validate import Vocabulary
from tests.actors.servers import ScriptedDomain, answer, assignment, env_server, play, prompts, ready, toy_parts, turns
from tests.actors.toy import toy_chat
from tests.fakes import DROP, Answer, FakeEngine


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


async def test_an_aborted_turn_goes_on_after_its_tokens() -> None:
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
    engines = Engines(Vocabulary(384, 356), timeout_s=60.0)
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


async def test_a_rollout_stays_on_its_engine_while_that_is_ready() -> None:
    engines = Engines(Vocabulary(384, 356), timeout_s=1.0)

    def table(*rows: tuple[str, int]) -> None:
        url = "http://127.0.0.1:9"
        engines.update(EngineInfo(f"engine-{n}", url, "main", version, state) for n, (state, version) in enumerate(rows))

    table(("ready", 1), ("ready", 1))
    assert (await engines.pick("engine-1")).name == "engine-1"
    assert (await engines.pick("")).name == "engine-0"
    table(("ready", 2), ("updating", 1))
    assert (await engines.pick("engine-1")).name == "engine-0"
    table(("ready", 0), ("quarantined", 1))  # version 0: no published weights yet
    assert engines.ready() == []
    waiting = asyncio.create_task(engines.pick("engine-1"))
    await asyncio.sleep(0)
    table(("ready", 0), ("ready", 3))
    assert (await waiting).version == 3
    await engines.close()
