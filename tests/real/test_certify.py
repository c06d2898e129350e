"""What `tools/certify.py` says without an engine, of real tokenizers and chat templates."""

from __future__ import annotations

import pytest

from tests.real.conftest import NAMES
from tools.certifying import dialogues, spellings, texts


@pytest.mark.parametrize("name", NAMES)
def test_our_side_is_right_with_real_models(name, chats, models) -> None:
    chat = chats[name]
    rows = [*dialogues.scripted(chat, models[name], {}), *texts.injection(chat), texts.parser(chat), *texts.utf8(chat)]
    assert {row.check: row.reason for row in rows if row.verdict != "pass"} == {}
    assert len(spellings.spellings(chat.codec)) >= spellings.COUNT
    assert [row.check for row in rows if "not prefix-stable" in row.evidence] == ["prefix: reasoning"] * (name == "qwen3")
