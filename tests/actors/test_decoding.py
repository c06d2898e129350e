"""Ids to text, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.decoding import TextStream, texts, tokens_to_stop
from tests.actors.toy import Toy

PIECES = Toy().pieces


def test_012_a_character_in_two_tokens() -> None:
    assert texts([PIECES[20], PIECES[21]]) == ["", "🙂"]
    stream = TextStream()
    assert (stream.push(PIECES[20]), stream.end()) == ("", "\ufffd")


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_012_streamed_text_is_the_text_of_all(pieces: list[bytes]) -> None:
    assert "".join(texts(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("pieces", "stops", "count"),
    [
        ([b"a", b".", b"b"], ["."], 2),
        ([b"a", b"..", b"b"], ["."], 2),  # the whole token stays
        ([b"a<", b"st", b"op>b", b"c"], ["<stop>"], 3),
        ([b"x\n", b"Obs", b"ervation:", b" 3"], ["nothing", "\nObservation:"], 3),
        ([b"ab", b"c"], ["c", "b"], 1),  # the first to be complete, not the first in the list
        ([b"a", b"b"], ["c", ""], None),
        ([b"\xf0\x9f", b"\x99\x82", b"!"], ["🙂"], 2),
        ([], ["c"], None),
    ],
)
def test_015_the_token_that_completes_a_stop_string_is_the_last(pieces, stops, count) -> None:
    assert tokens_to_stop(pieces, stops) == count
