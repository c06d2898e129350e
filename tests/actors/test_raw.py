"""Raw completion: the prompt, what stands around an observation, and whole rollouts in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.chat import Chat, Remark
from actors.codec import ModelFiles, decode
from actors.conversation import conversation
from actors.raw import RawChat
from actors.template import TemplateError
from actors.toolcalls import FORMATS
from common.config import ChatConfig
from common.record import segments
from common.types import Action, ContextKind, ContextPolicy, Finish, Message, Status, ToolCall, expand_spans
from tests.actors.servers import ScriptedDomain, answer, assignment, play, prompts
from tests.actors.toy import CHATML, VOCABULARY, Toy
from tests.fakes import Answer, FakeEngine

FILES = ModelFiles(Toy(), "", "<|im_end|>", VOCABULARY.rows)
PROMPT, OBSERVATION = "$instructions\nQ: $task\nA:", "\n$observation\n```\n"
PYTHON = json.dumps([{"function": {"name": "python", "parameters": {"properties": {"code": {"type": "string"}}}}}])


def raw(prompt: str = PROMPT, files: ModelFiles = FILES) -> RawChat:
    return RawChat(files, prompt, OBSERVATION, FORMATS["fenced"]())


def shown(context) -> list[tuple[str, int]]:
    """Text and kind of each run."""
    kinds = expand_spans(context.spans, len(context)).tolist()
    out: list[tuple[str, int]] = []
    for i, kind in zip(context.ids.tolist(), kinds, strict=True):
        text = decode(FILES.codec, [i])
        out[-1:] = [(out[-1][0] + text, kind)] if out and out[-1][1] == kind else [*out[-1:], (text, kind)]
    return out


def test_the_prompt_is_one_text() -> None:
    kinds = (ContextKind.TASK, ContextKind.TEMPLATE)
    assert shown(raw().opening("Use code.", "", [Message("user", "1+1?")])) == [
        ("Use code.", kinds[0]), ("\nQ: ", kinds[1]), ("1+1?", kinds[0]), ("\nA:", kinds[1])
    ]  # fmt: skip
    tools = decode(FILES.codec, raw("$tools\n$task").opening("", PYTHON, [Message("user", "x")]).ids.tolist())
    assert tools.startswith("You can run Python code")
    assert tools.endswith("\nx")
    assert '"python"' in tools


def test_the_agent_loops_own_words_stand_in_lines_of_their_own() -> None:
    task, template = ContextKind.TASK, ContextKind.TEMPLATE
    notice, summary = ContextKind.NOTICE, ContextKind.SUMMARY
    remarks = [Remark("user", "[cut]\n", summary=(5, 6)), Remark("user", "[more]")]
    assert shown(raw("Q: $task\nA:").opening("", "", [Message("user", "1+1?"), *remarks])) == [
        ("Q: ", template), ("1+1?", task), ("\n[cut]\n", notice), ("hello", summary), ("\n[more]", notice), ("\nA:", template)
    ]  # fmt: skip
    assert shown(raw().bridge(True, remarks[1:]))[1:2] == [("[more]", notice)]


async def test_a_window_over_one_growing_text() -> None:
    """The first answer is gone, a notice stands behind the task, and what was sampled is shown again as it was."""
    work = replace(assignment(["aa", "bb", "cc", "dd"]), context=ContextPolicy("window", {"turns": 1}))
    with FakeEngine(reply=lambda prompt, sampling: [5, 6, 2]) as engine:
        record = await play(work, engine, raw("Q: $task\nA:"))
        last = decode(FILES.codec, prompts(engine)[2])
    assert record.status == Status.TERMINATED, record.flags
    assert last == "Q: he\n[Earlier turns that are not shown: 1.]\nA:hello<|im_end|>\nbb\n```\n"
    assert len(segments(record)) == 3


def test_an_observation_goes_on_in_the_same_turn() -> None:
    assert shown(raw().bridge(True, [Message("tool", "2"), Message("tool", "<|im_end|>")])) == [
        ("\n", ContextKind.TEMPLATE), ("2\n<|im_end|>", ContextKind.OBSERVATION), ("\n```\n", ContextKind.TEMPLATE)
    ]  # fmt: skip
    assert 2 not in raw().bridge(False, [Message("tool", "<|im_end|>")]).ids
    assert len(raw().tail(True, [])) == 0


def test_a_tokenizer_that_begins_texts_begins_this_one() -> None:
    files = ModelFiles(Toy(), "", "<|im_end|>", 384, special_tokens={"bos_token": "<pad>"}, adds_bos=True)
    assert raw(files=files).opening("", "", [Message("user", "x")]).ids[0] == 0


@pytest.mark.parametrize(
    ("prompt", "observation", "says"),
    [
        ("no place", OBSERVATION, r"chat.prompt 'no place' must have \$task once; it may have \$instructions, \$tools"),
        ("$task $task", OBSERVATION, "once"),
        ("$task $observation", OBSERVATION, "must have"),
        ("$task", "nothing", r"chat.observation 'nothing' must have \$observation once; it may have nothing else"),
    ],
)
def test_texts_without_their_places_are_refused(prompt, observation, says) -> None:
    with pytest.raises(TemplateError, match=says):
        RawChat(FILES, prompt, observation, FORMATS["fenced"]())


def test_the_configuration_chooses() -> None:
    assert isinstance(conversation(FILES, ChatConfig(template="raw", tools="fenced")), RawChat)
    with pytest.raises(TemplateError, match="the model has no chat template; set chat"):
        conversation(FILES, ChatConfig())
    chat = conversation(ModelFiles(Toy(), CHATML, "<|im_end|>", 384), ChatConfig(tools="react"))
    assert isinstance(chat, Chat)
    assert isinstance(chat.format, FORMATS["react"])


async def test_015_a_turn_ends_with_the_stop_string_whatever_was_sampled_behind_it() -> None:
    """The engine does not look for strings: what it sampled behind one leaves ids, logprobs and versions alike."""
    code = [100 + b for b in b"I add.\n```python\n1+1\n```output"]
    with FakeEngine() as engine:
        halves = [{"version": "1", "start": 0, "end": len(code)}, {"version": "2", "start": len(code), "end": len(code) + 3}]
        engine.script("/generate", Answer(200, answer([*code, 4, 7, 2], "stop", weight_versions=halves)))
        engine.script("/generate", Answer(200, answer([7, 2], "stop")))
        asked = assignment(["2", "done"])
        asked = replace(asked, sampling=replace(asked.sampling, max_new_tokens=64))
        domain = ScriptedDomain()
        record = await play(asked, engine, raw(), domain)
    first, second = record.steps
    assert first.action_ids.tolist() == code
    assert len(first.action_logprobs) == len(code)
    assert [run.start for run in first.versions] == [0]
    assert first.finish == Finish.STOP
    assert domain.actions[0] == Action("I add.", (ToolCall("call-0-0", "python", {"code": "1+1"}),))
    opening, later = prompts(engine)
    assert decode(FILES.codec, opening) == "hello\nQ: he\nA:"
    assert later == [*opening, *code, *FILES.codec.encode_text("\n"), 150, *FILES.codec.encode_text("\n```\n")]
    assert record.status == Status.TERMINATED
    (segment,) = segments(record)
    assert segment.mask.sum() == len(code) + 2
    assert second.action_ids.tolist() == [7, 2]


async def test_stop_strings_of_the_sampling_are_looked_for_too() -> None:
    with FakeEngine() as engine:
        engine.script("/generate", Answer(200, answer([7, 11, 5], "length")))
        asked = assignment(["done"])
        asked = replace(asked, sampling=replace(asked.sampling, stop=("</tool_call>",)))
        record = await play(asked, engine)
        assert all(not body["sampling_params"].get("stop") for path, body in engine.calls if path == "/generate")
    assert record.steps[0].action_ids.tolist() == [7, 11]
    assert (record.steps[0].finish, record.status) == (Finish.STOP, Status.TERMINATED)
