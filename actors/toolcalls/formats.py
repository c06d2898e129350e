"""How models write tool calls. One class per format; a new one gets a class here or beside, and a row in FORMATS.

All formats share the rules of `actors/toolcalls/turns.py`: reasoning is never read, nothing is executed from a turn that was
cut, each call succeeds or fails alone, and a failed one carries a text that tells the policy what to change.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from actors.toolcalls.arguments import Schemas, parse_json, read_arguments
from actors.toolcalls.scan import Call, Scan
from common.types import Json, ToolCall


class Control(str):
    """A part of a written turn that is one of the format's marks: a token of its own where the tokenizer has one."""


class ToolFormat(ABC):
    """`marks` delimit; where the tokenizer has ids for all of them that it has, only these ids do."""

    marks: ClassVar[tuple[str, ...]] = ()
    stops: ClassVar[tuple[str, ...]] = ()  # strings that end a turn, part of it

    @abstractmethod
    def read(self, scan: Scan, schemas: Schemas) -> None:
        """Cut what is left of the turn, behind its reasoning, into texts and calls."""

    @abstractmethod
    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        """The turn that says `text` and makes `calls`, without its end token."""

    @abstractmethod
    def explain(self, tools: Sequence[Json]) -> str:
        """Instructions for the policy, for chat templates that do not show tools."""


def describe(tools: Sequence[Json]) -> str:
    """The tools' function schemas, one JSON object per line."""
    return "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)


class Tagged(ToolFormat):
    """Calls between `<tool_call>` and `</tool_call>`, with text and reasoning around them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    marks = (OPEN, CLOSE)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        for mark in scan.marks_between(*self.marks):
            if mark.text == self.OPEN:
                self._call(scan, mark.end, schemas)

    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        out = [text] if text else []
        for call in calls:
            out += [*(["\n"] if out else []), Control(self.OPEN), f"\n{self._body(call)}\n", Control(self.CLOSE)]
        return out

    @abstractmethod
    def _call(self, scan: Scan, begin: int, schemas: Schemas) -> None:
        """Read the call that opens before `begin`."""

    @abstractmethod
    def _body(self, call: ToolCall) -> str:
        """What stands between the tags."""


class Hermes(Tagged):
    """`<tool_call>` and a JSON object with name and arguments (Qwen2.5, Qwen3, Hermes)."""

    def _call(self, scan: Scan, begin: int, schemas: Schemas) -> None:
        """The call that opens before `begin`: up to the first closing mark behind its JSON."""
        begin = scan.skip_space(begin)
        mark = scan.next(*self.marks, start=scan.json_end(begin))  # a mark inside a JSON string is a part of that string
        if mark and mark.text == self.CLOSE:
            scan.call(mark.end, read_call(scan.data[begin : mark.start], schemas))
        else:
            fix = f"write {self.OPEN}, the JSON object, {self.CLOSE}"
            scan.call(mark.start if mark else len(scan.data), Call(error=f"the call has no {self.CLOSE}; {fix}"))

    def _body(self, call: ToolCall) -> str:
        return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"Tools that you can call, one per line:\n{describe(tools)}\n\n"
            f'Call a tool with a JSON object between tags: {self.OPEN}{{"name": "...", "arguments": {{...}}}}{self.CLOSE}'
        )


class Llama3(ToolFormat):
    """A turn that is JSON objects with name and parameters, after `<|python_tag|>` or alone (Llama 3.1 to 3.3)."""

    TAG = "<|python_tag|>"
    marks = (TAG,)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        tag = scan.next(self.TAG)
        begin = scan.skip_space(tag.end if tag else scan.at)
        if tag:
            scan.text(tag.start)
        elif not self._begins_call(scan, begin):
            scan.text(len(scan.data))
            return
        while begin < len(scan.data):
            end = scan.json_end(begin)
            if end == begin:
                scan.call(len(scan.data), read_call(scan.data[begin:], schemas, "parameters"))
                return
            scan.call(end, read_call(scan.data[begin:end], schemas, "parameters"))
            begin = scan.skip_space(end)
            if scan.data[begin : begin + 1] == b";":
                begin = scan.skip_space(begin + 1)
            elif scan.data[begin : begin + 1] != b"{":
                break
            scan.at = begin
        scan.text(len(scan.data))

    @staticmethod
    def _begins_call(scan: Scan, begin: int) -> bool:
        """A turn that begins with an object is a call if the object has a name, or would have one if it were whole."""
        end = scan.json_end(begin)
        if end == begin:
            return scan.data[begin:].replace(b" ", b"").startswith((b'{"name":', b'{"type":"function"'))
        value = json.loads(scan.data[begin:end].decode("latin-1"))
        return isinstance(value, dict) and "name" in value

    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        bodies = [json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False) for call in calls]
        if text and bodies:
            return [text, Control(self.TAG), "; ".join(bodies)]
        return [text] if text else ["; ".join(bodies)] if bodies else []

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"Tools that you can call, one per line:\n{describe(tools)}\n\n"
            'To call a tool, answer with nothing but {"name": "...", "parameters": {...}}; separate several calls with "; ".'
        )


def read_call(body: bytes, schemas: Schemas, key: str = "arguments") -> Call:
    """A call that is one JSON object; its arguments stand under `key`, or under the other of the two usual names."""
    shape = f'{{"name": ..., "{key}": {{...}}}}'
    try:
        value = parse_json(body)
    except ValueError as error:
        return Call(error=f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return Call(error=f"the call must be one JSON object: {shape}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Call(error=f'the call has no "name": write {shape}')
    other = "arguments" if key == "parameters" else "parameters"
    try:
        return Call(name, read_arguments(value.get(key, value.get(other)), name, schemas))
    except ValueError as error:
        return Call(name, error=f'"{key}" {error}: {shape}')
