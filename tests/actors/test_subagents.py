"""Sub-agents: branches of a rollout in its own environment, and what comes back from them."""

from __future__ import annotations

import json
from dataclasses import replace

from actors.history import PLACEHOLDER
from actors.rollout import run_rollout
from common.record import chains, full_prompt, segments
from common.types import (
    Action,
    Assignment,
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
from common.waits import Wait
from tests.actors.contexts import CODEC, numbered, sane, shown, spell, under
from tests.actors.servers import ScriptedDomain, ScriptedEnv, assignment, env_server, play, ready, toy_parts
from tests.actors.toy import Toy, toy_chat
from tests.fakes import FakeEngine


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


async def test_a_helper_that_says_nothing_has_not_helped() -> None:
    record, _, _ = await helped(
        under("append", [], ROOMY, **HELPERS), calls(("delegate", {"task": "he"})), [2], calls(("win", {}))
    )
    assert [outcome.error for outcome in record.steps[0].tool_outcomes] == ["the helper said nothing"]
    assert "Error: the helper said nothing" in shown(record, 2)


async def test_a_reference_sees_the_tools_that_the_policy_sees() -> None:
    async with env_server(ScriptedDomain()) as server:
        with FakeEngine(reply=numbered()) as engine:
            async with toy_parts([f"127.0.0.1:{server.port}"], ready(engine)) as parts:
                work = assignment(["a"], ROOMY, Source.REFERENCE, "r-1", reference=1)
                work = replace(work, context=ContextPolicy("append", HELPERS))
                theirs = await run_rollout(work, parts, Wait())
                own = await run_rollout(replace(under("append", ["a"], ROOMY, **HELPERS), rollout_id="r-2"), parts, Wait())
    assert full_prompt(theirs, 0).tolist() == full_prompt(own, 0).tolist()
    assert "delegate" in shown(theirs, 0)


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
    """Behind a helper's last words nothing was answered; where it ran out of turns its last answer stands."""
    delegate, once = calls(("delegate", {"task": "he"})), Limits(1, 6000, 20.0)
    record, _, _ = await helped(under("append", [], once, **HELPERS), delegate, [7, 2])
    assert (record.status, record.flags, len(record.tail_ids)) == (Status.TRUNCATED, ("turn_limit",), 0)
    record, _, _ = await helped(under("append", [], once, **HELPERS), delegate, *[calls(("dig", {}))] * 3)
    assert (record.status, record.flags) == (Status.TRUNCATED, ("turn_limit",))
    assert b"".join(CODEC.pieces[i] for i in record.tail_ids) == b"\n<|im_start|>tool\ndig done<|im_end|>\n"
    assert segments(record)[1].tail == len(record.tail_ids)  # the helper's


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
    assert "[Earlier turns that are not shown: 2. They come to this:]\nhello<|im_end|>" in shown(record, 4)
    assert "x" * 300 not in shown(record, 5)
