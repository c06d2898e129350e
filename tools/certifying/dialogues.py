"""Does each prompt that an actor makes begin with the one before and what was sampled, and is its text the template's own?

Scripted turns are compared with what the chat template renders of the same dialogue. Many templates rewrite older turns (they
drop reasoning); from there on the template itself is no reference, which is told and is no failure: append-only prompts differ
from it on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actors.chat import Chat
from actors.codec import END_THINK, THINK, ModelFiles, decode
from actors.conversation import Conversation
from actors.history import Beginning, History
from actors.template import Slots, TemplateError, compile_template, cut_at_slots
from common.types import Action, Json, Message, ToolCall
from tools.certifying.engine import Ask, Engine
from tools.certifying.played import Played, Written, parser_of
from tools.certifying.rows import Row, Verdict, judged, not_run, quoted

INSTRUCTIONS = "Be brief."
TASK = Message("user", "What is 1+1?")
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look there.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
LIVE_TOKENS = 8  # of one sampled turn


@dataclass(frozen=True)
class Turn:
    """What the policy writes, and what it is answered."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    answers: tuple[Message, ...] = (Message("user", "And 2+2?"),)
    ended: bool = True


@dataclass(frozen=True)
class Dialogue:
    name: str
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...] = ()


def _call(at: str) -> ToolCall:
    return ToolCall("", "look", {"at": at})


def _told(*texts: str) -> tuple[Message, ...]:
    return tuple(Message("tool", text) for text in texts)


THOUGHT = f"{THINK}\nI add.\n{END_THINK}\n\nIt is 2."
DIALOGUES = (
    Dialogue("user turns", (Turn("It is 2."), Turn("It is 4."), Turn("Yes."))),
    Dialogue(
        "a tool's answers", (Turn("", (_call("up"),), _told("a wall")), Turn("", (_call("left"),), _told("a door"))), (TOOL,)
    ),
    Dialogue("several answers", (Turn("", (_call("up"), _call("left")), _told("a wall", "a door")), Turn("Left.")), (TOOL,)),
    Dialogue("reasoning", (Turn(THOUGHT), Turn(THOUGHT))),
    Dialogue("a turn cut by length", (Turn("It is", ended=False), Turn("It is 4."))),
)


def scripted(chat: Conversation, files: ModelFiles, options: dict[str, Any], history: type[History] = History) -> Iterator[Row]:
    """A row per dialogue. `history`: what makes the prompts; actors have History."""
    for dialogue in DIALOGUES:
        try:
            said = _said(chat, dialogue)
        except ValueError as error:  # a format may know no several calls
            yield Row(f"prefix: {dialogue.name}", Verdict.NOT_RUN, reason=str(error), required=False)
            continue
        played = begin(chat, dialogue, history)
        for turn, ids in zip(dialogue.turns, said, strict=True):
            played.turn(ids, turn.answers)
        problems, lengths = played.problems(), ", ".join(str(len(prompt)) for prompt, _ in played.written)
        evidence = f"prompts of {lengths} ids, each begins with the one before and its sample, and the record has them all"
        if isinstance(chat, Chat):
            found, told = _compare(chat, files, options, dialogue, played.written)
            problems, evidence = problems + found, f"{evidence}; {told}"
        yield judged(f"prefix: {dialogue.name}", problems, evidence)


def _said(chat: Conversation, dialogue: Dialogue) -> list[list[int]]:
    """The dialogue's turns as ids, in the place of samples. Raises ValueError."""
    out = []
    for turn in dialogue.turns:
        if turn.calls:
            out.append(parser_of(chat).encode(Action(turn.text, turn.calls)))
        else:
            text = turn.text.removeprefix(f"{THINK}\n") if chat.opens_reasoning else turn.text
            out.append([*chat.codec.encode_template(text), *([chat.end_id] if turn.ended else [])])
    return out


def begin(chat: Conversation, dialogue: Dialogue, history: type[History] = History) -> Played:
    tools = json.dumps(list(dialogue.tools)) if dialogue.tools else ""
    return Played(chat, Beginning(INSTRUCTIONS, tools, (TASK,)), history)


def opening(chat: Conversation, dialogue: Dialogue) -> list[int]:
    return begin(chat, dialogue).prompt


# ---- against the template's own rendering -------------------------------------------------------------------------


def _compare(
    chat: Conversation, files: ModelFiles, options: dict[str, Any], dialogue: Dialogue, written: Written
) -> tuple[list[str], str]:
    """Problems, and what the comparison saw."""
    template = _Template(chat, files, options, dialogue, decode(chat.codec, written[0][0]))
    before: list[str] = []
    for n, (prompt, _) in enumerate(written):
        ours = decode(chat.codec, prompt)
        try:
            theirs = template.after(written[:n])
        except TemplateError as error:
            return [], f"the template does not show this: {error}"
        if before:
            said = decode(chat.codec, written[n - 1][1])
            stable = [text for text in theirs if any(text.startswith(old + said) for old in before)]
            if not stable:
                at, old, new = _differ(before[0] + said, theirs[0])
                return [], f"template not prefix-stable at turn {n + 1}: character {at} was {old} and is now {new}; ours keeps it"
            theirs = stable
        if ours not in theirs:
            at, mine, other = _differ(ours, theirs[0])
            return [
                f"prompt {n + 1} is not what the template writes: at character {at} {mine}, the template {other}"
            ], "see below"
        before = theirs
    return [], f"text equals the template's ({len(ours)} characters)"


class _Template:
    """What the chat template itself makes of a dialogue. Tools and roles that it does not show stand where `Chat` puts them: in
    the instructions, in the user's turn."""

    def __init__(self, chat: Conversation, files: ModelFiles, options: dict[str, Any], dialogue: Dialogue, first: str) -> None:
        """`first`: the text of the dialogue's first prompt."""
        self._chat, self._dialogue = chat, dialogue
        self._compiled = compile_template(files.template, {**files.special_tokens, **options})
        explained = chat.format.explain(list(dialogue.tools)) if dialogue.tools else ""
        told = bool(explained) and explained in first
        self._tools = [] if told else list(dialogue.tools)
        system = f"{INSTRUCTIONS}\n\n{explained}" if told else INSTRUCTIONS
        self._start = [{"role": "system", "content": system}, {"role": TASK.role, "content": TASK.text}]

    def after(self, written: Written) -> list[str]:
        """The prompt after the turns of `written`: with calls as structures, and as the text that was written. Raises
        TemplateError when it shows neither."""
        out: list[str] = []
        for structured in (True, False):
            messages: list[Any] = list(self._start)
            for turn, (_, ids) in zip(self._dialogue.turns, written, strict=False):
                messages.append(_assistant(self._chat, turn, ids, structured))
                messages += [{"role": self._role(answer), "content": answer.text} for answer in turn.answers]
            try:
                out.append(self._text(messages))
            except TemplateError:
                if not structured and not out:
                    raise
        return list(dict.fromkeys(out))

    def _text(self, messages: list[Any]) -> str:
        slots = Slots(0)
        parts = cut_at_slots(self._compiled(messages, self._tools, True, slots))
        return "".join(slots.texts[part] if isinstance(part, int) else part for part in parts)

    def _role(self, message: Message) -> str:
        shown = [*self._start, {"role": "assistant", "content": "a"}, {"role": message.role, "content": message.text}]
        try:
            return message.role if message.text in self._text(shown) else "user"
        except TemplateError:
            return "user"


def _assistant(chat: Conversation, turn: Turn, ids: Sequence[int], structured: bool) -> dict[str, Any]:
    if turn.calls and structured:
        calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
        return {"role": "assistant", "content": turn.text, "tool_calls": calls}
    said = decode(chat.codec, ids[:-1] if chat.ended(ids) else ids)
    return {"role": "assistant", "content": turn.text if THINK in turn.text else said}


def _differ(ours: str, theirs: str) -> tuple[int, str, str]:
    """Where two texts part, and how each goes on there."""
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return at, quoted(ours[at : at + 24]), quoted(theirs[at : at + 24])


# ---- with the engine's own samples --------------------------------------------------------------------------------


def sampled(chat: Conversation, engine: Engine, limit: int) -> Row:
    """The same dialogues, each turn sampled: how many ids the engine counts, and how many it had in its cache."""
    check, problems, turns, cut, prompts, cached = "prefix: sampled turns", [], 0, 0, [], []
    for number, dialogue in enumerate(DIALOGUES):
        played = begin(chat, dialogue)
        for turn in dialogue.turns:
            prompt = played.prompt
            if len(prompt) + LIVE_TOKENS > limit:
                break
            sample = engine.generate(Ask(prompt, LIVE_TOKENS, stops=stops(chat), seed=100 + number))
            counted = sample.meta.get("prompt_tokens")
            if counted != len(prompt):
                problems.append(f"{dialogue.name}, turn {turns + 1}: {len(prompt)} ids were sent, the engine counts {counted}")
            outside = [i for i in sample.ids if not 0 <= i < len(chat.codec.pieces)]
            if outside or not sample.ids:
                problems.append(f"{dialogue.name}: sampled ids {outside} have no token" if outside else "nothing was sampled")
                break
            turns, cut = turns + 1, cut + (not chat.ended(sample.ids))
            prompts.append(len(prompt))
            cached.append(int(sample.meta.get("cached_tokens") or 0))
            played.turn(sample.ids, turn.answers)
        problems += [f"{dialogue.name}: {problem}" for problem in played.problems()] if len(played.written) > 1 else []
    if not turns:
        return judged(check, problems, "") if problems else not_run([check], f"every prompt passes {limit} tokens")[0]
    again = f"{sum(cached)} of {sum(prompts)} prompt ids came from its cache"
    return judged(check, problems, f"{turns} turns, {cut} without an end token, prompts of up to {max(prompts)} ids; {again}")


def stops(chat: Conversation) -> tuple[int, ...]:
    """Ids at which a turn ends, as actors send them."""
    return tuple(dict.fromkeys((chat.end_id, *sorted(chat.end_ids))))
