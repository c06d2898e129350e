"""Calls that are written as tags or as code: Qwen3-Coder's parameters, fenced blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actors.toolcalls.arguments import Schemas, from_text
from actors.toolcalls.formats import Tagged, ToolFormat, describe
from actors.toolcalls.scan import Call, Scan
from common.types import Json, ToolCall


class Coder(Tagged):
    """`<tool_call><function=f><parameter=x>...</parameter></function></tool_call>` (Qwen3-Coder).

    Values are bare text and may hold anything: one ends at the first `</parameter>` behind which another parameter or the end
    of the function stands. Their types come from the tool's schema.
    """

    _FUNCTION = re.compile(rb"\s*<function=([^>\n]+)>")
    _PARAMETER = re.compile(rb"\s*<parameter=([^>\n]+)>(?:\r?\n)?")
    _VALUE_END = re.compile(rb"(?:\r?\n)?</parameter>(?=\s*(?:<parameter=|</function>))")
    _END = re.compile(rb"\s*</function>\s*")
    SHAPE = "<function=NAME><parameter=KEY>VALUE</parameter></function>"

    def _call(self, scan: Scan, begin: int, schemas: Schemas) -> None:
        call, end = self._function(scan.data, begin, schemas)
        mark = scan.next(*self.marks, start=end)
        if mark and mark.text == self.CLOSE:
            scan.call(mark.end, call)
        else:
            error = call.error or f"the call has no {self.CLOSE}"
            scan.call(mark.start if mark else len(scan.data), Call(error=error))

    def _function(self, data: bytes, at: int, schemas: Schemas) -> tuple[Call, int]:
        """The call that begins at `at`, and where its function ends (`at` when it is not one)."""
        found = self._FUNCTION.match(data, at)
        if not found:
            return Call(error=f"the call has no function; write {self.OPEN}{self.SHAPE}{self.CLOSE}"), at
        name, begin = found[1].decode("utf-8", "replace").strip(), at
        at, arguments, problem = found.end(), {}, ""
        while parameter := self._PARAMETER.match(data, at):
            key = parameter[1].decode("utf-8", "replace").strip()
            end = self._VALUE_END.search(data, parameter.end())
            if not end:
                return Call(name, error=f"parameter {key} of {name} has no </parameter>; write {self.SHAPE}"), begin
            at = end.end()
            problem = problem or self._set(arguments, key, data[parameter.end() : end.start()], schemas.properties(name))
        end = self._END.match(data, at)
        if not end:
            return Call(name, error=f"function {name} has no </function>; write {self.SHAPE}"), begin
        return Call(name, {} if problem else arguments, problem and f"{name}: {problem}"), end.end()

    @staticmethod
    def _set(arguments: dict[str, Json], key: str, value: bytes, properties: dict[str, Json]) -> str:
        """Put one argument in its place; "" or what is wrong with it."""
        if key in arguments:
            return f"parameter {key} stands twice"
        try:
            arguments[key] = from_text(value.decode("utf-8"), properties.get(key))
        except UnicodeDecodeError:
            return f"parameter {key} is not UTF-8"
        except ValueError as error:
            return f"parameter {key} {error}"
        return ""

    def _body(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"<parameter={key}>", shown, "</parameter>"]
        return "\n".join([*lines, "</function>"])

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"Tools that you can call, one per line:\n{describe(tools)}\n\n"
            f"Call a tool with {self.OPEN}{self.SHAPE}{self.CLOSE}, with one <parameter=KEY> for each argument."
        )


class Fenced(ToolFormat):
    """A block of Python code at the end of a turn is run (ToRL, arXiv 2503.23383).

    The turn ends with the fence, or with the stop string that asks for the output. Earlier blocks, and a block with text
    behind it, are part of an answer. The tool is the domain's only one, or the one called "python"; the code is its text
    parameter.
    """

    stops = ("```output",)
    _BLOCK = re.compile(rb"(?:^|\n)```(?:python|py)[ \t]*\r?\n(.*?)(?:\n|(?<=\n))```(?:[ \t]*(?=\r?\n|$)|output)", re.DOTALL)

    def read(self, scan: Scan, schemas: Schemas) -> None:
        blocks = list(self._BLOCK.finditer(scan.data, scan.at))
        if not blocks or self._behind(scan.data[blocks[-1].end() :]):
            scan.text(len(scan.data))
            return
        scan.text(blocks[-1].start())
        scan.call(len(scan.data), self._run(blocks[-1][1], schemas))

    @classmethod
    def _behind(cls, rest: bytes) -> bytes:
        """What stands behind a block, other than the request for its output."""
        rest = rest.strip()
        return b"" if rest in (b"", *(stop.encode() for stop in cls.stops)) else rest

    @staticmethod
    def _run(code: bytes, schemas: Schemas) -> Call:
        tool = "python" if "python" in schemas.parameters or not schemas.parameters else schemas.only()
        key = schemas.text_parameter(tool) or ("" if schemas.parameters else "code")
        if not tool or not key:
            return Call(error=f"no tool here runs code; tools: {', '.join(schemas.parameters)}")
        try:
            return Call(tool, {key: code.decode("utf-8")})
        except UnicodeDecodeError as error:
            return Call(tool, error=f"the code is not UTF-8: byte {error.start}")

    def write(self, text: str, calls: Sequence[ToolCall]) -> list[str]:
        blocks = [f"```python\n{next(iter(call.arguments.values()), '')}\n```" for call in calls]
        return ["\n".join([*([text] if text else []), *blocks])] if text or blocks else []

    def explain(self, tools: Sequence[Json]) -> str:
        return (
            f"You can run Python code: end your turn with a block that begins with ```python and ends with ```; its output is "
            f"shown to you.\nWhat runs it:\n{describe(tools)}"
        )
