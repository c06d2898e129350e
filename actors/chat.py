"""The append-only chat, in token space.

The model's chat template is rendered with slots in place of all text, once per shape of a conversation, and what stands
around the slots is learnt as ids: the opening of a conversation, and the bridge from the end of a sampled turn to the next
generation prompt. From then on a prompt only ever grows: prompt + sampled ids + bridge. Sampled ids are never decoded,
changed or encoded again, and the template's own habit of rewriting older turns never runs.

Text that goes into slots is encoded without control tokens. The join of a slot and its surroundings is a token border.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.codec import CACHED_CHARS, END_THINK, THINK, Codec, decode
from common.types import ContextKind, Json, Message, Spans, ids_array, spans_of

_SLOT = re.compile("\ue000([0-9]+)\ue001")  # the number of a slot, in rendered templates only


class TemplateError(ValueError):
    """The chat template cannot be used for append-only chat; the message says why."""


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens that nobody sampled, [C] int32, and where they came from."""

    ids: np.ndarray
    spans: Spans

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Context:
        """The first `length` tokens."""
        keep = self.spans.starts < length
        return Context(self.ids[:length], Spans(self.spans.starts[keep], self.spans.kinds[keep]))


EMPTY = Context(ids_array([]), spans_of([]))


@dataclass(frozen=True)
class _Slot:
    number: int


_Pattern = tuple["list[int] | _Slot", ...]  # ids of the template, and slots between them


class Chat:
    """One model's chat format. `end_id` ends every turn of the policy."""

    def __init__(self, codec: Codec, template: str, end_token: str) -> None:
        self.codec = codec
        self.end_id = codec.control[end_token]
        self._render = compile_template(template)
        self._opening = functools.lru_cache(256)(self._learn_opening)
        self._bridge = functools.lru_cache(256)(self._learn_bridge)
        self._known_bridge = functools.lru_cache(8192)(self._fill_bridge)  # short observations repeat
        self._check()
        # A generation prompt may open the reasoning for the policy; then a turn begins inside it.
        prompt = self._bridge((), True)[-1]
        shown = decode(codec, prompt) if isinstance(prompt, list) else ""
        self.opens_reasoning = shown.rfind(THINK) > shown.rfind(END_THINK)

    def opening(self, instructions: str, tools_json: str, messages: Sequence[Message]) -> Context:
        """The first prompt: instructions, tools and the task's messages, up to the generation prompt."""
        roles = tuple(message.role for message in messages)
        pattern, fixed = self._opening(instructions, tools_json, roles)
        return self._fill(pattern, [message.text for message in messages], ContextKind.TASK, fixed)

    def bridge(self, ended: bool, messages: Sequence[Message]) -> Context:
        """From a sampled turn to the next generation prompt.

        `ended`: the turn's last id is the end token. If not (the engine cut it), the bridge writes the end token itself,
        as context: it was not sampled.
        """
        return self._after(ended, messages, prompt=True)

    def tail(self, ended: bool, messages: Sequence[Message]) -> Context:
        """The observation after the last turn, in its wrappers, without a generation prompt. Empty without messages."""
        return self._after(ended, messages, prompt=False) if messages else EMPTY

    def _after(self, ended: bool, messages: Sequence[Message], prompt: bool) -> Context:
        roles, texts = tuple(message.role for message in messages), tuple(message.text for message in messages)
        short = sum(map(len, texts)) <= CACHED_CHARS
        return (self._known_bridge if short else self._fill_bridge)(ended, roles, texts, prompt)

    def _fill_bridge(self, ended: bool, roles: tuple[str, ...], texts: tuple[str, ...], prompt: bool) -> Context:
        pattern = self._bridge(roles, prompt)
        if ended:
            first = pattern[0]
            assert isinstance(first, list)  # _learn_bridge has seen to it
            pattern = (first[1:], *pattern[1:])
        return self._fill(pattern, texts, ContextKind.OBSERVATION, ())

    def _fill(self, pattern: _Pattern, texts: Sequence[str], kind: ContextKind, fixed: Sequence[list[int]]) -> Context:
        """Put encoded texts into slots: first the messages', then the `fixed` ones (already encoded)."""
        ids: list[int] = []
        runs: list[tuple[int, int]] = []
        for part in pattern:
            if isinstance(part, list):
                ids += part
                runs.append((len(part), ContextKind.TEMPLATE))
                continue
            inner = self.codec.encode_text(texts[part.number]) if part.number < len(texts) else fixed[part.number - len(texts)]
            ids += inner
            runs.append((len(inner), kind))
        return Context(ids_array(ids), spans_of(runs))

    def _learn_opening(self, instructions: str, tools_json: str, roles: tuple[str, ...]) -> tuple[_Pattern, list[list[int]]]:
        slots = Slots(len(roles))
        messages = [{"role": role, "content": Slots.mark(n)} for n, role in enumerate(roles)]
        if instructions:
            messages.insert(0, {"role": "system", "content": slots.take(instructions)})
        tools = json.loads(tools_json) if tools_json else []
        pattern = self._pattern(self._render(messages, tools, True, slots))
        self._expect(pattern, set(range(len(roles) + bool(instructions))), f"instructions and messages {list(roles)}")
        return pattern, [self.codec.encode_text(text) for text in slots.texts]

    def _learn_bridge(self, roles: tuple[str, ...], prompt: bool) -> _Pattern:
        """What stands after an assistant's text when messages with `roles` follow."""
        slots = Slots(len(roles) + 2)
        answer = len(roles)
        messages = [{"role": "user", "content": Slots.mark(answer + 1)}, {"role": "assistant", "content": Slots.mark(answer)}]
        messages += [{"role": role, "content": Slots.mark(n)} for n, role in enumerate(roles)]
        pattern = self._pattern(self._render(messages, [], prompt, slots))
        self._expect(pattern, set(range(len(roles) + 2)), f"an assistant's turn and {list(roles)}")
        after = pattern[pattern.index(_Slot(answer)) + 1 :]
        if not after or not isinstance(after[0], list) or after[0][0] != self.end_id:
            raise TemplateError("the chat template does not write the end token right after an assistant's text")
        return after

    def _pattern(self, rendered: str) -> _Pattern:
        parts = cut_at_slots(rendered)
        return tuple(self.codec.encode_template(part) if isinstance(part, str) else _Slot(part) for part in parts)

    @staticmethod
    def _expect(pattern: _Pattern, numbers: set[int], what: str) -> None:
        found = [part.number for part in pattern if isinstance(part, _Slot) and part.number in numbers]
        if sorted(found) != sorted(numbers):
            raise TemplateError(f"the chat template does not show {what} once each: it cannot be used for append-only chat")

    def _check(self) -> None:
        """Bridges must not depend on what came before: two turns back to back show the same one."""
        once = self._bridge(("user",), True)
        messages = [{"role": "user", "content": Slots.mark(0)}]
        for turn in range(2):
            messages.append({"role": "assistant", "content": Slots.mark(2 * turn + 1)})
            messages.append({"role": "user", "content": Slots.mark(2 * turn + 2)})
        twice = self._pattern(self._render(messages, [], True, Slots(5)))
        last = twice[twice.index(_Slot(3)) + 1 :]
        if [part for part in last if isinstance(part, list)] != [part for part in once if isinstance(part, list)]:
            raise TemplateError("the chat template writes a later turn differently from a first one")


class Slots:
    """Numbers for texts that must not pass through the template."""

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved
        self.texts: list[str] = []

    @staticmethod
    def mark(number: int) -> str:
        return f"\ue000{number}\ue001"

    def take(self, text: str) -> str:
        self.texts.append(text)
        return self.mark(self._reserved + len(self.texts) - 1)


def cut_at_slots(rendered: str) -> list[str | int]:
    """Text, and the numbers of the slots between."""
    parts = [int(part) if n % 2 else part for n, part in enumerate(_SLOT.split(rendered))]
    return [part for part in parts if part != ""]


Render = Callable[[list[dict[str, str]], list[Json], bool, Slots], str]


def compile_template(template: str) -> Render:
    """The template as Hugging Face runs it (same sandbox, same whitespace rules), except that `tojson` makes slots.

    Raises TemplateError.
    """
    try:
        from jinja2 import TemplateError as JinjaError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise TemplateError("actors need jinja2: pip install 'polyturn[actors]'") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def refuse(message: str) -> None:
        raise JinjaError(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: ""  # a prompt must not change with the date

    taking: list[Slots] = []  # those of the render that runs

    def to_json(value: Json, **_: Json) -> str:
        return taking[-1].take(json.dumps(value, ensure_ascii=False))

    environment.filters["tojson"] = to_json
    try:
        compiled = environment.from_string(template)
    except JinjaError as error:
        raise TemplateError(f"the chat template is broken: {error}") from error

    def render(messages: list[dict[str, str]], tools: list[Json], prompt: bool, slots: Slots) -> str:
        taking[:] = [slots]
        try:
            return compiled.render(messages=messages, tools=tools or None, add_generation_prompt=prompt)
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the chat template cannot show {[m['role'] for m in messages]}: {error}") from error

    return render
