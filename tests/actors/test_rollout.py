"""Whole rollouts over real connections: an env server, inference engines, and the record that comes out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import numpy as np
import pytest

from actors.codec import decode_bytes
from actors.envs import Envs
from actors.rollout import run_rollout
from common.record import full_prompt, segments
from common.types import ContextKind, EngineInfo, Finish, Limits, Source, Status, Task, VersionRun
from common.validate import check
from common.waits import Wait
from learner.ledger import Ledger
from learner.rollouts import Kind
from tests.actors.servers import (
    ScriptedDomain,
    answer,
    assignment,
    env_server,
    play,
    prompts,
    ready,
    toy_parts,
    turns,
)
from tests.actors.toy import OPENS_THINKING, VOCABULARY, Toy, toy_chat
from tests.control.scripted import rules
from tests.fakes import DROP, HANG, Answer, FakeEngine
from tests.processes import eventually


async def test_001_sampled_ids_are_never_rebuilt_from_text() -> None:
    with FakeEngine(reply=turns([5, 6, 2], [5, 2])) as engine:
        record = await play(assignment(["he", "done"]), engine)
    first, second = prompts(engine)
    # system "hello" (the instructions) and user "he" (the task), then the sampled 5, 6 ("hello") as they were sampled
    opening = [1, *[100 + b for b in b"system"], 4, 7, 2, 4, 1, 12, 4, 5, 2, 4, 1, 13, 4]
    assert first == opening
    assert second == [*opening, 5, 6, 2, 4, 1, 14, 4, 5, 2, 4, 1, 13, 4]
    assert segments(record)[0].ids.tolist()[: len(second) + 2] == [*second, 5, 2]
    assert [step.action_ids.tolist() for step in record.steps] == [[5, 6, 2], [5, 2]]
    assert record.status == Status.TERMINATED
    assert record.total_reward == record.steps[-1].reward == 1.0
    assert record.tail_ids.tolist() == [4, 1, 14, 4, *[100 + b for b in b"done"], 2, 4]
    assert record.steps[0].state_key == b"s1"
    assert record.metrics["success"] == 1.0
    assert record.steps[0].versions == (VersionRun(0, 1, "engine-0", "main"),)


async def test_017_the_prompt_of_turn_3_is_the_record_before_it() -> None:
    call = [10, *[100 + b for b in b'{"name":"f"}'], 11, 2]
    with FakeEngine(reply=turns(call, call, [7, 2])) as engine:
        record = await play(assignment(["a", "b", "c"]), engine)
    (row,) = segments(record)
    for index, prompt in enumerate(prompts(engine)):
        start = int(np.argmax(row.step_of == index))
        assert row.ids[:start].tolist() == prompt == full_prompt(record, index).tolist()
    assert [kind for kind in row.kinds.tolist() if kind == ContextKind.OBSERVATION] == [ContextKind.OBSERVATION] * 3


async def test_010_every_trained_token_has_the_engines_logprob() -> None:
    """An end token that the bridge writes after another stop is context."""
    with FakeEngine(reply=turns([5, 6], [7, 2])) as engine:  # the first turn stops on 6, not on the end token
        record = await play(assignment(["he", "done"]), engine)
    (row,) = segments(record)
    assert record.steps[1].context_ids.tolist() == [2, 4, 1, 14, 4, 5, 2, 4, 1, 13, 4]
    assert row.mask.sum() == 4
    assert (row.logprobs[row.mask] == np.float32(-0.5)).all()
    assert row.ids[row.mask].tolist() == [5, 6, 7, 2]


async def test_008_token_values_decide_nothing() -> None:
    with FakeEngine(reply=lambda prompt, sampling: [2, 5, 2]) as engine:
        engine.script("/generate", Answer(200, answer([2, 5, 2], "stop")))
        record = await play(assignment(["done"]), engine)
    assert record.steps[0].action_ids.tolist() == [2, 5, 2]
    assert segments(record)[0].mask.sum() == 3


async def test_006_a_turn_that_begins_inside_the_reasoning() -> None:
    domain = ScriptedDomain()
    with FakeEngine(reply=lambda prompt, sampling: [5, 9, 7, 2]) as engine:
        record = await play(assignment(["done"]), engine, toy_chat(OPENS_THINKING), domain)
    row = segments(record)[0]
    end = len(full_prompt(record, 0)) + 4
    assert row.ids[end - 9 : end].tolist() == [1, 13, 4, 8, 4, 5, 9, 7, 2]
    assert row.mask[end - 9 : end].tolist() == [False] * 5 + [True] * 4
    assert domain.actions[0].text == "hello"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("last", ["stop", "length"])
async def test_036_the_last_finish_reason_reaches_the_record(count: int, last: str) -> None:
    plans = [[7, 2]] * (count - 1) + [[7, 2] if last == "stop" else [7] * 16]
    domain = ScriptedDomain()
    with FakeEngine(reply=turns(*plans)) as engine:
        record = await play(assignment(["he"] * count), engine, domain=domain)
    assert len(record.steps) == count
    assert record.steps[-1].finish == (Finish.STOP if last == "stop" else Finish.LENGTH)
    assert (record.status == Status.TRUNCATED) == (last == "length")
    assert record.flags == (() if last == "stop" else ("length",))
    assert len(domain.actions) == count - (last == "length")


async def test_026_nothing_of_a_cut_turn_reaches_the_environment() -> None:
    cut = [10, *[100 + b for b in b"{}"], 11, *[7] * 12]
    domain = ScriptedDomain()
    with FakeEngine(reply=lambda prompt, sampling: cut) as engine:
        record = await play(assignment(["done"]), engine, domain=domain)
    assert (record.status, record.flags, len(record.steps)) == (Status.TRUNCATED, ("length",), 1)
    assert domain.actions == []
    assert len(prompts(engine)) == 1


async def test_turn_limit() -> None:
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment(["he"] * 5, Limits(2, 300, 20.0)), engine)
    assert (record.status, record.flags, len(record.steps)) == (Status.TRUNCATED, ("turn_limit",), 2)
    assert record.tail_ids.tolist() == [4, 1, 14, 4, 5, 2, 4]


async def test_token_limit_between_turns_leaves_out_a_tail_that_does_not_fit() -> None:
    # opening 20 + turn 2 + bridge 10 = 32: no room for a token, and an observation of one token cannot be shorter. The tail
    # has 7: it fits into 32, not into 26, where its wrapper would be cut.
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment(["he"] * 5, Limits(8, 32, 20.0)), engine)
        assert len(prompts(engine)[0]) == 20
    assert (record.status, len(record.steps)) == (Status.TRUNCATED, 1)
    assert record.flags == ("token_limit",)
    assert len(segments(record)[0].ids) == 29
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment(["he"] * 5, Limits(8, 26, 20.0)), engine)
    assert record.flags == ("token_limit", "tail_cut")
    assert len(segments(record)[0].ids) == 22


async def test_token_limit_inside_a_turn() -> None:
    with FakeEngine(reply=lambda prompt, sampling: [7] * 50) as engine:
        record = await play(assignment(["he"], Limits(8, 25, 20.0)), engine)
    assert record.steps[0].action_ids.tolist() == [7] * 5
    assert record.flags == ("length", "token_limit")


async def test_a_turn_that_would_begin_after_the_deadline_is_not_begun() -> None:
    """The state that the rollout would go on from is the tail."""
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(
            assignment(["he", "slow 0.4", "he", "he"], Limits(8, 300, 0.3)), engine, domain=ScriptedDomain(blocking=True)
        )
    assert (record.status, record.flags, len(record.steps)) == (Status.TRUNCATED, ("deadline",), 2)
    assert len(record.tail_ids)


async def test_an_engine_that_never_answers_is_a_failure_and_its_request_is_aborted() -> None:
    with FakeEngine() as engine:
        engine.script("/generate", Answer(200, answer([7, 2], "stop")), HANG)
        record = await play(assignment(["he"] * 5, Limits(8, 300, 0.5)), engine)
        assert [path for path, _ in engine.calls].count("/abort_request") == 1
    assert record.status == Status.FAILED
    assert record.flags[0].startswith("reason:deadline: engine.generate")
    assert record.flags[0].endswith("after 1 s")


async def test_an_environment_that_never_answers_is_a_failure_whatever_was_earned() -> None:
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment(["he", "slow 3", "he"], Limits(8, 300, 0.5)), engine, domain=ScriptedDomain(blocking=True))
    assert (record.status, record.total_reward) == (Status.FAILED, 0.0)
    assert record.flags == ("reason:deadline: env.step env-scripted-0 after 1 s",)


async def test_deadline_without_an_engine_is_a_failure_that_names_the_wait() -> None:
    async with env_server(ScriptedDomain()) as server:
        table = [EngineInfo("engine-0", "http://127.0.0.1:9", "main", 0, "starting", "loading")]
        async with toy_parts([f"127.0.0.1:{server.port}"], table) as parts:
            wait = Wait()
            record = await run_rollout(assignment(["he"], Limits(8, 300, 0.3)), parts, wait)
    assert record.status == Status.FAILED
    assert record.flags == ("reason:deadline: engine.ready engines of main (engine-0 starting version 0 loading) after 0.6 s",)


@pytest.mark.parametrize("huge", [{"texts": ["huge", "he"]}, {"texts": ["he"], "times": 17 * 2**19}])
async def test_099_an_observation_above_the_limit_fails_its_rollout_at_once(huge: dict) -> None:
    """gRPC reports it with the code of a full server, which would be tried again until the deadline."""
    asked = assignment([], Limits(8, 300, 60.0))
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(replace(asked, task=replace(asked.task, payload=huge)), engine)
    assert record.status == Status.FAILED
    assert record.flags[0].startswith("reason:EnvLost: ")
    assert "larger than max" in record.flags[0]


async def test_a_crash_of_the_environment_is_infrastructure() -> None:
    domain = ScriptedDomain()
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment(["he", "crash"]), engine, domain=domain)
    assert record.status == Status.FAILED
    assert record.flags[0].startswith("reason:EnvLost: Step at 127.0.0.1:")
    assert "the disk is full" in record.flags[0]
    assert record.total_reward == 0
    assert "success" not in record.metrics
    check(record, VOCABULARY)


async def test_reference_rollouts_are_written_as_the_policy_would() -> None:
    domain = ScriptedDomain()
    with FakeEngine() as engine:
        record = await play(assignment(["he", "done"], source=Source.REFERENCE, reference=2), engine, domain=domain)
        assert engine.calls == []
    assert record.status == Status.TERMINATED
    written = decode_bytes(Toy(), record.steps[1].action_ids.tolist())
    assert written == b'<tool_call>\n{"name": "go", "arguments": {"n": 1}}\n</tool_call><|im_end|>'
    assert all(len(step.action_logprobs) == 0 and step.versions == () for step in record.steps)
    assert [action.tool_calls[0].arguments for action in domain.actions] == [{"n": 0}, {"n": 1}]
    assert not segments(record)[0].mask.any()
    assert segments(record)[0].action.sum() == sum(len(step.action_ids) for step in record.steps)
    check(record, VOCABULARY)


async def test_a_reference_that_does_not_solve_its_task_fails() -> None:
    with FakeEngine() as engine:
        record = await play(assignment(["he", "done"], source=Source.REFERENCE, reference=1), engine)
    assert record.status == Status.FAILED
    assert "does not solve it" in record.flags[0]


async def test_a_reference_with_longer_turns_than_the_policy_may_take_fails() -> None:
    """Trained on it, the policy would be cut off in every turn."""
    long = assignment(["he", "done"], source=Source.REFERENCE, reference=2)
    with FakeEngine() as engine:
        record = await play(replace(long, sampling=replace(long.sampling, max_new_tokens=41)), engine)
        assert record.flags == ("reason:RolloutError: a turn of the reference takes 42 tokens, limits.max_new_tokens is 41",)
        fits = await play(replace(long, sampling=replace(long.sampling, max_new_tokens=42)), engine)
    assert (record.status, fits.status) == (Status.FAILED, Status.TERMINATED)


async def test_sessions_are_closed_however_a_rollout_ends() -> None:
    domain = ScriptedDomain()
    with FakeEngine() as engine:
        async with env_server(domain) as server, toy_parts([f"127.0.0.1:{server.port}"], ready(engine)) as parts:
            engine.script("/generate", HANG)
            task = asyncio.create_task(run_rollout(assignment(["he"]), parts, Wait()))
            await eventually(lambda: engine.calls)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: domain.closed == 1)
        assert server.sessions.idle.is_set()


class CancellingEnvs(Envs):
    """Raises what a library raises when its call is cancelled, at one place."""

    def __init__(self, place: str, error: BaseException) -> None:
        super().__init__({})
        self.place, self.error = place, error

    async def open(self, task, session_id, with_reference):
        if self.place == "open":
            raise self.error
        raise AssertionError


class RpcCancelled(grpc.aio.AioRpcError):
    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "channel closed")


@pytest.mark.parametrize("error", [asyncio.CancelledError("library"), RpcCancelled()], ids=["asyncio", "grpc"])
async def test_076_a_cancellation_that_is_not_ours_is_a_failed_rollout(error: BaseException) -> None:
    async with toy_parts([], []) as parts:
        envs = CancellingEnvs("open", error)
        record = await run_rollout(assignment(["he"]), replace(parts, envs=envs), Wait())
    assert record.status == Status.FAILED
    assert "cancel" in record.flags[0].lower()


async def test_deadline_while_no_engine_serves_fails_a_rollout_that_had_turns() -> None:
    with FakeEngine() as engine:
        engine.script("/generate", Answer(200, answer([7, 2], "stop")), *[DROP] * 20)
        record = await play(assignment(["he"] * 5, Limits(8, 300, 0.6)), engine)
    assert record.status == Status.FAILED
    assert record.flags[0].startswith("reason:deadline: engine.ready")
    assert len(record.steps) == 1


async def requested_seeds(actors: int, skipped: int) -> list[int]:
    """What an engine is asked with in 4 groups of 4 members with 2 turns, dealt out to `actors`, after `skipped` groups."""
    ledger = Ledger(rules(group_size=4, groups_per_update=8), incarnation=1)
    tasks = [Task("scripted", f"t-{n}", 0, {"texts": ["he", "he"]}) for n in range(skipped + 4)]
    for task in tasks:
        ledger.open(Kind.RL, task)
    leased = [r for n in range(4 * skipped + 16) for r in ledger.lease(f"actor-{n % actors}", 1, Kind.RL, 0.0)]
    found = []
    for rollout in leased[4 * skipped :]:
        group, _ = ledger.find(rollout.id)
        asked = assignment(["he", "he"], rollout_id=rollout.id)
        asked = replace(asked, group_id=group.id, sampling=replace(asked.sampling, seed=rollout.seed))
        with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
            assert (await play(asked, engine)).status == Status.TERMINATED
            found += [body["sampling_params"]["sampling_seed"] for path, body in engine.calls if path == "/generate"]
    return found


async def test_078_every_turn_of_every_member_has_its_own_seed() -> None:
    """The same with other actors and when it is run again, others in the next groups."""
    seeds = await requested_seeds(2, 0)
    assert len(seeds) == len(set(seeds)) == 32
    assert await requested_seeds(4, 0) == seeds
    assert not set(await requested_seeds(2, 4)) & set(seeds)
