"""Actions that are written as words: RAGEN's answer tags, ReAct's lines.

Which tool a piece of text means follows from the tools' schemas: `name(value)` or `name[value]` with a tool's name, the name
alone of a tool without parameters, or else the text parameter of the only tool there is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actors.toolcalls.arguments import Schemas, from_text, parse_json, read_arguments
from actors.toolcalls.formats import ToolFormat, describe
from actors.toolcalls.scan import Call, Scan
from common.types import Json, ToolCall

_APPLIED = re.compile(r"\s*([\w.-]+)\s*(?:\((.*)\)|\[(.*)\])\s*", re.DOTALL)


def resolve(text: str, schemas: Schemas) -> Call:
    """The call that `text` means."""
    text = text.strip()
    applied, only = _APPLIED.fullmatch(text), schemas.only()
    tool = _named(applied[1], schemas) if applied else ""
    value = (applied[2] or applied[3] or "").strip() if applied and tool else text
    if not tool and (tool := _named(text, schemas)):
        value = ""
    if not tool and only and schemas.text_parameter(only):
        tool = only
    if not tool:
        return Call(error=f"{text[:80]!r} names no tool; write NAME(VALUE) with one of: {', '.join(schemas.parameters)}")
    if not value and not schemas.required(tool):
        return Call(tool)
    key = schemas.text_parameter(tool)
    if not key:
        needed = ", ".join(schemas.properties(tool)) or "nothing"
        return Call(tool, error=f"{tool} takes {needed}: one text does not say which is which")
    try:
        return Call(tool, {key: from_text(_unquoted(value), schemas.properties(tool)[key])})
    except ValueError as error:
        return Call(tool, error=f"{key} of {tool} {error}")


def _named(word: str, schemas: Schemas) -> str:
    same = [name for name in schemas.parameters if name.lower() == word.lower()]
    return same[0] if len(same) == 1 else ""


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def spoken(call: ToolCall) -> str:
    """The text that `resolve` reads as `call`."""
    values = [value if isinstance(value, str) else str(value) for value in call.arguments.values()]
    if len(values) > 1:
        raise ValueError(f"a call of {call.name} with {len(values)} arguments cannot be written as one text")
    return f"{call.name}({values[0]})" if values else call.name


class Answer(ToolFormat):
    """`<answer>A || B</answer>`: actions, run in order (RAGEN, arXiv 2504.20073). Reasoning stands in `<think>` before it.

    Without tools the answer is the turn's text.
    """

    OPEN, CLOSE, BETWEEN = "<answer>", "</answer>", "||"
    marks = (OPEN, CLOSE)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        answered = False
        for mark in scan.marks_between(self.OPEN):
            closing = scan.next(self.CLOSE, start=mark.end)
            if answered:
                scan.call(closing.end if closing else len(scan.data), Call(error="only the first answer of a turn is read"))
            elif not closing:
                scan.call(len(scan.data), Call(error=f"the answer has no {self.CLOSE}"))
            elif schemas.parameters:
                scan.call(closing.end, *self._calls(scan.data[mark.end : closing.start], schemas))
            else:
                scan.texts.append(scan.data[mark.end : closing.start])
                scan.drop(closing.end)
            answered = True

    def _calls(self, body: bytes, schemas: Schemas) -> list[Call]:
        try:
            words = body.decode("utf-8").split(self.BETWEEN)
        except UnicodeDecodeError as error:
            return [Call(error=f"the answer is not UTF-8: byte {error.start}")]
        return [resolve(word, schemas) for word in words if word.strip()] or [Call(error="the answer is empty")]

    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        body = f" {self.BETWEEN} ".join(map(spoken, calls)) if calls else text
        return ([text, "\n"] if text and calls else []) + [f"{self.OPEN}{body}{self.CLOSE}"]

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"Actions that you can take:\n{describe(tools)}\n\nWrite your action as {self.OPEN}NAME(VALUE){self.CLOSE}; "
            f'separate several with "{self.BETWEEN}".'
        )


class React(ToolFormat):
    """`Thought: ...`, then `Action: ...` (ReAct, arXiv 2210.03629; AgentGym).

    The action is one line, on the line of the word or below it: as `resolve` reads it, or a tool's name with `Action Input:`
    and a JSON object. More than one action is an error. Without an action, or after `Final Answer:`, the turn is text.
    """

    stops = ("\nObservation:",)
    _THOUGHT = re.compile(rb"\s*Thought:")
    _ACTION = re.compile(rb"(?:^|\n)[ \t]*Action:")
    _INPUT = re.compile(rb"\s*Action Input:")
    _OBSERVATION = re.compile(rb"(?:^|\n)[ \t]*Observation:")
    _FINAL = re.compile(rb"(?:^|\n)[ \t]*Final Answer:")
    ONCE = "write one Action, then wait for its Observation"

    def read(self, scan: Scan, schemas: Schemas) -> None:
        end = self._end(scan)
        actions = [found for found in self._ACTION.finditer(scan.data, scan.at) if found.start() < end]
        final = self._FINAL.search(scan.data, scan.at, end)
        border = actions[0].start() if actions else final.start() if final else end
        if thought := self._THOUGHT.match(scan.data, scan.at, border):
            scan.think(thought.end(), border, border)
        elif border > scan.at:
            scan.text(border)
        if len(actions) > 1:
            scan.call(end, Call(error=f"the turn has {len(actions)} actions; {self.ONCE}"))
        elif actions:
            self._action(scan, actions[0].end(), end, schemas)
        elif final:
            scan.texts.append(scan.data[final.end() : end])
        scan.drop(len(scan.data))

    def _end(self, scan: Scan) -> int:
        """An observation is not the policy's to write: what begins with one is not read."""
        found = self._OBSERVATION.search(scan.data, scan.at)
        return found.start() if found else len(scan.data)

    def _action(self, scan: Scan, begin: int, end: int, schemas: Schemas) -> None:
        try:
            line, _, rest = scan.data[begin:end].decode("utf-8").strip().partition("\n")
        except UnicodeDecodeError:
            scan.call(end, Call(error="the action is not UTF-8"))
            return
        given = self._INPUT.match(rest.encode())
        if given:
            scan.call(end, self._with_input(line.strip(), rest.encode()[given.end() :].strip(), schemas))
        elif rest.strip() and not _APPLIED.fullmatch(f"{line}\n{rest}"):
            scan.call(end, Call(error=f"text stands behind the action; {self.ONCE}"))
        else:
            scan.call(end, resolve(f"{line}\n{rest}", schemas))

    @staticmethod
    def _with_input(name: str, body: bytes, schemas: Schemas) -> Call:
        name = _named(name, schemas) or name
        if not body.startswith(b"{"):
            return resolve(f"{name}({body.decode()})", schemas)
        try:
            return Call(name, read_arguments(parse_json(body), name, schemas))
        except ValueError as error:
            return Call(name, error=f"Action Input of {name} is not a JSON object of its arguments: {error}")

    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        if not calls:
            return [f"Final Answer: {text}"]
        if len(calls) > 1:
            raise ValueError(f"a ReAct turn has one action, not {len(calls)}")
        (call,) = calls
        if len(call.arguments) > 1:
            body = json.dumps(call.arguments, ensure_ascii=False)
            return [f"Thought: {text}\nAction: {call.name}\nAction Input: {body}"]
        return [f"Thought: {text}\nAction: {spoken(call)}"]

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"Actions that you can take:\n{describe(tools)}\n\nWrite a line that begins with Thought:, then one that begins with "
            "Action:, with NAME(VALUE). The answer follows as Observation:. When you know the result, write Final Answer:."
        )
