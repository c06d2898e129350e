"""Which layout of text a run uses, and what every layout offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.chat import Chat, Context
from actors.codec import Codec, ModelFiles
from actors.observations import ENDLESS, Room
from actors.raw import RawChat
from actors.toolcalls import FORMATS
from actors.toolcalls.formats import ToolFormat
from common.config import ChatConfig
from common.types import Message


class Conversation(Protocol):
    """Prompts in token space: they only ever grow. `Chat` and `RawChat` are two."""

    codec: Codec
    format: ToolFormat
    end_id: int  # ends a turn that is written out
    end_ids: frozenset[int]  # may end a turn that was sampled
    opens_reasoning: bool
    thought: int  # ids at the end of a generation prompt that open the reasoning

    def ended(self, ids: Sequence[int]) -> bool: ...

    def opening(self, instructions: str, tools_json: str, messages: Sequence[Message]) -> Context: ...

    def bridge(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context: ...

    def tail(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context: ...


def conversation(files: ModelFiles, config: ChatConfig) -> Conversation:
    """Raises TemplateError."""
    if config.template == "raw":
        return RawChat(files, config.prompt, config.observation, FORMATS[config.tools]())
    return Chat(files, None if config.tools == "auto" else FORMATS[config.tools](), config.options)
