"""Bugs of other stacks with the tokenizers and chat templates of real models; `model` is every one of them."""

from __future__ import annotations

import re

from common.types import ContextKind, Message, expand_spans
from tests.actors.bugs_calls import *  # noqa: F403
from tests.actors.bugs_tokens import *  # noqa: F403
from tests.actors.toolbox import Model

BETWEEN = {  # an end token that was sampled and the next turn, around a tool's "he"
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\nhe\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>tool<|end_header_id|>\n\nhe<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_1_tools": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"he"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    ),
    "smollm2": "\n<|im_start|>tool\nhe<|im_end|>\n<|im_start|>assistant\n",
}
BETWEEN["qwen3"] = BETWEEN["qwen2_5"]
BETWEEN["qwen3_no_thinking"] = BETWEEN["qwen3"] + "<think>\n\n</think>\n\n"


def test_004_what_stands_behind_the_end_token(model: Model) -> None:
    """Field bug 004: the newline of ChatML is there, with the ids that the tokenizer has for the whole of it; Llama has none."""
    bridge = model.chat.bridge(True, [Message("tool", "he")])
    assert model.text(bridge.ids) == BETWEEN[model.name]
    shown = re.split("<.im_start.>assistant|<.start_header_id.>assistant", BETWEEN[model.name])[0]
    assert model.text(model.chat.tail(True, [Message("tool", "he")]).ids) == shown
    if model.name != "llama3_1_tools":  # there a token would span the quote and the text
        assert bridge.ids.tolist() == model.files.codec.encode_template(BETWEEN[model.name])
    assert set(expand_spans(bridge.spans, len(bridge)).tolist()) == {ContextKind.TEMPLATE, ContextKind.OBSERVATION}
