"""Bugs of other stacks with the toy tokenizer: marks as text, marks as ids, a template that drops old reasoning."""

from __future__ import annotations

import pytest

from actors.codec import ModelFiles
from actors.template import Slots, compile_template
from common.types import Message
from tests.actors.bugs_calls import *  # noqa: F403
from tests.actors.bugs_tokens import *  # noqa: F403
from tests.actors.toolbox import Model, recorded, row
from tests.actors.toy import CHATML, VOCABULARY, Toy

DROPS = CHATML.replace("m.content", "(m.content if m.role != 'assistant' else m.content.split('</think>')[-1])")
TOYS = {
    name: Model(name, ModelFiles(Toy(marks_are_ids=ids), template, "<|im_end|>", VOCABULARY.rows))
    for name, ids, template in (("text", False, CHATML), ("ids", True, CHATML), ("drops", True, DROPS))
}


@pytest.fixture(params=TOYS)
def model(request) -> Model:
    return TOYS[request.param]


def test_003_the_template_drops_old_reasoning_and_the_row_keeps_it() -> None:
    """The toy's template would render `8 5 9 7` as `7` once it is history."""
    files = TOYS["drops"].files
    said = {"role": "assistant", "content": "<think>he</think>hello"}
    shown = compile_template(files.template)([{"role": "user", "content": "he"}, said], [], False, Slots(0))
    assert "<think>" not in shown
    chat = TOYS["drops"].chat
    contexts = [chat.opening("", "", [Message("user", "he")]), chat.bridge(True, [Message("user", "he")])]
    whole = row(recorded(contexts, [[8, 5, 9, 7, 2], [7, 2]], TOYS["drops"]))
    assert whole.ids.tolist() == [1, 12, 4, 5, 2, 4, 1, 13, 4, 8, 5, 9, 7, 2, 4, 1, 12, 4, 5, 2, 4, 1, 13, 4, 7, 2]
