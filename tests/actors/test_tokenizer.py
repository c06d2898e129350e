"""The committed tokenizer: what the script makes, and what a token is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.codec import ByteLevelCodec, decode, decode_bytes
from tests.actors.servers import TINY, tiny_chat

CODEC = ByteLevelCodec(TINY / "tokenizer.json")


def pieces(text: str) -> list[str]:
    return [CODEC.pieces[i].decode("utf-8", "replace") for i in CODEC.encode_text(text)]


def test_the_script_makes_exactly_the_committed_files(tmp_path: Path) -> None:
    from tools import make_tokenizer

    make_tokenizer.write(make_tokenizer.train(make_tokenizer.corpus()), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (TINY / name).read_text(), f"{name}: run python -m tools.make_tokenizer"


def test_size_and_control_tokens() -> None:
    assert len(CODEC.pieces) == 1024
    assert all(CODEC.pieces)
    assert set(CODEC.control) == {
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    }


@pytest.mark.parametrize("cell", [f"{column}{row}" for column in "abcd" for row in range(1, 5)])
def test_a_cell_is_one_token_anywhere(cell: str) -> None:
    for text in (cell, f"You are at {cell}.", f"Holes: {cell}, {cell}."):
        assert pieces(text).count(cell) == text.count(cell)
        assert "".join(pieces(text)) == text


def test_numbers_are_read_digit_by_digit() -> None:
    assert pieces("123") == ["1", "2", "3"]
    assert pieces("abc12")[-2:] == ["1", "2"]
    assert pieces("b12") == ["b1", "2"]
    assert pieces("You are at b3.") == ["You are at ", "b3", "."]


def test_every_byte_sequence_of_text_has_tokens() -> None:
    assert {CODEC.pieces.index(bytes([b])) for b in range(256)} <= set(range(1024))
    for text in ("", "\x00\x7f", "日本語 🙂\r\n\t", "\u202e\ufeff"):
        assert decode(CODEC, CODEC.encode_text(text)) == text


@given(st.lists(st.integers(0, 1023), max_size=20))
def test_bytes_of_ids_are_what_the_library_decodes(ids: list[int]) -> None:
    assert decode_bytes(CODEC, ids).decode("utf-8", "replace") == CODEC._template.decode(ids, skip_special_tokens=False)


def test_the_prompt_of_frozenlake_is_short() -> None:
    from envserver.domains import load_domain

    chat, domain = tiny_chat(), load_domain("frozenlake")
    (task,) = domain.tasks("train", 1)
    env = domain.make_env()
    messages = env.reset(task).messages
    opening = chat.opening(domain.instructions, json.dumps(domain.tools), messages)
    inner = len(CODEC.encode_text(messages[0].text))
    assert len(opening) - inner < 40
