"""The call parser: what is a call, what is not, and which token is what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.codec import ByteLevelCodec, decode_bytes
from actors.toolcalls.arguments import parse_json
from actors.toolcalls.turns import Turn, TurnParser
from common.types import Action, ActionKind, Finish, ToolCall, expand_spans
from tests.actors.toy import Toy

TINY = Path(__file__).resolve().parents[2] / "configs" / "tokenizers" / "tiny"
R, C, T = int(ActionKind.REASONING), int(ActionKind.CALL), int(ActionKind.TEXT)
TEXT_MARKS = Toy()
ID_MARKS = Toy(marks_are_ids=True)
REAL = ByteLevelCodec(TINY / "tokenizer.json")


def parse(text: str, finish: Finish = Finish.STOP, codec=TEXT_MARKS, opens_reasoning: bool = False) -> Turn:
    """`text` and the end token. In TT, marks in the text become ids 8 to 11."""
    return TurnParser(codec, 2, opens_reasoning).parse([*Toy().encode_text(text), 2], finish, 3)


def calls(turn: Turn) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in turn.action.tool_calls if not call.error]


def errors(turn: Turn) -> list[str]:
    return [call.error for call in turn.action.tool_calls if call.error]


both = pytest.mark.parametrize("codec", [TEXT_MARKS, ID_MARKS], ids=["text marks", "id marks"])


@both
def test_a_call_and_the_text_around_it(codec) -> None:
    turn = parse('A<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>B', codec=codec)
    assert turn.action == Action("A\nB", (ToolCall("call-3-0", "f", {"x": 1}),))
    kinds = expand_spans(turn.spans, 4 + len('{"name":"f","arguments":{"x":1}}') + 1).tolist()
    assert kinds == [T, *[C] * (len(kinds) - 3), T, T]


@both
def test_027_nothing_in_the_reasoning_is_read(codec) -> None:
    rehearsal = '<think>try <tool_call>{"name":"rm","arguments":{}}</tool_call> [1]'
    turn = parse(rehearsal + '</think><tool_call>{"name":"ls","arguments":{}}</tool_call>', codec=codec)
    assert calls(turn) == [("ls", {})]
    assert turn.reasoning == rehearsal.removeprefix("<think>")
    assert turn.action.text == ""
    unclosed = parse(rehearsal, codec=codec)
    assert unclosed.action == Action("")
    assert unclosed.problems == 1


@both
def test_reasoning_between_calls_is_not_read_either(codec) -> None:
    call = '<tool_call>{"name":"%s","arguments":{}}</tool_call>'
    turn = parse(f"A{call % 'a'}B<think>no {call % 'rm'}</think>C{call % 'b'}", codec=codec)
    assert calls(turn) == [("a", {}), ("b", {})]
    assert (turn.action.text, turn.reasoning) == ("A\nB\nC", f"no {call % 'rm'}")


@both
def test_006_reasoning_that_the_prompt_opened(codec) -> None:
    turn = TurnParser(codec, 2, opens_reasoning=True).parse([5, 9, 7, 2], Finish.STOP, 0)
    assert (turn.reasoning, turn.action.text) == ("he", "hello")
    assert expand_spans(turn.spans, 4).tolist() == [R, R, T, T]


@both
def test_026_nothing_is_executed_from_a_cut_turn(codec) -> None:
    text = '<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b","argu'
    for finish in (Finish.LENGTH, Finish.ABORT):
        turn = parse(text, finish, codec)
        assert turn.action.tool_calls == ()
        assert expand_spans(turn.spans, 5).tolist() == [C] * 5
    assert calls(parse(text, codec=codec)) == [("a", {})]
    assert errors(parse(text, codec=codec)) == ["the call has no </tool_call>; write <tool_call>, the JSON object, </tool_call>"]


@both
def test_028_each_call_succeeds_or_fails_alone(codec) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    turn = parse(good % 1 + '<tool_call>{"name": }</tool_call>' + good % 2, codec=codec)
    assert calls(turn) == [("f", {"x": 1}), ("f", {"x": 2})]
    assert [call.id for call in turn.action.tool_calls] == ["call-3-0", "call-3-1", "call-3-2"]
    assert len(errors(turn)) == turn.problems == 1


def test_028_the_result_does_not_depend_on_token_borders() -> None:
    """Every cut of the bytes into two tokens, and into single bytes."""
    text = 'Ü<think>a</think><tool_call>{"name":"f","arguments":{"x":"🙂"}}</tool_call>B'
    data, whole = text.encode(), parse(text)
    for cut in range(1, len(data)):
        codec = Toy()
        codec.pieces = [data[:cut], data[cut:]]
        turn = TurnParser(codec, 2).parse([0, 1], Finish.STOP, 3)
        assert (turn.action, turn.reasoning) == (whole.action, whole.reasoning)


@both
def test_marks_and_brackets_inside_a_json_string_are_part_of_it(codec) -> None:
    arguments = {"x": "</tool_call> } ] <tool_call> <think>"}
    turn = parse('<tool_call>{"name":"f","arguments":{"x":"</tool_call> } ] <tool_call> <think>"}}</tool_call>', codec=codec)
    assert calls(turn) == [("f", arguments)]
    assert turn.problems == 0


def test_marks_spelled_by_other_tokens_are_text_where_marks_are_ids() -> None:
    spelled = [100 + b for b in b'<tool_call>{"name":"f","arguments":{}}</tool_call>']
    turn = TurnParser(ID_MARKS, 2).parse([*spelled, 2], Finish.STOP, 0)
    assert turn.action == Action('<tool_call>{"name":"f","arguments":{}}</tool_call>')
    assert calls(TurnParser(TEXT_MARKS, 2).parse([*spelled, 2], Finish.STOP, 0)) == [("f", {})]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name":"f","arguments":{"x":NaN}}', "NaN is not a JSON number"),
        ('{"name":"f","arguments":{"x":-Infinity}}', "-Infinity is not"),
        ('{"name":"f","arguments":{"x":1e999}}', "1e999 is too large"),
        ('{"name":"f","arguments":{"x":-%s}}' % ("9" * 5000), "not valid JSON: -99999999... has too many digits"),
        ('{"name":"f","name":"g","arguments":{}}', "a key stands twice"),
        ('{"name":"f","arguments":{"x":"\\ud800"}}', "surrogate"),
        ('{"name":"f","arguments":{}} extra', "Extra data"),
        ('["f"]', "one JSON object"),
        ('{"arguments":{}}', 'no "name"'),
        ('{"name":"","arguments":{}}', 'no "name"'),
        ('{"name":"f","arguments":"x"}', '"arguments" must be'),
        ("", "not valid JSON"),
        ("[" * 100_000, "too deeply"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(body: str, says: str) -> None:
    if len(body) > 10_000:  # TT would take long to encode it
        codec = Toy()
        codec.pieces = [f"<tool_call>{body}</tool_call>".encode()]
        turn = TurnParser(codec, 2).parse([0], Finish.STOP, 0)
    else:
        turn = parse(f"<tool_call>{body}</tool_call>")
    assert len(errors(turn)) == turn.problems == 1
    assert says in errors(turn)[0]


def test_bytes_that_are_not_utf8_are_an_error_of_their_call_alone() -> None:
    good = Toy().encode_text('<tool_call>{"name":"f","arguments":{}}</tool_call>')
    broken = [*Toy().encode_text('<tool_call>{"name":"'), 20, *Toy().encode_text('","arguments":{}}</tool_call>')]
    turn = TurnParser(TEXT_MARKS, 2).parse([20, *broken, *good, 2], Finish.STOP, 0)
    assert calls(turn) == [("f", {})]
    assert "not UTF-8" in errors(turn)[0]
    assert turn.action.text == "\ufffd"


def test_missing_arguments_are_none() -> None:
    assert calls(parse('<tool_call>{"name":"look"}</tool_call>')) == [("look", {})]


def test_stray_closing_marks_change_nothing() -> None:
    assert parse("a</tool_call>b</think>c").action == Action("a\nb\nc")


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(REAL.pieces) - 1), max_size=40), st.sampled_from([Finish.STOP, Finish.LENGTH]))
def test_any_ids_parse_and_every_token_has_a_kind(ids: list[int], finish: Finish) -> None:
    turn = TurnParser(REAL, 1017).parse(ids, finish, 0)
    assert (expand_spans(turn.spans, len(ids)) > 0).all()
    assert (finish == Finish.STOP) or not turn.action.tool_calls
    for kind, found in ((R, turn.reasoning),):
        spent = [i for i, k in zip(ids, expand_spans(turn.spans, len(ids)).tolist(), strict=True) if k == kind]
        assert len(found.encode()) <= 3 * len(decode_bytes(REAL, spent))


names = st.text("abc_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150)
@given(
    st.text("ab <>{}", max_size=10).map(str.strip),
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3),
)
def test_an_encoded_action_parses_back(text: str, made: list[tuple[str, dict]]) -> None:
    action = Action(text, tuple(ToolCall(f"call-0-{n}", name, arguments) for n, (name, arguments) in enumerate(made)))
    for codec, end in ((REAL, REAL.control["<|im_end|>"]), (TEXT_MARKS, 2)):
        turn = TurnParser(codec, end).parse(TurnParser(codec, end).encode(action), Finish.STOP, 0)
        assert turn.action == action
        assert turn.problems == 0


def test_a_whole_move_is_four_tokens() -> None:
    ids = TurnParser(REAL, REAL.control["<|im_end|>"]).encode(Action("", (ToolCall("", "move", {"to": "left"}),)))
    assert [REAL.pieces[i].decode() for i in ids] == [
        "<tool_call>",
        '\n{"name": "move", "arguments": {"to": "left"}}\n',
        "</tool_call>",
        "<|im_end|>",
    ]


def test_strict_json_reads_what_json_is() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, true, "\\ud83d\\ude42"]}') == {"a": [1, 2.5, None, True, "🙂"]}
