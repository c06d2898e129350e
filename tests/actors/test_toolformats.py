"""Every format of tool calls: what it reads, what it refuses, what holds for all of them."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.toolcalls import FORMATS, format_of
from actors.toolcalls.arguments import Schemas
from actors.toolcalls.turns import Turn, TurnParser
from common.config import ChatConfig
from common.types import Action, ActionKind, Finish, ToolCall, expand_spans
from tests.actors.test_toolcalls import REAL, calls, errors
from tests.actors.toy import Toy

R, C, T = (int(kind) for kind in (ActionKind.REASONING, ActionKind.CALL, ActionKind.TEXT))


def schema(name: str, required: int = 1, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:required]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


MOVE = schema("move", to={"type": "string", "enum": ["left", "right"]})
SEARCH = schema("search", 1, query={"type": "string"}, limit={"type": "integer"})
LOOK = schema("look", 0)
STORE = schema(
    "store", 3, key={"type": "string"}, items={"type": "array"}, deep={"anyOf": [{"type": "object"}, {"type": "null"}]}
)
PYTHON = schema("python", code={"type": "string"})
ALL = Schemas.of([MOVE, SEARCH, LOOK, STORE, PYTHON])


def parse(name: str, text: str | bytes, schemas: Schemas = ALL, finish: Finish = Finish.STOP, opened: bool = False) -> Turn:
    """`text` byte by byte, then the end token: no token border can matter."""
    data = text if isinstance(text, bytes) else text.encode()
    return TurnParser(Toy(), 2, opened, FORMATS[name]()).parse([*(100 + b for b in data), 2], finish, 3, schemas)


def hermes(name: str, arguments: str) -> Turn:
    return parse("hermes", f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>')


def kinds(turn: Turn, length: int) -> str:
    return "".join(" RCT"[kind] for kind in expand_spans(turn.spans, length + 1).tolist())


# ---- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ['"{\\"query\\": \\"x\\"}"', json.dumps(json.dumps(json.dumps({"query": "x"})))])
def test_022_arguments_in_a_string_are_decoded(body) -> None:
    assert calls(hermes("search", body)) == [("search", {"query": "x"})]


def test_022_no_more_than_twice_and_only_where_the_schema_wants_it() -> None:
    thrice = json.dumps(json.dumps(json.dumps(json.dumps({"query": "x"}))))
    assert "must be a JSON object" in errors(hermes("search", thrice))[0]
    text = '{"query": "[1]"}'
    assert calls(hermes("search", text)) == [("search", {"query": "[1]"})]
    text = '{"key": "{}", "items": "[1, 2]", "deep": "{\\"a\\": 1}"}'
    assert calls(hermes("store", text)) == [("store", {"key": "{}", "items": [1, 2], "deep": {"a": 1}})]
    text = '{"items": "[1, NaN]", "deep": "[1"}'
    assert calls(hermes("store", text)) == [
        ("store", {"items": "[1, NaN]", "deep": "[1"})  # the environment refuses them
    ]


@pytest.mark.parametrize("body", ['"arguments": ""', '"arguments": "  \\n"', '"arguments": null', '"x": 1'])
def test_023_nothing_is_no_arguments(body) -> None:
    assert calls(parse("hermes", f'<tool_call>{{"name":"look", {body}}}</tool_call>')) == [("look", {})]


@pytest.mark.parametrize(
    ("written", "value"),
    [("Ume\\u00e5", "Umeå"), ("Umeå", "Umeå"), ("\\ud83d\\ude42", "🙂"), ("Ume\\u0000e5", "Ume\x00e5")],
)
def test_024_escapes_are_decoded_and_nothing_is_stripped(written, value) -> None:
    turn = parse("hermes", f'<tool_call>{{"name":"search","arguments":{{"query":"{written}"}}}}</tool_call>')
    assert calls(turn) == [("search", {"query": value})]


def test_020_what_cannot_be_parsed_is_never_executed() -> None:
    turn = parse("hermes", '<tool_call>{"name":"delete","arguments":{"path": "/tmp/x</tool_call>')
    assert (calls(turn), len(errors(turn))) == ([], 1)


# ---- Llama 3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "search", "parameters": {"query": "a}"}}', [("search", {"query": "a}"})]),
        ('<|python_tag|>{"name": "look", "parameters": {}}', [("look", {})]),
        ('{"name": "look"}; {"name": "move", "parameters": {"to": "left"}}', [("look", {}), ("move", {"to": "left"})]),
        (
            '{"type": "function", "name": "move", "arguments": {"to": "left"}}\n{"name": "look"}',
            [("move", {"to": "left"}), ("look", {})],
        ),
        ('I call {"name": "look"}', []),  # a call is the whole turn, or stands behind the tag
        ('{"answer": 3}', []),
        ("{x}", []),
    ],
)
def test_llama3(text, found) -> None:
    turn = parse("llama3", text)
    assert (calls(turn), errors(turn)) == (found, [])
    assert turn.action.text == ("" if found else text)


def test_llama3_text_before_the_tag_and_what_is_broken() -> None:
    turn = parse("llama3", 'I look.<|python_tag|>{"name": "look", "parameters": {}}')
    assert (turn.action.text, calls(turn)) == ("I look.", [("look", {})])
    broken = parse("llama3", '{"name": "look"}; {"name": "search", "parameters": {"query": }}')
    assert (calls(broken), len(errors(broken))) == ([("look", {})], 1)
    assert "not valid JSON" in errors(parse("llama3", '{"name": "search", "parameters": {"query": "a"'))[0]
    assert "not valid JSON" in errors(parse("llama3", "<|python_tag|>print(1)"))[0]


# ---- Qwen3-Coder -----------------------------------------------------------------------------------------------


CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def test_coder_values_take_the_type_of_their_schema() -> None:
    body = "<parameter=query>\n12\n</parameter>\n<parameter=limit>\n12\n</parameter>\n"
    assert calls(parse("qwen3_coder", CODER.format("search", body))) == [("search", {"query": "12", "limit": 12})]
    body = '<parameter=key>a</parameter><parameter=items>[1, "2"]</parameter><parameter=deep>null</parameter>'
    assert calls(parse("qwen3_coder", CODER.format("store", body))) == [("store", {"key": "a", "items": [1, "2"], "deep": None})]
    assert calls(parse("qwen3_coder", CODER.format("look", ""))) == [("look", {})]


def test_coder_a_text_that_may_be_missing() -> None:
    optional = Schemas.of([schema("note", 0, text={"anyOf": [{"type": "string"}, {"type": "null"}]})])
    body = "<parameter=text>\n{}\n</parameter>\n"
    for written, value in (("null", None), ("None", None), ("nothing", "nothing")):
        assert calls(parse("qwen3_coder", CODER.format("note", body.format(written)), optional)) == [("note", {"text": value})]


def test_coder_values_may_hold_anything() -> None:
    code = '\nif x < 2:\n    print("</parameter> <tool_call>", "</function>")\n\n'
    body = f"<parameter=code>\n{code}\n</parameter>\n"
    assert calls(parse("qwen3_coder", CODER.format("python", body))) == [("python", {"code": code})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CODER.format("search", "<parameter=limit>\nten\n</parameter>\n"), "search: parameter limit must be integer: "),
        (CODER.format("search", "<parameter=limit>\n1.5\n</parameter>\n"), "parameter limit must be integer, not '1.5'"),
        (CODER.format("search", "<parameter=query>a</parameter><parameter=query>b</parameter>"), "query stands twice"),
        (
            "<tool_call><function=search><parameter=query>a</function></tool_call>",
            "parameter query of search has no </parameter>",
        ),
        ("<tool_call><function=look></tool_call>", "function look has no </function>"),
        ("<tool_call>look</tool_call>", "the call has no function"),
        ("<tool_call><function=look></function>", "the call has no </tool_call>"),
    ],
)
def test_coder_errors_say_what_to_write(text, says) -> None:
    good = CODER.format("look", "")
    turn = parse("qwen3_coder", f"{text}{good}" if "</tool_call>" in text else text)
    assert calls(turn) == ([("look", {})] if "</tool_call>" in text else [])
    assert len(errors(turn)) == turn.problems == 1
    assert says in errors(turn)[0]


# ---- fenced code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    ["\n```", "\n```output", "\n```\n", "\n```\n```output", "\n```  \n\n"],
    ids=["fence", "stop", "newline", "both", "blank"],
)
def test_fenced_code_at_the_end_is_run(end) -> None:
    turn = parse("fenced", "First\n```python\nx = 1\nprint(x)" + end)
    assert (turn.action.text, calls(turn)) == ("First", [("python", {"code": "x = 1\nprint(x)"})])


@pytest.mark.parametrize(
    "text", ["```python\n1\n```\nSo it is 1.", "```python\nprint(1)", "no code", "x ```python\n1\n```", "```sh\nls\n```"]
)
def test_fenced_code_elsewhere_is_an_answer(text) -> None:
    assert parse("fenced", text).action == Action(text)


def test_fenced_the_last_block_and_fences_inside_strings() -> None:
    turn = parse("fenced", "```python\na\n```\nand\n```python\nprint('```')\n```output")
    assert calls(turn) == [("python", {"code": "print('```')"})]
    assert turn.action.text == "```python\na\n```\nand"
    assert calls(parse("fenced", "```python\n```")) == [("python", {"code": ""})]


def test_fenced_code_goes_to_the_tool_that_takes_it() -> None:
    text = "```python\n1+1\n```"
    assert calls(parse("fenced", text, Schemas.of([schema("run", source={"type": "string"})]))) == [("run", {"source": "1+1"})]
    assert calls(parse("fenced", text, Schemas())) == [("python", {"code": "1+1"})]
    assert errors(parse("fenced", text, Schemas.of([MOVE, LOOK]))) == ["no tool here runs code; tools: move, look"]


# ---- answers ---------------------------------------------------------------------------------------------------


ONE = Schemas.of([MOVE])


def test_answer_actions_run_in_order() -> None:
    text = "<think>I go</think> <answer>Left || right</answer>"
    turn = parse("answer", text, ONE)
    assert (turn.reasoning, turn.action.text) == ("I go", "")
    assert calls(turn) == [("move", {"to": "left"}), ("move", {"to": "right"})]
    assert kinds(turn, len(text)) == "R" * 19 + "T" + "C" * (len(text) - 20) + "T"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("look", [("look", {})]),
        ("Look()", [("look", {})]),
        ("move(left) || search[a (b)]", [("move", {"to": "left"}), ("search", {"query": "a (b)"})]),
        ('search("12")', [("search", {"query": "12"})]),
    ],
)
def test_answer_names_its_tool(body, found) -> None:
    turn = parse("answer", f"<answer>{body}</answer>")
    assert (calls(turn), errors(turn)) == (found, [])


def test_answer_errors() -> None:
    assert errors(parse("answer", "<answer>left")) == ["the answer has no </answer>"]
    assert errors(parse("answer", "<answer> || </answer>")) == ["the answer is empty"]
    assert "'left' names no tool" in errors(parse("answer", "<answer>left</answer>"))[0]
    assert errors(parse("answer", "<answer>store(x)</answer>")) == [
        "store takes key, items, deep: one text does not say which is which"
    ]
    twice = parse("answer", "<answer>left</answer><answer>right</answer>", ONE)
    assert (calls(twice), errors(twice)) == ([("move", {"to": "left"})], ["only the first answer of a turn is read"])
    assert parse("answer", "left", ONE).action == Action("left")
    assert parse("answer", "<think>a</think><answer>42</answer>", Schemas()).action == Action("42")


# ---- ReAct -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Thought: t\nAction: look", [("look", {})]),
        ("Thought:\nt\n\nAction:\nmove(left)", [("move", {"to": "left"})]),
        ("Thought: t\nAction: Search[a]", [("search", {"query": "a"})]),
        ('Thought: t\nAction: search\nAction Input: {"query": "a\\nb", "limit": 3}', [("search", {"query": "a\nb", "limit": 3})]),
        ("Thought: t\nAction: move\nAction Input: right", [("move", {"to": "right"})]),
        ("Thought: t\nAction: look\nObservation: made up\nAction: move(left)", [("look", {})]),
    ],
)
def test_react(text, found) -> None:
    turn = parse("react", text)
    assert (calls(turn), errors(turn), turn.reasoning, turn.action.text) == (found, [], "t", "")
    border = text.index("\n\nAction") if "\n\nAction" in text else text.index("\nAction")
    assert kinds(turn, len(text)).startswith("R" * border + "C" if "\n\n" not in text else "R" * border)


def test_react_needs_one_action() -> None:
    assert errors(parse("react", "Thought: t\nAction: look\nAction: look"))[0].startswith("the turn has 2 actions")
    assert "text stands behind the action" in errors(parse("react", "Action: look\nand then move"))[0]
    assert "is not a JSON object" in errors(parse("react", 'Action: search\nAction Input: {"query": }'))[0]
    assert parse("react", "Thought: t\nFinal Answer: 42").action == Action("42")
    assert parse("react", "just talk").action == Action("just talk")


def test_react_one_tool_takes_the_line() -> None:
    act = Schemas.of([schema("act", command={"type": "string"})])
    assert calls(parse("react", "Thought: t\nAction: go to desk 1", act)) == [("act", {"command": "go to desk 1"})]


# ---- all of them -----------------------------------------------------------------------------------------------

WRITTEN = {
    "hermes": '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    "llama3": '<|python_tag|>{"name": "look", "parameters": {}}',
    "qwen3_coder": CODER.format("look", ""),
    "fenced": "\n```python\n1\n```",
    "answer": "<answer>look</answer>",
    "react": "\nAction: look",
}


@pytest.mark.parametrize("name", FORMATS)
def test_026_027_no_call_from_a_cut_turn_nor_from_reasoning(name) -> None:
    text = WRITTEN[name]
    assert len(calls(parse(name, text))) == 1
    assert parse(name, text, finish=Finish.LENGTH).action.tool_calls == ()
    assert parse(name, f"<think>{text}", finish=Finish.STOP).action == Action("")
    assert parse(name, text, opened=True).problems == 1
    rehearsed = parse(name, f"<think>{text}</think>{text}")
    assert len(calls(rehearsed)) == 1
    assert rehearsed.problems == 0


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_explained_shows_the_tools(name) -> None:
    text = FORMATS[name]().explain([MOVE, LOOK])
    assert '"move"' in text
    assert '"look"' in text


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from([*"aA ={}[]()\n`<>/|;:\"'\\", *WRITTEN.values(), "<think>", "</think>"])),
)
def test_any_turn_parses_and_every_token_has_a_kind(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    turn = parse(name, text)
    assert set(kinds(turn, len(text))) <= set("RCT")
    assert parse(name, text).action == turn.action
    ids = REAL.encode_text(text)
    end = REAL.control["<|im_end|>"]
    real = TurnParser(REAL, end, False, FORMATS[name]()).parse([*ids, end], Finish.STOP, 3, ALL)
    assert (expand_spans(real.spans, len(ids) + 1) > 0).all()


words = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|`[]()\"'{}\r\n"), min_size=1, max_size=12
).map(str.strip)


@settings(max_examples=150)
@given(st.sampled_from(sorted(FORMATS)), words, words, st.integers(-999, 999))
def test_a_written_action_reads_back(name: str, said: str, query: str, limit: int) -> None:
    many = {"hermes", "llama3", "qwen3_coder"}
    call = ToolCall("call-3-0", "search", {"query": query} | ({"limit": limit} if name in many | {"react"} else {}))
    if name == "fenced":
        call = ToolCall("call-3-0", "python", {"code": query})
    action = Action("" if name == "react" else said, (call,) + ((ToolCall("call-3-1", "look"),) if name in many else ()))
    parser = TurnParser(Toy(), 2, False, FORMATS[name]())
    turn = parser.parse(parser.encode(action), Finish.STOP, 3, ALL)
    assert turn.action == action


def test_the_template_says_which_format_it_teaches() -> None:
    assert format_of("... <tool_call>\n{...") == "hermes"
    assert format_of("... <tool_call>\n<function=...") == "qwen3_coder"
    assert format_of('... {"name": ..., "parameters": ...} ... ipython') == "llama3"
    assert format_of("{{ m.content }}") == "hermes"


def test_the_configuration_knows_every_format() -> None:
    assert set(get_args(ChatConfig.model_fields["tools"].annotation)) == {"auto", *FORMATS}
