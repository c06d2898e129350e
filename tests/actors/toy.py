"""TT, a tokenizer small enough to check by hand: greedy longest match, ids as listed.

0 <pad>, 1 <|im_start|>, 2 <|im_end|>, 3 <|eot|> are control ids and enter only as such. 8 to 11 are marks as ordinary text.
Ids 356 to 383 are rows of the embedding without a meaning.
"""

from __future__ import annotations

import re

from actors.chat import Chat
from actors.codec import Codec, ModelFiles
from common.validate import Vocabulary

CONTROL = {"<pad>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|eot|>": 3}
TEXT = {
    4: "\n",
    5: "he",
    6: "llo",
    7: "hello",
    8: "<think>",
    9: "</think>",
    10: "<tool_call>",
    11: "</tool_call>",
    12: "user",
    13: "assistant",
    14: "tool",
    15: " ",
}
BYTES = (
    {i: text.encode() for i, text in TEXT.items()}
    | {20: b"\xf0\x9f", 21: b"\x99\x82"}
    | {100 + b: bytes([b]) for b in range(256)}
)
VOCABULARY = Vocabulary(rows=384, sampleable=356)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPENS_THINKING = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")


class Toy:
    """The TT codec. `marks_are_ids`: <think>, <tool_call> and their closings delimit by id, as added tokens do."""

    def __init__(self, marks_are_ids: bool = False) -> None:
        self.pieces = [BYTES.get(i, b"") for i in range(VOCABULARY.sampleable)]
        for text, i in CONTROL.items():
            self.pieces[i] = text.encode()
        self.control = dict(CONTROL)
        if marks_are_ids:
            self.control |= {TEXT[i]: i for i in (8, 9, 10, 11)}
        plain = {i: piece for i, piece in BYTES.items() if i not in self.control.values()}
        self._longest_first = sorted(plain.items(), key=lambda item: -len(item[1]))

    def encode_text(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            i, piece = next((i, piece) for i, piece in self._longest_first if data.startswith(piece))
            ids.append(i)
            data = data[len(piece) :]
        return ids

    def encode_template(self, text: str) -> list[int]:
        ids = []
        for part in re.split("(" + "|".join(map(re.escape, self.control)) + ")", text):
            ids += [self.control[part]] if part in self.control else self.encode_text(part)
        return ids


def toy_chat(template: str = CHATML, codec: Codec | None = None) -> Chat:
    return Chat(ModelFiles(codec or Toy(), template, "<|im_end|>", VOCABULARY.rows))
