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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from actors.codec import CACHED_CHARS, END_THINK, THINK, Codec, ModelFiles
from actors.observations import ENDLESS, Part, Room, assemble
from actors.template import Slots, TemplateError, compile_template, cut_at_slots
from actors.toolcalls import FORMATS, format_of
from actors.toolcalls.formats import ToolFormat
from common.types import ContextKind, Json, Message, Spans, ids_array, spans_of


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens that nobody sampled, [C] int32, and where they came from."""

    ids: np.ndarray
    spans: Spans

    def __len__(self) -> int:
        return len(self.ids)


EMPTY = Context(ids_array([]), spans_of([]))


@dataclass(frozen=True)
class Remark(Message):
    """A message of the agent loop: `text`, then `summary`, ids that are shown as they are."""

    summary: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Words:
    """What goes into a message's slot."""

    text: str
    remark: bool = False
    summary: tuple[int, ...] = ()
    more: tuple[_Words, ...] = ()  # of further messages in the same slot

    def parts(self, codec: Codec, kind: ContextKind) -> list[Part]:
        own = Part(codec.encode_text(self.text), ContextKind.NOTICE if self.remark else kind, text=not self.remark)
        parts = [own, Part(self.summary, ContextKind.SUMMARY)] if self.remark else [own]
        for words in self.more:
            parts += [Part(codec.encode_text("\n\n"), ContextKind.NOTICE), *words.parts(codec, kind)]
        return parts


@dataclass(frozen=True)
class _Slot:
    number: int


@dataclass(frozen=True)
class _Role:
    """Under which role a message is shown, on which sides the template trims its text, and whether it quotes it."""

    name: str
    trims_left: bool
    trims_right: bool
    quotes: bool

    def text(self, text: str) -> str:
        text = text.lstrip() if self.trims_left else text
        text = text.rstrip() if self.trims_right else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.quotes else text


_Pattern = tuple["list[int] | _Slot", ...]  # ids of the template, and slots between them


class Chat:
    """One model's chat format. `end_id` ends every turn of the policy; an engine may also stop at another of `end_ids`.

    Texts reach the policy as the template would show them: a template that trims what it is given has them trimmed, one that
    writes them as JSON has them quoted. A template that does not show tools has them explained at the end of the instructions,
    one that does not show tools' answers has them shown as the user's.
    """

    def __init__(self, files: ModelFiles, format: ToolFormat | None = None, options: Mapping[str, Any] | None = None) -> None:
        """`options` go to the template (enable_thinking, ...). Raises TemplateError."""
        if not files.template:
            raise TemplateError('the model has no chat template; set chat.template = "raw" for a base model, or add one')
        self.codec = files.codec
        self.end_id = files.codec.control[files.end_token]
        self.end_ids = frozenset((self.end_id, *files.end_ids))
        self._render = compile_template(files.template, {**files.special_tokens, **(options or {})})
        self.format = format or FORMATS[format_of(files.template)]()
        self._shows_tools = isinstance(self.format, FORMATS[format_of(files.template)]) and self._learn_shows_tools()
        self._alternates = self._learn_alternates()
        self._role = functools.lru_cache(None)(self._learn_role)
        self._opening = functools.lru_cache(256)(self._learn_opening)
        self._bridge = functools.lru_cache(256)(self._learn_bridge)
        self._known_bridge = functools.lru_cache(8192)(self._fill_bridge)  # short observations repeat
        self._check()
        # A generation prompt may open the reasoning for the policy; then a turn begins inside it.
        prompt = self._bridge((), True)[-1]
        self.thought = _open_thought(self.codec, prompt) if isinstance(prompt, list) else 0
        self.opens_reasoning = self.thought > 0

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a turn's last id ends it."""
        return bool(ids) and ids[-1] in self.end_ids

    def opening(self, instructions: str, tools_json: str, messages: Sequence[Message]) -> Context:
        """The first prompt: instructions, tools and the task's messages, up to the generation prompt."""
        roles, words = self._shown(messages)
        pattern, fixed = self._opening(instructions, tools_json, roles)
        return self._fill(pattern, words, ContextKind.TASK, fixed)

    def bridge(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context:
        """From a sampled turn to the next generation prompt; texts are shortened to fit into `room`.

        `ended`: the turn's last id is the end token. If not (the engine cut it), the bridge writes the end token itself,
        as context: it was not sampled.
        """
        return self._after(ended, messages, True, room)

    def tail(self, ended: bool, messages: Sequence[Message], room: Room = ENDLESS) -> Context:
        """The observation after the last turn, in its wrappers, without a generation prompt. Empty without messages."""
        return self._after(ended, messages, False, room) if messages else EMPTY

    def _after(self, ended: bool, messages: Sequence[Message], prompt: bool, room: Room) -> Context:
        roles, words = self._shown(messages)
        if sum(len(message.text) for message in messages) > CACHED_CHARS:
            return self._fill_bridge(ended, roles, words, prompt, room)
        whole = self._known_bridge(ended, roles, words, prompt)
        fits = room.each is None and (room.whole is None or len(whole) <= room.whole)
        return whole if fits else self._fill_bridge(ended, roles, words, prompt, room)

    def _shown(self, messages: Sequence[Message]) -> tuple[tuple[str, ...], tuple[_Words, ...]]:
        """Roles and words as the template shows them."""
        roles = [self._role(message.role) for message in messages]
        said = [
            (role.name, _Words(m.text, True, m.summary) if isinstance(m, Remark) else _Words(role.text(m.text)))
            for role, m in zip(roles, messages, strict=True)
        ]
        if self._alternates:
            said = [_joined(list(same)) for _, same in groupby(said, key=lambda pair: pair[0])]
        return tuple(name for name, _ in said), tuple(words for _, words in said)

    def _fill_bridge(
        self, ended: bool, roles: tuple[str, ...], words: tuple[_Words, ...], prompt: bool, room: Room = ENDLESS
    ) -> Context:
        pattern = self._bridge(roles, prompt)
        if ended:
            first = pattern[0]
            assert isinstance(first, list)  # _learn_bridge has seen to it
            pattern = (first[1:], *pattern[1:])
        return self._fill(pattern, words, ContextKind.OBSERVATION, (), room)

    def _fill(
        self, pattern: _Pattern, words: Sequence[_Words], kind: ContextKind, fixed: Sequence[list[int]], room: Room = ENDLESS
    ) -> Context:
        """Put encoded texts into slots: first the messages', then the `fixed` ones (already encoded)."""
        parts: list[Part] = []
        for part in pattern:
            if isinstance(part, list):
                parts.append(Part(part, ContextKind.TEMPLATE))
            elif part.number < len(words):
                parts += words[part.number].parts(self.codec, kind)
            else:
                parts.append(Part(fixed[part.number - len(words)], kind))
        ids, runs = assemble(parts, self.codec, room)
        return Context(ids_array(ids), spans_of(runs))

    # ---- learning from the template ------------------------------------------------------------------------

    def _learn_shows_tools(self) -> bool:
        slots = Slots(1)
        tool = {"type": "function", "function": {"name": slots.take("f"), "description": "", "parameters": {}}}
        shown = cut_at_slots(self._render([{"role": "user", "content": Slots.mark(0)}], [tool], True, slots))
        return any(isinstance(part, int) and part > 0 for part in shown)

    def _learn_alternates(self) -> bool:
        """Whether the template refuses two messages of one role in a row: then they share one."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            self._render([*turn, turn[0], turn[0]], [], True, Slots(0))
        except TemplateError:
            return True
        return False

    def _learn_role(self, role: str) -> _Role:
        """How messages of `role` are shown. A template without answers of tools takes them as the user's."""
        if not role.isidentifier():  # the template writes it as it is
            raise TemplateError(f"{role!r} is no role of a message; an environment answers as 'tool' or 'user'")
        slots = Slots(1)
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        before = turn if role in ("user", "tool") else turn[:1] if role == "assistant" else []
        behind = [{"role": "user", "content": "a"}] if role == "system" else []
        try:
            shown = self._render([*before, {"role": role, "content": f" {Slots.mark(0)} "}, *behind], [], False, slots)
        except TemplateError:
            shown = ""
        if Slots.mark(0) not in shown:
            if role == "tool":
                return self._learn_role("user")
            raise TemplateError(f"the chat template does not show messages of role {role!r}")
        left, _, right = shown.partition(Slots.mark(0))
        return _Role(role, not left.endswith(" "), not right.startswith(" "), 0 in slots.quoted)

    def _learn_opening(self, instructions: str, tools_json: str, roles: tuple[str, ...]) -> tuple[_Pattern, list[list[int]]]:
        slots = Slots(len(roles))
        messages = [{"role": role, "content": Slots.mark(n)} for n, role in enumerate(roles)]
        tools = json.loads(tools_json) if tools_json else []
        if tools and not self._shows_tools:
            instructions, tools = "\n\n".join(filter(None, (instructions, self.format.explain(tools)))), []
        if instructions:
            messages.insert(0, {"role": "system", "content": slots.take(self._role("system").text(instructions))})
        pattern = self._pattern(self._render(messages, self._safe(tools, slots), True, slots))
        self._expect(pattern, set(range(len(roles) + bool(instructions))), f"instructions and messages {list(roles)}")
        return pattern, [self.codec.encode_text(text) for text in slots.texts]

    def _safe(self, tools: list[Json], slots: Slots) -> list[Json]:
        """Tools whose names and descriptions are slots: a template may write them without tojson.

        Slots inside of what is dumped as JSON are filled there.
        """

        def safe(value: Json, key: str = "") -> Json:
            if isinstance(value, dict):
                return {name: safe(inner, name) for name, inner in value.items()}
            if isinstance(value, list):
                return [safe(inner) for inner in value]
            return slots.take(value) if key in ("name", "description") and isinstance(value, str) else value

        return [safe(tool) for tool in tools]

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


def _joined(said: list[tuple[str, _Words]]) -> tuple[str, _Words]:
    (role, first), *others = said
    return role, replace(first, more=tuple(words for _, words in others))


def _open_thought(codec: Codec, prompt: Sequence[int]) -> int:
    """How many ids at the end of a generation prompt open the reasoning and stay in it; 0 when it does not."""
    pieces = [codec.pieces[i] for i in prompt]
    shown = b"".join(pieces)
    opened = shown.rfind(THINK.encode())
    if opened <= shown.rfind(END_THINK.encode()):
        return 0
    return sum(start >= opened for start in accumulate(map(len, pieces[:-1]), initial=0))
