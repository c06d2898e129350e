"""The record of a rollout while it is written: what is refused, what is masked, what a failure takes back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.chat import EMPTY, Context
from actors.history import Beginning, History, Prompt, Rules
from actors.tape import Sampled, Tape
from actors.toolcalls.turns import Turn, TurnParser
from common.convert import trajectory_bytes, trajectory_parse
from common.record import segments
from common.types import (
    Action,
    ActionKind,
    Finish,
    Limits,
    Message,
    Observation,
    Status,
    StepKind,
    ToolCall,
    ToolOutcome,
    VersionRun,
    spans_of,
)
from common.validate import RecordError
from tests.actors.servers import assignment
from tests.actors.toy import VOCABULARY, toy_chat


def first(context: Context) -> Prompt:
    return Prompt(context.ids, -1, 0, context)


def toy_history(*messages: Message, limit: int = 9999) -> History:
    return History(toy_chat(), Rules(), Beginning("", "", messages or (Message("user", "he"),)), limit)


def test_failure_takes_back_rewards_and_the_environments_metrics() -> None:
    tape = Tape(assignment(["he"]))
    turn = TurnParser(toy_chat().codec, 2).parse([5, 2], Finish.STOP, 0)
    tape.append(toy_history().begin(), Sampled([5, 2], [-0.5, -0.5], [VersionRun(0, 1, "e", "main")], Finish.STOP), turn, {})
    tape.observe(0, Observation((), 0.5, Status.RUNNING, {"success": 1.0}), 0.1)
    tape.fail("the disk is full")
    record = tape.trajectory(VOCABULARY)
    assert record.flags == ("reason:the disk is full",)
    assert len(record.steps) == 1
    assert record.total_reward == 0
    assert "success" not in record.metrics


def test_002_a_turn_with_unequal_arrays_is_refused_whole() -> None:
    tape = Tape(assignment(["he"]))
    turn = TurnParser(toy_chat().codec, 2).parse([5, 6, 7, 2], Finish.STOP, 0)
    with pytest.raises(RecordError, match=r"r-1 .*4 action ids, 5 logprobs"):
        tape.append(first(EMPTY), Sampled([5, 6, 7, 2], [-0.5] * 5, [], Finish.STOP), turn, {})
    assert tape.steps == []
    assert tape.counts["turns"] == 0


def test_014_large_ids_survive_the_record() -> None:
    ids = [0, 65535, 65536, 151643, 151645]
    tape = Tape(assignment(["he"]))
    codec = toy_chat().codec
    turn = TurnParser(codec, 2).parse([5] * 5, Finish.STOP, 0)
    tape.append(first(EMPTY), Sampled(ids, [-0.5] * 5, [VersionRun(0, 1, "e", "main")], Finish.STOP), turn, {})
    tape.end(Status.TERMINATED)
    assert trajectory_parse(trajectory_bytes(tape._record())).steps[0].action_ids.tolist() == ids
    with pytest.raises(OverflowError):
        tape.append(first(EMPTY), Sampled([2**31], [-0.5], [], Finish.STOP), turn, {})


def test_004_007_only_what_was_sampled_has_a_mask() -> None:
    """A demonstration in the prompt has none, nor has what stands between a turn and the next."""
    history = toy_history(Message("user", "he"), Message("assistant", "heh"), Message("user", "he"))
    tape, opening = Tape(assignment(["he", "he"])), history.begin()
    for index, prompt in enumerate((opening, None)):
        prompt = prompt or history.show(history.next_view())
        turn = TurnParser(toy_chat().codec, 2).parse([7, 2], Finish.STOP, 0)
        tape.append(prompt, Sampled([7, 2], [-0.5, -0.5], [VersionRun(0, 1, "e", "main")], Finish.STOP), turn, {})
        history.stored(prompt, [7, 2], index)
        history.turn([7, 2], turn.spans, [Message("tool", "he")])
    tape.end(Status.TERMINATED)
    (segment,) = segments(tape.trajectory(VOCABULARY))
    start = len(opening)
    assert segment.ids[start:].tolist() == [7, 2, 4, 1, 14, 4, 5, 2, 4, 1, 13, 4, 7, 2]
    assert segment.mask.tolist() == [False] * start + [True] * 2 + [False] * 10 + [True] * 2


def test_a_record_that_breaks_a_rule_is_failed_before_it_leaves() -> None:
    tape, chat = Tape(assignment(["he"])), toy_chat()
    turn = TurnParser(chat.codec, 2).parse([5, 2], Finish.STOP, 0)
    sampled = Sampled([5, 2], [-0.5, math.nan], [VersionRun(0, 1, "e", "main")], Finish.STOP)
    tape.append(first(chat.opening("", "", [Message("user", "he")])), sampled, turn, {})
    tape.end(Status.TERMINATED)
    record = tape.trajectory(VOCABULARY)
    assert (record.status, record.steps) == (Status.FAILED, ())
    assert record.flags == ("reason:record:finite_logprobs: step 0: logprob nan of action token 1",)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 355), min_size=1, max_size=12), st.text("he<|im_end|>", max_size=12)),
        min_size=1,
        max_size=5,
    )
)
def test_001_any_sampled_ids_stand_in_the_record_as_they_were(dialogue: list[tuple[list[int], str]]) -> None:
    """The prefix property, too: each prompt begins with the one before it and the turn sampled from it."""
    history, tape = toy_history(), Tape(assignment(["he"], Limits(99, 9999, 1.0)))
    parser, prompt, before = TurnParser(toy_chat().codec, 2), history.begin(), []
    for index, (ids, text) in enumerate(dialogue):
        assert prompt.ids[: len(before)].tolist() == before
        sampled = Sampled(list(ids), [-0.5] * len(ids), [VersionRun(0, 1, "e", "main")], Finish.STOP)
        turn = parser.parse(ids, Finish.STOP, index)
        tape.append(prompt, sampled, turn, {})
        before = [*prompt.ids.tolist(), *ids]
        history.stored(prompt, ids, index)
        history.turn(ids, turn.spans, [Message("tool", text)])
        prompt = history.show(history.next_view())
    tape.end(Status.TRUNCATED, "turn_limit", tail=prompt.context)
    record = tape.trajectory(VOCABULARY)
    assert record.status == Status.TRUNCATED
    (row,) = segments(record)
    for index, (ids, _) in enumerate(dialogue):
        assert row.ids[row.step_of == index].tolist() == ids
        assert row.mask[row.step_of == index].all()
    assert row.mask.sum() == sum(len(ids) for ids, _ in dialogue)
    assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)


def test_the_record_names_the_stage_of_its_curriculum() -> None:
    staged, plain = Tape(replace(assignment([]), stage=2)), Tape(assignment([]))
    for tape in (staged, plain):
        tape.fail("the disk is full")
    assert [tape.trajectory(VOCABULARY).metrics.get("stage") for tape in (staged, plain)] == [2.0, None]


def test_calls_are_counted_as_made_as_unparsed_and_as_answered() -> None:
    """Two calls, one of which could not be read; a turn without; a call in a summary, which is text; one of a sub-agent."""
    tape, spans = Tape(assignment(["he"])), spans_of([(2, ActionKind.TEXT)])
    good, bad = ToolCall("1", "f"), ToolCall("2", "", error="no JSON")
    turns = [(StepKind.ACT, (good, bad)), (StepKind.ACT, ()), (StepKind.SUMMARY, (good,)), (StepKind.SUBAGENT, (good,))]
    for kind, calls in turns:
        sampled = Sampled([5, 2], [-0.5, -0.5], [VersionRun(0, 1, "e", "main")], Finish.STOP)
        tape.append(first(EMPTY), sampled, Turn(Action("", calls), spans, "", 0), {}, kind)
    outcomes = (ToolOutcome("f", True, "", 0.1), ToolOutcome("", False, "no JSON", 0.0))
    tape.observe(0, Observation((), 0.0, Status.RUNNING, tool_outcomes=outcomes), 0.1)
    counted = {"turns": 2, "summaries": 1, "subagent_turns": 1, "call_turns": 2, "calls": 3, "calls_unparsed": 1}
    assert tape.counts | counted | {"calls_ok": 1, "calls_failed": 1} == tape.counts
