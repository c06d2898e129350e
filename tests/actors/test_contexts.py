"""Context policies in whole rollouts: over a real env server and a scripted engine, to the record and its segments."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from actors.agents import Wait
from actors.history import PLACEHOLDER, UNSHOWN
from actors.rollout import run_rollout
from common.record import chains, full_prompt, segments
from common.types import (
    Action,
    Assignment,
    ContextKind,
    ContextPolicy,
    Finish,
    Limits,
    Message,
    Observation,
    Source,
    Status,
    StepKind,
    ToolOutcome,
    Trajectory,
)
from common.validate import check
from learner.assignments import check_assignment
from tests.actors.servers import ScriptedDomain, ScriptedEnv, assignment, env_server, play, prompts, ready, toy_parts
from tests.actors.toy import VOCABULARY, Toy, toy_chat
from tests.fakes import FakeEngine

CODEC = Toy()
LIMITS = Limits(8, 900, 20.0)
CALL = [10, *CODEC.encode_text('{"name":"f"}'), 11, 2]


def spell(text: str) -> list[int]:
    return CODEC.encode_text(text)


def under(policy: str, texts: list[str], limits: Limits = LIMITS, **options) -> Assignment:
    work = assignment(texts, limits)
    work = replace(work, sampling=replace(work.sampling, max_new_tokens=200))
    return replace(work, context=ContextPolicy(policy, options))


def sane(record: Trajectory, engine: FakeEngine, work: Assignment) -> None:
    """What holds under every policy: the record obeys its rules and answers the assignment, it says what the engine was given,
    and every sampled token is trained exactly once."""
    check(record, VOCABULARY, {1})
    check_assignment(record, work)
    assert [full_prompt(record, n).tolist() for n in range(len(record.steps))] == prompts(engine)
    rows = segments(record)
    trained = np.concatenate([row.step_of[row.mask] for row in rows])
    assert np.bincount(trained, minlength=len(record.steps)).tolist() == [len(step.action_ids) for step in record.steps]


def shown(record: Trajectory, index: int) -> str:
    return b"".join(CODEC.pieces[i] for i in full_prompt(record, index)).decode()


def numbered():
    """Turn n says "hello" n times: turns can be told apart. It counts its calls."""
    calls = iter(range(1, 99))
    return lambda prompt, sampling: [7] * next(calls) + [2]


async def test_window() -> None:
    work = under("window", ["a", "b", "c", "d"], turns=2)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert (record.status, len(record.steps), record.total_reward) == (Status.TERMINATED, 4, 1.0)
    opening = "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhe<|im_end|>\n"
    turn = "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n"
    notice = f"<|im_start|>user\n{UNSHOWN.format(count=1)}<|im_end|>\n"
    last = turn.format("hello" * 2, "b") + turn.format("hello" * 3, "c") + "<|im_start|>assistant\n"
    assert shown(record, 3) == opening + notice + last
    assert chains(record.steps) == [[0, 1, 2], [3]]
    assert record.metrics["turns"] == 4


async def test_older_observations_have_a_placeholder() -> None:
    work = under("append", ["aaa", "bbb", "ccc", "ddd"], observations=1)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert shown(record, 3).count(PLACEHOLDER) == 2
    assert "aaa" not in shown(record, 3)
    assert "bbb" in shown(record, 2)
    assert "ccc" in shown(record, 3)
    # The first prompt that hides one shares all up to its text, and shows the turn after it again.
    assert chains(record.steps) == [[0, 1], [2], [3]]
    (_, second, _) = segments(record)
    assert second.kinds.tolist().count(ContextKind.NOTICE) == len(spell(PLACEHOLDER))


async def test_discard_all_above_a_length() -> None:
    work = under("discard", ["a" * 30, "b" * 30, "c" * 30, "d"], tokens=100)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert [len(full_prompt(record, n)) for n in range(3)] == [20, 20 + 2 + 39, 20 + len(spell(UNSHOWN.format(count=2))) + 5]
    assert "bbb" not in shown(record, 2)
    assert UNSHOWN.format(count=2) in shown(record, 2)
    assert chains(record.steps) == [[0, 1], [2, 3]]


async def test_the_policy_sums_up_and_is_trained_on_it() -> None:
    summary = [5, 6, 15, 7, 2]  # "he" "llo": not how the tokenizer spells it

    def reply(prompt: list[int], sampling: dict) -> list[int]:
        text = b"".join(CODEC.pieces[i] for i in prompt).decode()
        return summary if "Sum up" in text.rsplit("<|im_start|>", 2)[1] else [7, 2]

    work = under("summary", ["a" * 30, "b" * 30, "c" * 30, "d"], tokens=90, keep=1, summary_tokens=40)
    with FakeEngine(reply=reply) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
        budgets = [body["sampling_params"]["max_new_tokens"] for path, body in engine.calls if path == "/generate"]
    kinds = [step.kind for step in record.steps]
    assert kinds == [StepKind.ACT, StepKind.ACT, StepKind.SUMMARY, StepKind.ACT, StepKind.SUMMARY, StepKind.ACT]
    assert budgets == [200, 200, 40, 200, 40, 200]
    assert [step.reward for step in record.steps] == [0, 0, 0, 0, 0, 1.0]
    assert (record.metrics["turns"], record.metrics["summaries"]) == (4, 2)
    assert chains(record.steps) == [[0, 1, 2], [3, 4], [5]]
    second = segments(record)[1]
    assert second.ids[second.kinds == ContextKind.SUMMARY].tolist() == summary[:-1]
    assert "b" * 30 in shown(record, 2)  # what is summed up has the newest answer, which stays in the next prompt
    assert "b" * 30 in shown(record, 3)
    assert "a" * 30 not in shown(record, 3)
    assert len(record.steps[2].action_logprobs) == 5


async def test_a_summary_that_is_cut_serves_as_it_is_and_calls_nothing() -> None:
    def reply(prompt: list[int], sampling: dict) -> list[int]:
        return [*CALL[:-1], *[7] * 90] if sampling["max_new_tokens"] == 40 else [7, 2]

    domain = ScriptedDomain()
    work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=40)
    with FakeEngine(reply=reply) as engine:
        record = await play(work, engine, domain=domain)
        sane(record, engine, work)
    assert record.status == Status.TERMINATED
    assert record.steps[1].finish == Finish.LENGTH
    assert [action.tool_calls for action in domain.actions] == [(), ()]
    last = segments(record)[1]
    assert last.ids[last.kinds == ContextKind.SUMMARY].tolist() == [7] * (40 - len(CALL) + 1)


async def test_no_summary_is_made_after_the_last_turn() -> None:
    work = under("summary", ["a" * 60] * 3, Limits(1, 400, 20.0), tokens=60, summary_tokens=40)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert ([step.kind for step in record.steps], record.flags) == ([StepKind.ACT], ("turn_limit",))
    assert len(record.tail_ids) > 60


async def test_no_room_for_a_summary_ends_the_rollout() -> None:
    work = under("summary", ["a" * 60] * 3, Limits(8, 40, 20.0), tokens=30, summary_tokens=10)
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert ([step.kind for step in record.steps], record.flags) == ([StepKind.ACT], ("token_limit",))


# ---- summaries of another model -----------------------------------------------------------------------------------------


class ChatEndpoint:
    """An OpenAI-compatible server that answers what it is told to, status by status."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[dict, str]] = []

    async def _answer(self, http: web.Request) -> web.Response:
        self.calls.append((await http.json(), http.headers.get("Authorization", "")))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(body, status=status)

    @asynccontextmanager
    async def serve(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def says(text: object) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_a_summary_of_another_model_is_context(monkeypatch) -> None:
    monkeypatch.setenv("POLYTURN_SUMMARY_KEY", "secret")
    endpoint = ChatEndpoint((503, {"error": "busy"}), (200, says(" he<|im_end|>llo ")))
    async with endpoint.serve() as url:
        options = {"tokens": 90, "summary_tokens": 40, "summary_url": url, "summary_model": "m"}
        work = under("summary", ["a" * 30, "b" * 30, "c"], **options)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    assert [step.kind for step in record.steps] == [StepKind.ACT] * 3
    last = segments(record)[1]
    said = last.ids[last.kinds == ContextKind.SUMMARY].tolist()
    assert said == spell("he<|im_end|>llo")
    assert 2 not in said  # another's text cannot end a turn
    (_, _), (body, key) = endpoint.calls
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 40, 0)
    (message,) = body["messages"]
    turns = f"[assistant]\nhello\n\n[tool]\n{'a' * 30}\n\n[assistant]\nhellohello\n\n[tool]\n{'b' * 30}"
    assert message["content"].startswith(f"hello\n\n[user]\nhe\n\n{turns}\n\nThe conversation is about to be cut.")


async def test_another_model_is_told_what_will_not_be_shown_any_more() -> None:
    """Not the turns that stay, and of what is gone already the summary of it."""
    endpoint = ChatEndpoint((200, says("(one)")), (200, says("(two)")))
    async with endpoint.serve() as url:
        options = {"tokens": 100, "summary_tokens": 40, "summary_url": url, "keep": 1}
        work = under("summary", ["a" * 60, "b" * 60, "c" * 60, "d"], **options)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    told = [body["messages"][0]["content"].partition("\n\nThe conversation")[0] for body, _ in endpoint.calls]
    task, turn = "hello\n\n[user]\nhe\n\n", "[assistant]\n{}\n\n[tool]\n{}"
    assert told == [
        task + turn.format("hello", "a" * 60),
        task + "(one)\n\n" + turn.format("hellohello", "b" * 60),
    ]


async def test_a_longer_summary_than_allowed_loses_its_middle() -> None:
    endpoint = ChatEndpoint((200, says("x" * 100)))
    async with endpoint.serve() as url:
        work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=30, summary_url=url)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    assert 20 < (segments(record)[1].kinds == ContextKind.SUMMARY).sum() <= 30


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {"error": "no key"}), "no key"),
        ((200, {"choices": []}), "no choices"),
        ((200, says(None)), "has no text"),
    ],
)
async def test_an_endpoint_that_gives_no_summary_fails_the_rollout(answer: tuple[int, object], why: str) -> None:
    endpoint = ChatEndpoint(answer)
    async with endpoint.serve() as url:
        work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=30, summary_url=url)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
    assert record.status == Status.FAILED
    assert f"context.summary_url {url}" in record.flags[0]
    assert why in record.flags[0]
    assert len(endpoint.calls) == 1


# ---- sub-agents ----------------------------------------------------------------------------------------------------------


class ToolsEnv(ScriptedEnv):
    """Answers every call by its name; the call "win" ends the episode with reward 1."""

    def step(self, action: Action) -> Observation:
        self.domain.actions.append(action)
        won = any(call.name == "win" for call in action.tool_calls)
        messages = tuple(Message("tool", f"{call.name} done", call.id) for call in action.tool_calls) or (
            Message("user", "call"),
        )
        outcomes = tuple(ToolOutcome(call.name, True, "", 0.0) for call in action.tool_calls)
        return Observation(messages, float(won), Status.TERMINATED if won else Status.RUNNING, {}, outcomes)


class ToolsDomain(ScriptedDomain):
    def make_env(self) -> ToolsEnv:
        return ToolsEnv(self)


def calls(*names_and_arguments: tuple[str, dict]) -> list[int]:
    ids: list[int] = []
    for name, arguments in names_and_arguments:
        ids += [10, *spell(json.dumps({"name": name, "arguments": arguments})), 11]
    return [*ids, 2]


def scripted(*turns: list[int]):
    plan = iter(turns)
    return lambda prompt, sampling: next(plan)


async def helped(work: Assignment, *turns: list[int]) -> tuple[Trajectory, ToolsDomain, FakeEngine]:
    domain, chat = ToolsDomain(), toy_chat(codec=Toy(marks_are_ids=True))
    work = replace(work, sampling=replace(work.sampling, max_new_tokens=400))
    with FakeEngine(reply=scripted(*turns)) as engine:
        record = await play(work, engine, chat, domain)
        if record.status != Status.FAILED:
            sane(record, engine, work)
    return record, domain, engine


HELPERS = {"subagent_turns": 3, "subagent_calls": 2}
ROOMY = Limits(8, 6000, 20.0)


async def test_a_helper_is_a_branch_and_its_answer_the_calls() -> None:
    delegate = calls(("look", {}), ("delegate", {"task": "he"}), ("look2", {}))
    record, domain, _ = await helped(
        under("append", [], ROOMY, **HELPERS), delegate, calls(("dig", {})), [5, 6, 2], calls(("win", {}))
    )
    assert record.status == Status.TERMINATED
    assert [step.kind for step in record.steps] == [StepKind.ACT, StepKind.SUBAGENT, StepKind.SUBAGENT, StepKind.ACT]
    assert [step.parent for step in record.steps] == [-1, 0, 1, 0]
    assert chains(record.steps) == [[0, 3], [1, 2]]
    names = [[call.name for call in action.tool_calls] for action in domain.actions]
    assert names == [["look", "look2"], ["dig"], ["win"]]
    # The answers come in the order of the calls; the helper's is what it said.
    tools = ["look done", "hello", "look2 done"]
    said = "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in tools)
    assert shown(record, 3).endswith(f"<|im_end|>\n{said}<|im_start|>assistant\n")
    # It sees the task that it was given, and other tools than its own kind.
    assert shown(record, 1).endswith("<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n")
    assert "delegate" in shown(record, 0)
    assert "delegate" not in shown(record, 1)
    assert record.steps[1].prefix_len == len("<system") + 2  # what both openings begin with: the mark, the role, "hello"
    assert [outcome.name for outcome in record.steps[0].tool_outcomes] == ["look", "look2", "delegate"]
    assert record.metrics["subagent_turns"] == 2
    assert record.metrics["calls_ok"] == 5
    assert [step.reward for step in record.steps] == [0, 0, 0, 1.0]


async def test_a_helper_may_end_the_episode() -> None:
    delegate = calls(("delegate", {"task": "he"}), ("delegate", {"task": "llo"}))
    record, domain, _ = await helped(under("append", [], ROOMY, **HELPERS), delegate, calls(("win", {})))
    assert (record.status, len(record.steps)) == (Status.TERMINATED, 2)
    assert [step.reward for step in record.steps] == [0, 1.0]
    assert len(domain.actions) == 1
    assert [outcome.error for outcome in record.steps[0].tool_outcomes] == [
        "the helper came to no answer (over)",
        "Not executed: the episode is over.",
    ]
    tail = segments(record)[1]
    assert tail.tail == len(record.tail_ids) > 0


async def test_what_a_helper_cannot_do_is_an_answer() -> None:
    record, domain, _ = await helped(
        under("append", [], ROOMY, **HELPERS),
        calls(("delegate", {}), ("delegate", {"task": 3})),  # neither starts one
        calls(("delegate", {"task": "he"})),
        *[calls(("dig", {}))] * 3,  # the first uses up its turns
        calls(("delegate", {"task": "he"})),
        [7] * 400,  # the second is cut
        calls(("delegate", {"task": "he"})),  # there is no third
        calls(("win", {})),
    )
    assert record.status == Status.TERMINATED
    errors = [outcome.error for step in record.steps for outcome in step.tool_outcomes if outcome.name == "delegate"]
    assert errors == [
        *["delegate needs the argument task, a text"] * 2,
        "the helper came to no answer (turn_limit)",
        "the helper came to no answer (length)",
        "no more helpers: 2 are allowed",
    ]
    assert [step.finish for step in record.steps].count(Finish.LENGTH) == 1
    assert "Error: the helper came to no answer (turn_limit)" in shown(record, 5)
    assert record.metrics["calls_failed"] == 5
    assert len(domain.actions) == 4


async def test_a_helper_has_no_helpers() -> None:
    record, domain, _ = await helped(
        under("append", [], ROOMY, **HELPERS),
        calls(("delegate", {"task": "he"})),
        calls(("delegate", {"task": "llo"})),
        [7, 2],
        calls(("win", {})),
    )
    assert [call.name for action in domain.actions for call in action.tool_calls] == ["delegate", "win"]
    assert [step.kind for step in record.steps].count(StepKind.SUBAGENT) == 2


async def test_the_turn_that_called_a_helper_is_shown_again_as_it_was() -> None:
    delegate = calls(("delegate", {"task": "he"}))
    work = under("append", [], ROOMY, observations=1, **HELPERS)
    record, _, _ = await helped(work, delegate, [5, 6, 2], calls(("dig", {})), calls(("dig", {})), calls(("win", {})))
    assert chains(record.steps) == [[0, 2], [1], [3], [4]]
    call = '<tool_call>{"name": "delegate", "arguments": {"task": "he"}}</tool_call><|im_end|>'
    assert f"<|im_start|>assistant\n{call}\n<|im_start|>tool\n{PLACEHOLDER}" in shown(record, 3)


async def test_without_helpers_delegate_is_a_word_like_any_other() -> None:
    record, domain, _ = await helped(under("append", [], ROOMY), calls(("delegate", {"task": "he"})), calls(("win", {})))
    assert [call.name for action in domain.actions for call in action.tool_calls] == ["delegate", "win"]
    assert record.status == Status.TERMINATED


async def test_a_tail_follows_the_turn_that_it_answers() -> None:
    """The last thing that happened is the helper's turn: what answers the call has no place behind it."""
    delegate = calls(("delegate", {"task": "he"}))
    record, _, _ = await helped(under("append", [], Limits(1, 6000, 20.0), **HELPERS), delegate, [7, 2])
    assert (record.status, record.flags, len(record.tail_ids)) == (Status.TRUNCATED, ("turn_limit",), 0)


async def test_a_helper_sums_up_too() -> None:
    """What its caller is shown stays what it was."""
    dig = calls(("dig", {"deep": "x" * 300}))
    delegate = calls(("delegate", {"task": "he"}))
    work = under("summary", [], ROOMY, tokens=700, summary_tokens=60, **HELPERS)
    record, _, _ = await helped(work, delegate, dig, dig, [7, 2], [6, 2], calls(("win", {})))
    act, sub, summary = StepKind.ACT, StepKind.SUBAGENT, StepKind.SUMMARY
    assert [step.kind for step in record.steps] == [act, sub, sub, summary, sub, act]
    assert [step.parent for step in record.steps] == [-1, 0, 1, 2, 3, 0]
    assert chains(record.steps) == [[0, 5], [1, 2, 3], [4]]
    assert "[2 earlier turns are not shown. They come to this:]\nhello<|im_end|>" in shown(record, 4)
    assert "x" * 300 not in shown(record, 5)


# ---- references and unknown policies -------------------------------------------------------------------------------------


async def test_a_reference_is_shown_as_the_policy_would_see_it() -> None:
    async with env_server(ScriptedDomain()) as server:
        with FakeEngine() as engine:
            async with toy_parts([f"127.0.0.1:{server.port}"], ready(engine)) as parts:
                for policy, rows in (("window", [[0, 1], [2], [3]]), ("summary", [[0, 1, 2, 3]])):
                    work = assignment(["a", "b", "c", "d"], LIMITS, Source.REFERENCE, f"r-{policy}", reference=4)
                    options = {"turns": 1} if policy == "window" else {"tokens": 10, "summary_tokens": 9}
                    work = replace(work, context=ContextPolicy(policy, options))
                    record = await run_rollout(work, parts, Wait())
                    assert record.status == Status.TERMINATED, record.flags
                    assert chains(record.steps) == rows
                    check(record, VOCABULARY)


async def test_an_unknown_policy_fails_its_rollout() -> None:
    with FakeEngine() as engine:
        record = await play(under("forget", ["a"]), engine)
    assert record.status == Status.FAILED
    assert "context policy 'forget'" in record.flags[0]
