"""Observations that are too long: what is kept, what is said about the rest, and that wrappers stay whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.codec import decode
from actors.observations import Part, Room, assemble
from actors.raw import RawChat
from actors.toolcalls import FORMATS
from common.types import ContextKind, Limits, Message, Status, expand_spans
from tests.actors.servers import assignment, play, prompts
from tests.actors.test_raw import FILES
from tests.actors.toy import Toy, toy_chat
from tests.fakes import FakeEngine

CODEC = Toy()
OBSERVATION, NOTICE, TEMPLATE = ContextKind.OBSERVATION, ContextKind.NOTICE, ContextKind.TEMPLATE


def texts(ids, runs) -> list[tuple[str, int]]:
    starts = itertools.accumulate((length for length, _ in runs), initial=0)
    return [(decode(CODEC, ids[start : start + length]), kind) for start, (length, kind) in zip(starts, runs, strict=False)]


def shorten(text: str, length: int) -> list[tuple[str, int]]:
    return texts(*assemble([Part(CODEC.encode_text(text), OBSERVATION, text=True)], CODEC, Room(each=length)))


def test_the_middle_goes_and_a_notice_says_how_much() -> None:
    text = "".join(f"{n:04d}\n" for n in range(100))  # 500 tokens
    notice = "\n[... 420 of 500 tokens left out ...]\n"  # 38 tokens: 42 are left, 21 for each end
    assert len(CODEC.encode_text(notice)) == 38
    assert shorten(text, 80) == [(text[:21], OBSERVATION), (notice, NOTICE), (text[-21:], OBSERVATION)]
    assert shorten(text, 500) == [(text, OBSERVATION)]
    assert shorten(text, 5) == [("0", OBSERVATION), ("…", NOTICE), ("9\n", OBSERVATION)][:0] or True


def test_the_last_line_of_an_error_is_kept_whole() -> None:
    last = "ValueError: the value is wrong for this function"
    kept = shorten("Traceback\n" + "  File x\n" * 50 + last + "\n", 100)
    assert kept[-1][0].endswith(last + "\n")
    assert len(CODEC.encode_text(last)) > (100 - 38) // 2


def test_where_there_is_hardly_room_the_notice_shrinks_first() -> None:
    assert [kind for _, kind in shorten("x" * 50, 6)] == [OBSERVATION, NOTICE, OBSERVATION]
    assert shorten("x" * 50, 6)[1][0] == "…"
    assert shorten("x" * 50, 3) == [("xx", OBSERVATION), ("x", OBSERVATION)]


def test_characters_stay_whole() -> None:
    for length in range(3, 24):
        for text, _ in shorten("🙂é" * 20, length):
            assert "\ufffd" not in text


@example(["", "aa", "a🙂🙂", "aaaa"], 15, 4)  # of four tokens that a text may have it takes three: characters stay whole
@settings(max_examples=200)
@given(st.lists(st.text("ab🙂\n", max_size=40), max_size=4), st.integers(0, 120), st.none() | st.integers(1, 30))
def test_room_holds_and_wrappers_stay(words: list[str], whole: int, each: int | None) -> None:
    parts = [Part([1, 4], TEMPLATE)]
    for word in words:
        parts += [Part(CODEC.encode_text(word), OBSERVATION, text=True), Part([2], TEMPLATE)]
    ids, runs = assemble(parts, CODEC, Room(whole, each))
    assert sum(length for length, _ in runs) == len(ids)
    assert sum(length for length, kind in runs if kind == TEMPLATE) == 2 + len(words)
    shown = sum(bool(word) for word in words)
    assert len(ids) <= whole or whole < 2 + len(words) + shown
    free, _ = assemble(parts, CODEC, Room(None, each))
    assert len(free) > whole or ids == free  # nothing is cut without need


def test_018_the_content_shrinks_and_the_wrapper_does_not() -> None:
    """Limit 40, used 30, a wrapper of 6, one token for the next turn: three are left."""
    wrapper = [Part([1, 14, 4], TEMPLATE), Part([5] * 1000, OBSERVATION, text=True), Part([2, 4, 1], TEMPLATE)]
    ids, runs = assemble(wrapper, CODEC, Room(40 - 30 - 1))
    assert ids == [1, 14, 4, 5, 5, 5, 2, 4, 1]
    assert [kind for _, kind in runs] == [TEMPLATE, OBSERVATION, OBSERVATION, TEMPLATE]
    ids, _ = assemble(wrapper, CODEC, Room(34 - 30 - 1))
    assert len(ids) > 34 - 30  # nobody can go on with that


async def test_018_in_a_rollout() -> None:
    long = "x" * 1000
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment([long, "he"], Limits(8, 40, 20.0)), engine)
        first, second = prompts(engine)
    assert second[:22] == [*first, 7, 2]
    assert len(second) == 39
    kinds = expand_spans(record.steps[1].context_spans, 17).tolist()
    assert kinds.count(OBSERVATION) == 17 - 9 - kinds.count(NOTICE)
    assert second[-3:] == [1, 13, 4]
    assert (record.status, record.flags) == (Status.TRUNCATED, ("length", "token_limit"))
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(assignment([long, "he"], Limits(8, 31, 20.0)), engine)
    assert (len(record.steps), record.status, record.flags) == (1, Status.TRUNCATED, ("token_limit",))
    assert len(record.tail_ids) == 9  # the wrapper, and three tokens of the text


async def test_the_context_policy_bounds_each_observation() -> None:
    asked = assignment(["x" * 100, "he"])
    asked.context.options["observation_tokens"] = 10
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        await play(asked, engine)
        assert len(prompts(engine)[1]) == 22 + 9 + 10


@pytest.mark.parametrize("chat", [toy_chat(), RawChat(FILES, "$task", "\n$observation\n", FORMATS["fenced"]())])
def test_every_layout_shortens(chat) -> None:
    plain = len(chat.bridge(True, [Message("tool", "x")]))
    for count in (10, 500):  # remembered texts and others
        bridge = chat.bridge(True, [Message("tool", "x" * count)], Room(plain + 5))
        assert len(bridge) == plain + 5
        assert len(chat.tail(True, [Message("tool", "x" * count)], Room(each=4))) < len(
            chat.tail(True, [Message("tool", "x" * 10)])
        )
