"""Chat templates, rendered with slots in place of every text that did not come from the template."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from common.types import Json

_SLOT = re.compile("\ue000([0-9]+)\ue001")  # the number of a slot, in rendered templates only
DATE = datetime.date(2024, 7, 26)  # what templates that ask for the date get: a prompt must not change from day to day


class TemplateError(ValueError):
    """The chat template cannot be used for append-only chat; the message says why."""


class Slots:
    """Numbers for texts that must not pass through the template."""

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved
        self.texts: list[str] = []
        self._texts: dict[str, str] = {}  # mark -> text
        self.quoted: set[int] = set()  # reserved slots that the template writes inside of JSON

    @staticmethod
    def mark(number: int) -> str:
        return f"\ue000{number}\ue001"

    def take(self, text: str) -> str:
        self.texts.append(text)
        mark = self.mark(self._reserved + len(self.texts) - 1)
        self._texts[mark] = text
        return mark

    def quote(self, text: str) -> bool:
        """Whether `text`, a JSON value, has reserved slots: their texts are quoted then, and the rest is the template's."""
        found = {int(number) for number in _SLOT.findall(text) if int(number) < self._reserved}
        self.quoted |= found
        return bool(found)

    def fill(self, value: Json) -> Json:
        """`value` with the texts that were taken in the place of their marks."""
        if isinstance(value, dict):
            return {key: self.fill(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.fill(inner) for inner in value]
        return self._texts.get(value, value) if isinstance(value, str) else value


def cut_at_slots(rendered: str) -> list[str | int]:
    """Text, and the numbers of the slots between."""
    parts = [int(part) if n % 2 else part for n, part in enumerate(_SLOT.split(rendered))]
    return [part for part in parts if part != ""]


Render = Callable[[list[dict[str, str]], list[Json], bool, Slots], str]


def compile_template(template: str, variables: Mapping[str, Any] | None = None) -> Render:
    """The template as Hugging Face runs it (same sandbox, same whitespace rules), except that `tojson` makes slots.

    `variables` are the special tokens (bos_token, ...) and the options that a template knows (enable_thinking, ...).
    Raises TemplateError.
    """
    try:
        from jinja2 import TemplateError as JinjaError
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise TemplateError("actors need jinja2: pip install 'polyturn[actors]'") from error

    class Generation(Extension):
        """{% generation %} marks what the assistant says, for masks of losses: its body is text like any other's."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])

    def refuse(message: str) -> None:
        raise JinjaError(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = DATE.strftime

    taking: list[Slots] = []  # those of the render that runs

    def to_json(value: Json, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Json) -> str:
        slots = taking[-1]
        dumps = functools.partial(json.dumps, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        shown = dumps(value)
        return shown if slots.quote(shown) else slots.take(dumps(slots.fill(value)))

    environment.filters["tojson"] = to_json
    try:
        compiled = environment.from_string(template)
    except JinjaError as error:
        raise TemplateError(f"the chat template is broken: {error}") from error
    given = dict(variables or {})

    def render(messages: list[dict[str, str]], tools: list[Json], prompt: bool, slots: Slots) -> str:
        taking[:] = [slots]
        try:
            return compiled.render(**given, messages=messages, tools=tools or None, add_generation_prompt=prompt)
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the chat template cannot show {[m['role'] for m in messages]}: {error}") from error

    return render
