"""Raw completion, for base models: no roles and no control tokens, one growing text (RL-Zero, ToRL arXiv 2503.23383).

The prompt and what stands around an observation are texts with placeholders. An observation is put behind what was sampled,
inside the same turn of the model; a turn ends where a stop string was sampled, or with the model's end of text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actors.chat import EMPTY, Context, Remark
from actors.codec import ModelFiles
from actors.observations import ENDLESS, Part, Room, assemble
from actors.template import TemplateError
from actors.toolcalls.formats import ToolFormat
from common.types import ContextKind, Message, ids_array, spans_of

_PLACE = re.compile(r"\$(instructions|tools|task|observation)\b")


class RawChat:
    """The same as `Chat`, without a chat template. `prompt` has $task, and may have $instructions and $tools;
    `observation` has $observation."""

    def __init__(self, files: ModelFiles, prompt: str, observation: str, format: ToolFormat) -> None:
        """Raises TemplateError."""
        self.codec = files.codec
        self.end_id = files.codec.control[files.end_token]
        self.end_ids = frozenset((self.end_id, *files.end_ids))
        self.opens_reasoning, self.thought = False, 0
        self.format = format
        self._begin = [files.codec.control[files.special_tokens["bos_token"]]] if files.adds_bos else []
        self._prompt = self._cut("chat.prompt", prompt, "task", {"instructions", "tools"})
        self._observation = self._cut("chat.observation", observation, "observation", set())

    @staticmethod
    def _cut(key: str, text: str, needed: str, more: set[str]) -> list[tuple[bool, str]]:
        """Texts, and names of placeholders (True) between them."""
        parts = [(n % 2 == 1, part) for n, part in enumerate(_PLACE.split(text)) if part]
        names = [part for place, part in parts if place]
        if names.count(needed) != 1 or not set(names) <= {needed, *more}:
            allowed = ", ".join(f"${name}" for name in sorted(more)) or "nothing else"
            raise TemplateError(f"{key} {text!r} must have ${needed} once; it may have {allowed}")
        return parts

    def ended(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self.end_ids

    def opening(self, instructions: str, tools_json: str, messages: Sequence[Message]) -> Context:
        tools = json.loads(tools_json) if tools_json else []
        values = {"instructions": instructions, "tools": self.format.explain(tools) if tools else ""}
        return self._fill(self._prompt, values, messages, ContextKind.TASK, Part(self._begin, ContextKind.TEMPLATE))

    def bridge(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context:
        return self._fill(self._observation, {}, messages, ContextKind.OBSERVATION, room=room)

    def tail(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context:
        return self.bridge(ended, messages, room) if messages else EMPTY

    def _fill(
        self,
        pattern: list[tuple[bool, str]],
        values: dict[str, str],
        messages: Sequence[Message],
        kind: ContextKind,
        *begin: Part,
        room: Room = ENDLESS,
    ) -> Context:
        """`messages` stand in the place of $task or $observation: their texts in lines, the agent loop's own behind them."""
        parts = list(begin)
        for place, text in pattern:
            if not place:
                parts.append(Part(self.codec.encode_text(text), ContextKind.TEMPLATE))
            elif text in values:
                parts.append(Part(self.codec.encode_text(values[text]), kind))
            else:
                parts += self._said(messages, kind)
        ids, runs = assemble(parts, self.codec, room)
        return Context(ids_array(ids), spans_of(runs))

    def _said(self, messages: Sequence[Message], kind: ContextKind) -> list[Part]:
        told = [message.text for message in messages if not isinstance(message, Remark)]
        parts = [Part(self.codec.encode_text("\n".join(told)), kind, text=True)]
        for n, remark in enumerate(message for message in messages if isinstance(message, Remark)):
            text = f"\n{remark.text}" if told or n else remark.text
            parts += [
                Part(self.codec.encode_text(text), ContextKind.NOTICE),
                Part(remark.summary, ContextKind.SUMMARY),
            ]
        return parts
