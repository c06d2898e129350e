"""Bugs that other stacks have had in reading tool calls, as tests over any `model` (a fixture): whole rollouts, real tools.

The numbers are those of the log they come from.
"""

from __future__ import annotations

import json
import re

import pytest

from common.types import Action, Finish, Status, ToolCall
from tests.actors.toolbox import Model, ToolboxDomain, row, sampled

X = '{"x": 1}'


async def told(model: Model, *turns: str) -> tuple[list[tuple[str, dict]], str]:
    """Which tools ran in `turns`, and all that the policy was told after the first of them. A last turn says "bye"."""
    domain = ToolboxDomain()
    ids = [model.turn(turn) for turn in (*turns, "bye")]
    record, prompts = await sampled(model, ids, domain)
    assert record.status == Status.TERMINATED
    assert len(prompts) == len(ids)  # the turn behind a bad one was sampled
    assert [step.action_ids.tolist() for step in record.steps] == ids
    assert domain.ran.pop() == ("", {"text": "bye"})
    return domain.ran, "".join(model.text(step.context_ids) for step in record.steps[1:])


async def test_019_malformed_json_is_answered_and_the_rollout_goes_on(model: Model) -> None:
    """Field bug 019."""
    ran, said = await told(model, model.calls(("f", '{"a":1,}')))
    assert ran == []
    assert "Error: the call is not valid JSON" in said


BROKEN = ['{"path": "/tmp/x', '{"path":NaN}', '{"path":1e999}', '{"path":"a","path":"b"}', '{"path":-Infinity}', '"x"', "[1]"]


@pytest.mark.parametrize("body", BROKEN)
async def test_020_what_cannot_be_read_is_never_run_with_nothing(model: Model, body: str) -> None:
    """Field bug 020: nor with half of it. Python's own loader accepts NaN, 1e999 and a key that stands twice."""
    ran, said = await told(model, model.calls(("delete", body)))
    assert ran == []
    assert "Error: " in said


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_022_arguments_that_arrive_as_a_string(model: Model, times: int) -> None:
    """Field bug 022: decoded at most twice; an argument that is a string stays one."""
    body = json.dumps({"id": '{"u": "x"}'})
    for _ in range(times):
        body = json.dumps(body)
    ran, said = await told(model, model.calls(("get", body)))
    assert ran == ([("get", {"id": '{"u": "x"}'})] if times < 3 else [])
    assert ("Error: " in said) == (times == 3)


@pytest.mark.parametrize("body", ['""', '"  \\n"', "null", "absent"])
async def test_023_nothing_is_no_arguments(model: Model, body: str) -> None:
    """Field bug 023: then the tool says what it needs."""
    now, get = model.calls(("now", body)), model.calls(("get", body))
    if body == "absent":
        now, get = (re.sub(r', "(arguments|parameters)": absent', "", text) for text in (now, get))
    ran, said = await told(model, now, get)
    assert ran == [("now", {})]
    assert "Error: get needs the argument id" in said


@pytest.mark.parametrize(
    ("written", "value"),
    [("Ume\\u00e5", "Umeå"), ("Umeå", "Umeå"), ("\\ud83d\\ude42", "🙂"), ("Ume\\u0000e5", "Ume\x00e5"), ("\\ud83d", None)],
)
async def test_024_escapes_are_decoded_once_and_half_a_pair_is_an_error(model: Model, written: str, value: str | None) -> None:
    """Field bug 024: over the wire, whose strings must be UTF-8; NUL is delivered."""
    ran, said = await told(model, model.calls(("get", f'{{"id": "{written}"}}')))
    assert ran == ([("get", {"id": value})] if value is not None else [])
    assert ("surrogate" in said) == (value is None)


@pytest.mark.parametrize("whole", [0, 1])
async def test_026_nothing_of_a_turn_that_was_cut_is_run(model: Model, whole: int) -> None:
    """Field bug 026: neither its whole call nor the half one; the rollout is truncated, no turn is tried again."""
    text = model.calls(*[("f", X)] * whole, ("now", "{}"))
    ids = model.files.codec.encode_template(text)
    cut = ids[: ids.index(model.files.codec.encode_template("now")[0])] if whole == 0 else ids[:-3]
    assert model.parser().parse(cut, Finish.LENGTH, 0).action.tool_calls == ()
    domain = ToolboxDomain()
    record, prompts = await sampled(model, [[*cut, *ids, *ids]], domain, max_new_tokens=len(cut))
    assert (domain.ran, len(prompts), record.status, record.flags) == ([], 1, Status.TRUNCATED, ("length",))
    assert row(record).ids[row(record).mask].tolist() == cut
    assert record.steps[0].finish == Finish.LENGTH


async def test_027_calls_in_the_reasoning_are_not_calls(model: Model) -> None:
    """Field bug 027: and reasoning that never closes has none at all."""
    rehearsal = "<think>try " + model.calls(("delete", '{"path": "/"}')) + " [1]"
    ran, _ = await told(model, f"{rehearsal}</think>{model.calls(('f', X))}")
    assert ran == [("f", {"x": 1})]
    domain = ToolboxDomain()
    record, _ = await sampled(model, [model.turn(rehearsal)], domain)
    assert domain.ran == [("", {"text": ""})]
    assert record.metrics["format_errors"] == 1


async def test_028_one_bad_call_does_not_drop_the_others(model: Model) -> None:
    """Field bug 028: nor does a tool that does not exist. Where calls have no marks around them, nobody can say where a broken
    one ends: then what stands before it is run."""
    ran, said = await told(model, model.calls(("f", X), ("nothing", "{}"), ("f", '{"x": 2}')))
    assert ran == [("f", {"x": 1}), ("f", {"x": 2})]
    assert said.count("Error: ") == 1
    ran, said = await told(model, model.calls(("f", X), ("f", '{"x": }'), ("f", '{"x": 2}')))
    assert ran == [("f", {"x": 1})] + [("f", {"x": 2})] * (not model.bare_calls)
    assert said.count("Error: ") == 1


def test_028_token_borders_change_nothing(model: Model) -> None:
    """Field bug 028: text around a call is kept, wherever its tokens begin and end."""
    text = "A" + model.calls(("f", X)) + "B" if not model.bare_calls else model.calls(("f", X))
    codec, parser = model.files.codec, model.parser()
    action = Action("" if model.bare_calls else "A\nB", (ToolCall("call-3-0", "f", {"x": 1}),))
    marks = [mark for mark in ("<tool_call>", "</tool_call>") if mark in codec.control]
    parts = re.split("(" + "|".join(marks) + ")", text) if marks else [text]
    for cut, part in enumerate(parts):
        for at in range(1, len(part)) if part not in marks else ():
            ids = []
            for n, other in enumerate(parts):
                halves = (other[:at], other[at:]) if n == cut else (other,)
                ids += [codec.control[other]] if other in marks else [i for half in halves for i in codec.encode_text(half)]
            assert parser.parse([*ids, model.chat.end_id], Finish.STOP, 3).action == action, (cut, at)
