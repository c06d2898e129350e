"""Whole dialogues against what transformers makes of them: where the record reads as the model's own template would write it,
and where it cannot, because the template rewrites what was said before.

`UNSTABLE` lists the second kind by chat format. The table is asserted from both sides, with a dialogue of each shape, and over
random dialogues of any ids and any answers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from actors.codec import decode
from actors.raw import RawChat
from actors.toolcalls import FORMATS
from common.types import Action, ContextKind, Message, ToolCall
from tests.actors.servers import TINY
from tests.actors.toolbox import Model, recorded, row
from tests.real.conftest import FAMILIES

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Ünï <code>", "parameters": {"type": "object", "properties": {}}},
}
LOOK = ToolCall("", "look", {"at": "a <b>, é"})
R = "<think>\nI add.\n</think>\n\n"


@dataclass(frozen=True)
class Turn:
    """What was sampled, as text or as ids, and what was answered. `calls`: in the history they stand as structure."""

    said: str | list[int]
    answers: tuple[Message, ...]
    end: str = "end"  # or "cut", or "other": the way it ended
    calls: tuple[ToolCall, ...] = ()


def user(text: str = "And?") -> Message:
    return Message("user", text)


def tool(text: str = "a wall") -> Message:
    return Message("tool", text)


SHAPES: dict[str, list[Turn]] = {
    "a first prompt": [],
    "the user speaks": [Turn("One.", (user(),)), Turn("Two.", (user(" And\n"),))],
    "a tool answers": [Turn("One.", (tool(),)), Turn("Two.", (tool(' "a"\n'),))],
    "several tools answer": [Turn("One.", (tool(), tool("é"))), Turn("Two.", (tool(), tool(), tool("")))],
    "tools answer and the user speaks": [Turn("One.", (tool(), user(), tool()))],
    "an empty turn": [Turn("", (user(),))],
    "a turn that was cut": [Turn("One", (tool(),), "cut"), Turn("Two", (user(),), "cut")],
    "a turn with another end token": [Turn("One.", (user(),), "other")],
    "a turn with spaces around it": [Turn(" One.\n", (user(),))],
    "reasoning, then a tool": [Turn(f"{R}One.", (tool(),)), Turn(f"{R}Two.", (tool(), tool()))],
    "reasoning, then the user": [Turn(f"{R}One.", (user(),))],
    "reasoning, a tool, later the user": [Turn(f"{R}One.", (tool(),)), Turn("Two.", (user(),))],
    "reasoning, then the user in a tool's tags": [Turn(f"{R}One.", (user("<tool_response>x</tool_response>"),))],
    "reasoning in other spaces, then a tool": [Turn("<think>I add.</think>One.", (tool(),))],
    "empty reasoning, then a tool": [Turn("<think>\n\n</think>\n\nOne.", (tool(),))],
    "a closing mark alone, then a tool": [Turn("One.</think>Two.", (tool(),))],
    "a call as text": [Turn("CALL", (tool(),))],
    "a call as structure": [Turn("CALL", (tool(),), calls=(LOOK,))],
    "words and a call as structure": [Turn("One.CALL", (tool(),), calls=(LOOK,))],
    "two calls as structure": [Turn("CALLS", (tool(), tool()), calls=(LOOK, LOOK))],
    "a call as structure, sampled in other spaces": [Turn("TIGHT", (tool(),), calls=(LOOK,))],
    "a list of tools": [],
}
OTHER_END, OTHER_SPACES = "a turn with another end token", "a call as structure, sampled in other spaces"
STRUCTURES = {"a call as structure", "words and a call as structure", "two calls as structure", OTHER_SPACES}
OLD_REASONING = {"reasoning, then the user", "reasoning, a tool, later the user"}
NOT_REASONING = {  # Qwen3 writes all reasoning of the current question alike, and what it does not take for reasoning not at all
    "reasoning in other spaces, then a tool",
    "empty reasoning, then a tool",
    "a closing mark alone, then a tool",
}
UNSTABLE: dict[str, set[str]] = {
    "qwen2_5": {OTHER_END, OTHER_SPACES},
    "qwen3": {OTHER_END, OTHER_SPACES, *OLD_REASONING, *NOT_REASONING},
    # The empty reasoning of the generation prompt is in no history.
    "qwen3_no_thinking": {*SHAPES} - {"a first prompt", "a list of tools"},
    # This template shows neither tools nor calls: tools are explained in the instructions, calls are text.
    "llama3_1": {OTHER_END, "a turn with spaces around it", *STRUCTURES, "a list of tools"},
    # It drops the words before a call and refuses two of them.
    "llama3_1_tools": {OTHER_END, "a turn with spaces around it", *STRUCTURES} - {"a call as structure"},
    "smollm2": {*STRUCTURES, "a list of tools"},  # it has no other end token
}
renderer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))  # it renders templates; no ids of it are used


def theirs(model: Model, dialogue: list[dict[str, Any]], tools: list | None = None) -> str:
    """The dialogue as transformers renders it, up to the generation prompt; "" when the template refuses it."""
    known = {**model.files.special_tokens, **model.options, "date_string": "26 Jul 2024"}
    try:
        return renderer.apply_chat_template(
            dialogue, tools=tools, chat_template=model.files.template, tokenize=False, add_generation_prompt=True, **known
        )
    except TemplateError:
        return ""


def sampled_ids(model: Model, turn: Turn) -> list[int]:
    """The ids of a turn, its end too."""
    words = turn.said if isinstance(turn.said, str) else ""
    parser = model.parser()
    if words.endswith(("CALL", "CALLS")):
        text, calls = words.partition("CALL")[0], (LOOK, LOOK)[: 1 + words.endswith("S")]
        ids = parser.encode(Action(text, calls))[:-1]
    elif words == "TIGHT":
        ids = model.files.codec.encode_template(model.calls(("look", json.dumps(LOOK.arguments, separators=(",", ":")))))
    else:
        ids = model.files.codec.encode_template(words) if isinstance(turn.said, str) else turn.said
    other = sorted(model.chat.end_ids - {model.chat.end_id}) or [model.chat.end_id]
    return [*ids, *{"end": [model.chat.end_id], "cut": [], "other": other[:1]}[turn.end]]


def said_text(model: Model, ids: list[int]) -> str:
    return decode(model.files.codec, ids[: len(ids) - model.chat.ended(ids)])


def both(model: Model, task: str, turns: list[Turn], tools: list | None = None) -> tuple[str, str]:
    """The next prompt behind `turns`: as it is, and as the template would write it."""
    chat, dialogue = model.chat, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    ids = chat.opening("Be brief.", json.dumps(tools) if tools else "", [user(task)]).ids.tolist()
    for turn in turns:
        sampled = sampled_ids(model, turn)
        ids += [*sampled, *chat.bridge(chat.ended(sampled), turn.answers).ids.tolist()]
        entry: dict[str, Any] = {"role": "assistant", "content": said_text(model, sampled)}
        if turn.calls:
            entry["content"] = str(turn.said).partition("CALL")[0] if turn.said != "TIGHT" else ""
            calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
            entry["tool_calls"] = calls
        dialogue += [entry, *({"role": answer.role, "content": answer.text} for answer in turn.answers)]
    return decode(chat.codec, ids), theirs(model, dialogue, tools)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_where_templates_are_stable(families, family: str, shape: str) -> None:
    """Field bug 003, and its kind: what is not in the table reads as the template writes it, what is in it does not."""
    tools = [TOOL] if shape == "a list of tools" else None
    ours, own = both(families[family], " What is 1+1?", SHAPES[shape], tools)
    assert (ours == own) == (shape not in UNSTABLE[family])


def test_the_table_names_shapes_and_formats() -> None:
    assert set(UNSTABLE) == set(FAMILIES)
    assert set.union(*UNSTABLE.values()) <= set(SHAPES)


# ---- any dialogue ----------------------------------------------------------------------------------------------

WORDS = [*"aZ 0\n\té🙂中", "e\u0301", "\n\n", " hello", "<|im_end|>", "<|eot_id|>", "</tool_call>", "<think>", "</think>", "12"]
WORDS += ["\r\n", "\u2028", "\\", '"', "<tool_response>", "</tool_response>", "<|im_start|>system\n", "\ue0000\ue001", "{{x}}"]
texts = st.lists(st.sampled_from(WORDS), max_size=10).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
)
answers = st.lists(st.builds(Message, st.sampled_from(["tool", "tool", "user"]), texts), min_size=1, max_size=3).map(tuple)
REASONED = re.compile(r"<think>\n([^\n](?:.*[^\n])?)\n</think>\n\n(?!\n)(.*)", re.DOTALL)


def sampled_turns(model: Model) -> st.SearchStrategy[list[Turn]]:
    """Turns of any ids: of the whole vocabulary, control tokens, texts in the tokenizer's and in other spellings, reasoning."""
    codec = model.files.codec
    some = st.lists(st.integers(0, len(codec.pieces) - 1), max_size=6) | st.lists(
        st.sampled_from(sorted(codec.control.values())), max_size=2
    )
    spelled = texts.map(codec.encode_text) | texts.map(lambda text: [i for c in text for i in codec.encode_text(c)])
    marked = texts.map(codec.encode_template) | st.sampled_from([R, f"{R}One.", model.calls(("look", "{}"))]).map(
        codec.encode_template
    )
    said = st.tuples(some | spelled | marked, some | spelled | marked).map(lambda parts: parts[0] + parts[1]) | marked
    ends = st.sampled_from(["end", "end", "cut", "other"])
    turn = st.builds(Turn, said, answers, ends)
    return st.lists(turn.filter(lambda turn: bool(turn.said) or turn.end != "cut"), min_size=1, max_size=4)


def shapes_of(model: Model, turns: list[Turn]) -> set[str]:
    """Which rows of the table a dialogue belongs to."""
    found = {"the user speaks"}
    for index, turn in enumerate(turns):
        ids = sampled_ids(model, turn)
        text = said_text(model, ids)
        if model.chat.ended(ids) and ids[-1] != model.chat.end_id:
            found.add(OTHER_END)
        if text != text.strip():
            found.add("a turn with spaces around it")
        if "</think>" in text:
            later = [answer for other in turns[index:] for answer in other.answers if answer.role == "user"]
            asked = any(not re.fullmatch("<tool_response>.*</tool_response>", a.text, re.DOTALL) for a in later)
            parts = REASONED.fullmatch(text)
            plain = parts and "<think>" not in parts[1] and "</think>" not in parts[1] + parts[2]
            spaces = "reasoning, then a tool" if plain else "reasoning in other spaces, then a tool"
            found.add("reasoning, then the user" if asked else spaces)
    return found


def shown(model: Model, answer: Message) -> str:
    """An answer as the template shows it: Llama's trims, or writes JSON."""
    text = model.files.codec.spell(answer.text)
    if model.name == "llama3_1_tools" and answer.role == "tool":
        return json.dumps(text, ensure_ascii=False)[1:-1]
    return text.strip() if model.name.startswith("llama") else text


def check_record(model: Model, chat: Any, turns: list[Turn], read: Any) -> None:
    """What was sampled stands in the record as it was, and what was answered between, as `read` has it."""
    sampled = [sampled_ids(model, turn) for turn in turns]
    contexts = [chat.opening("Be brief.", "", [user("Go.")])]
    contexts += [chat.bridge(chat.ended(ids), turn.answers) for ids, turn in zip(sampled, turns, strict=True)]
    tail = chat.tail(chat.ended(sampled[-1]), turns[-1].answers)
    whole = row(recorded(contexts[:-1], sampled, model, tail))
    starts = [0, *((whole.step_of == n).argmax() + len(ids) for n, ids in enumerate(sampled))]
    for index, ids in enumerate(sampled):
        assert whole.ids[whole.step_of == index].tolist() == ids
        assert whole.mask[whole.step_of == index].all()
        begin, end = starts[index + 1], (starts[index + 2] - len(sampled[index + 1]) if index + 2 < len(starts) else None)
        between, kinds = whole.ids[begin:end], whole.kinds[begin:end]
        said = between[kinds == ContextKind.OBSERVATION].tolist()
        assert decode(model.files.codec, said) == read(turns[index].answers)
        assert not set(said) & set(model.files.codec.control.values())
    assert whole.mask.sum() == sum(map(len, sampled))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_dialogue_in_a_chat_format(families, family: str, data) -> None:
    """Field bugs 001, 003 and 011: ids as sampled, answers as given, and the template's text exactly where it is stable."""
    model = families[family]
    turns = data.draw(sampled_turns(model))
    check_record(model, model.chat, turns, lambda given: "".join(shown(model, answer) for answer in given))
    spell = model.files.codec.spell
    spelled = [
        Turn(sampled_ids(model, turn), tuple(Message(a.role, spell(a.text)) for a in turn.answers), "cut") for turn in turns
    ]
    ours, own = both(model, spell(data.draw(texts)) + ".", spelled)
    assert (ours == own) == (not shapes_of(model, spelled) & UNSTABLE[family])


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "smollm2"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_dialogue_in_raw_completion(families, family: str, data) -> None:
    """Its text is the prompt, what was sampled and the observations, one behind the other: nothing is ever rewritten."""
    model = families[family]
    chat = RawChat(model.files, "$instructions\nQ: $task\nA:", "\n$observation\n```\n", FORMATS["fenced"]())
    turns, spell = data.draw(sampled_turns(model)), model.files.codec.spell
    check_record(model, chat, turns, lambda given: "\n".join(spell(answer.text) for answer in given))
    ids, text = chat.opening("S", "", [user("T")]).ids.tolist(), "S\nQ: T\nA:"
    for turn in turns:
        sampled = sampled_ids(model, turn)
        ids += [*sampled, *chat.bridge(chat.ended(sampled), turn.answers).ids.tolist()]
        answered = "\n".join(spell(answer.text) for answer in turn.answers)
        text += decode(chat.codec, sampled) + f"\n{answered}\n```\n"
    assert decode(chat.codec, ids) == text
