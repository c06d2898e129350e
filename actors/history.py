"""What an agent is shown of what happened: the opening, then its turns and the answers to them, as a context policy has it.

Whatever a policy leaves out, replaces or sums up, the next prompt is some leading part of the sequence so far and new context
behind it (`parent` and `prefix_len` of a step). Turns that are shown again are the ids that were sampled, as REPLAY. Appending
costs what is appended; only a rewriting looks at the whole dialogue, and starts a new segment.

Dimension key: P tokens of a prompt, A action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from actors.chat import Context, Remark
from actors.conversation import Conversation
from actors.observations import Room
from common.types import ActionKind, ContextKind, ContextPolicy, Message, Spans, expand_spans, ids_array, spans_from, spans_of

PLACEHOLDER = "[This answer is no longer shown.]"
UNSHOWN = "[Earlier turns that are not shown: {count}.]"
SUMMED_UP = "[Earlier turns that are not shown: {count}. They come to this:]\n"
ASK = (
    "The conversation is about to be cut. Sum up what matters for the task: what was found, what was tried, what is left to do. "
    "Call no tool. Your summary will stand in the place of what is cut."
)


@dataclass(frozen=True)
class View:
    """Which part of a history is shown. Every number only grows."""

    first: int = 0  # turns before it are not shown
    hidden: int = 0  # answers to turns before it are placeholders
    bare: int = 0  # turns before it are shown without their reasoning


@dataclass(frozen=True)
class Rules:
    """A context policy's options; their meaning stands at ContextConfig."""

    name: str = "append"
    turns: int = 0
    tokens: int = 0
    keep: int = 0
    summary_tokens: int = 0
    summary_url: str = ""
    summary_model: str = ""
    observations: int = 0
    reasoning: str = "keep"
    slack: int = 0
    observation_tokens: int = 0
    subagent_turns: int = 0
    subagent_calls: int = 0

    @classmethod
    def of(cls, policy: ContextPolicy) -> Self:
        """Raises ValueError for what this actor does not know: it would be ignored."""
        known = {field.name for field in fields(cls)} - {"name"}
        if policy.name not in ("append", "window", "discard", "summary") or not known.issuperset(policy.options):
            unknown = sorted(set(policy.options) - known)
            raise ValueError(f"context policy {policy.name!r} with {unknown or 'these options'} is unknown to this actor")
        return cls(policy.name, **policy.options)

    def of_reference(self) -> Self:
        """The same without what a reference solution has no words for."""
        return replace(self, name="append", tokens=0) if self.name == "summary" else self

    def trim(self, now: View, turns: int, by_user: bool) -> View:
        """What `turns` turns alone decide; `by_user`: the newest answer has a user's message."""
        first, hidden, bare = now.first, now.hidden, now.bare
        if self.name == "window" and turns - first > self.turns + self.slack:
            first = turns - self.turns
        if self.observations and turns - hidden > self.observations + self.slack:
            hidden = turns - self.observations
        if (self.reasoning == "drop" and turns - bare > self.slack) or (self.reasoning == "drop_at_user" and by_user):
            bare = turns
        return View(first, hidden, bare)

    def cut(self, now: View, turns: int, tokens: int) -> View:
        """What the length of the next prompt decides, if it would have `tokens`."""
        if self.name in ("discard", "summary") and tokens > self.tokens:
            return replace(now, first=max(now.first, turns - self.keep))
        return now


@dataclass(frozen=True, eq=False)
class Prompt:
    """The ids that an engine gets, and how the record says them."""

    ids: np.ndarray  # [P] int32
    parent: int
    prefix_len: int
    context: Context

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class _Turn:
    ids: np.ndarray  # [A] int32
    spans: Spans
    ended: bool
    messages: tuple[Message, ...]  # the answer to it


@dataclass(frozen=True)
class Beginning:
    """What stands before an agent's first turn."""

    instructions: str
    tools_json: str
    messages: tuple[Message, ...]


class History:
    """Of one agent. `ids` is the full sequence of its newest step, `last` that step's index; a sub-agent's are its caller's
    until its own first step."""

    def __init__(self, chat: Conversation, rules: Rules, beginning: Beginning, limit: int, turn: int = 1) -> None:
        """`limit`: tokens of a sequence, limits.max_tokens; `turn`: of one turn, limits.max_new_tokens."""
        self._chat, self.rules, self._beginning, self._limit, self._turn = chat, rules, beginning, limit, turn
        self.view = View()
        self.summary: tuple[int, ...] = ()
        self.ids, self.last = ids_array([]), -1
        self._turns: list[_Turn] = []
        self._shown: dict[tuple[int, bool], Context] = {}  # answers by turn and whether they are hidden: as they were shown first
        self._thoughtless: dict[int, np.ndarray] = {}  # turns without their reasoning
        self.answered = False  # whether the newest step was a turn, and the answer to it is known

    @property
    def tools_json(self) -> str:
        return self._beginning.tools_json

    # ---- what happened --------------------------------------------------------------------------------------

    def stored(self, prompt: Prompt, ids: Sequence[int], index: int) -> None:
        """Step `index` was sampled from `prompt`."""
        self.ids, self.last, self.answered = np.concatenate([prompt.ids, ids_array(ids)]), index, False

    def branch(self, caller: History) -> None:
        """This agent begins where `caller` is, and shares with it what their openings have in common."""
        self.ids, self.last = caller.ids, caller.last

    def turn(self, ids: Sequence[int], spans: Spans, messages: Sequence[Message]) -> None:
        """The newest step was a turn, and this is the answer to it."""
        self.answered = True
        self._turns.append(_Turn(ids_array(ids), spans, self._chat.ended(ids), tuple(messages)))

    def summed_up(self, ids: Sequence[int], spans: Spans) -> None:
        """The newest step was a summary: what it says outside of reasoning and calls is shown from now on, without control
        tokens: it stands in a user's message, which it must not end. One that says nothing leaves the last one."""
        said = self._without(ids_array(ids), spans, ActionKind.REASONING, ActionKind.CALL)
        control = set(self._chat.codec.control.values())
        self.summary = tuple(i for i in said.tolist() if i not in control) or self.summary

    def _bare(self, number: int) -> np.ndarray:
        """A turn without its reasoning; made when a policy first wants it, never for one that keeps all."""
        if number not in self._thoughtless:
            turn = self._turns[number]
            self._thoughtless[number] = self._without(turn.ids, turn.spans, ActionKind.REASONING)
        return self._thoughtless[number]

    def _without(self, ids: np.ndarray, spans: Spans, *left_out: ActionKind) -> np.ndarray:
        """The ids of other kinds; the space after what is left out at the beginning goes with it, as templates have it."""
        stays = ~np.isin(expand_spans(spans, len(ids)), left_out)
        if stays.all():
            return ids
        pieces = self._chat.codec.pieces
        for n in range(int(np.argmin(stays)), len(ids)):
            if stays[n] and pieces[ids[n]].strip():
                break
            stays[n] = False
        return ids[stays]

    # ---- what is shown --------------------------------------------------------------------------------------

    def begin(self) -> Prompt:
        return self._prompt(self._opening(View()))

    def next_view(self) -> View:
        """What the policy wants to be shown after the newest turn."""
        messages = self._turns[-1].messages
        by_user = any(message.role == "user" for message in messages)
        view = self.rules.trim(self.view, len(self._turns), by_user)
        if self.rules.tokens:
            tokens = len(self.ids) + len(self._answer(ENOUGH)) if view == self.view else len(self._whole(view, ENOUGH))
            view = self.rules.cut(view, len(self._turns), tokens)
        return view

    def show(self, view: View) -> Prompt:
        """The prompt after the newest turn, in `view`. It may be longer than the limit when nothing can be shortened."""
        if view == self.view:
            context = self._answer(self._limit - len(self.ids))
            self._shown[len(self._turns) - 1, False] = context
            return Prompt(np.concatenate([self.ids, context.ids]), self.last, len(self.ids), context)
        self.view = view
        return self._prompt(self._whole(view, self._limit))

    def ask(self) -> Prompt:
        """The prompt for a summary of everything that is shown, the newest answer included."""
        context = self._answer(self._limit - len(self.ids), Remark("user", ASK), turn=self.rules.summary_tokens)
        return Prompt(np.concatenate([self.ids, context.ids]), self.last, len(self.ids), context)

    def tail(self) -> Context:
        """The newest answer, without a generation prompt."""
        turn = self._turns[-1]
        return self._chat.tail(
            turn.ended, turn.messages, Room(self._limit - len(self.ids), self.rules.observation_tokens or None)
        )

    def transcript(self, view: View) -> str:
        """For another model: what is shown now and will not be in `view`, in words, as it is shown."""
        said = [self._beginning.instructions, *[f"[{m.role}]\n{m.text}" for m in self._beginning.messages]]
        said += [self._text(self.summary)] if self.summary else []
        for number in range(self.view.first, view.first):
            turn = self._turns[number]
            ids = self._bare(number) if number < self.view.bare else turn.ids
            said.append(f"[assistant]\n{self._text(ids[: len(ids) - turn.ended].tolist())}")
            answer = self._earlier(number, hidden=number < self.view.hidden)
            roles = " ".join(dict.fromkeys(message.role for message in turn.messages))
            said.append(f"[{roles}]\n{self._words(answer)}")
        return "\n\n".join(filter(None, said))

    def _words(self, context: Context) -> str:
        """Without what the template has written: a line for each text between it."""
        template = expand_spans(context.spans, len(context)) == ContextKind.TEMPLATE
        cuts = np.flatnonzero(np.diff(template)) + 1
        runs = zip(np.split(context.ids, cuts), np.split(template, cuts), strict=True)
        return "\n".join(self._text(ids.tolist()) for ids, wrapper in runs if not wrapper.all())

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(self._chat.codec.pieces[i] for i in ids).decode("utf-8", "replace")

    def _answer(self, room: int, *remarks: Remark, turn: int = 0) -> Context:
        """The newest answer and the next generation prompt in `room`, which the turn behind them shares: it gets `turn` tokens,
        or half of what there is, or, where wrappers leave no more, one."""
        newest, each = self._turns[-1], self.rules.observation_tokens or None
        messages = (*newest.messages, *remarks)
        left = room - max(1, min(turn or self._turn, room // 2))
        context = self._chat.bridge(newest.ended, messages, Room(left, each))
        return context if len(context) <= left else self._chat.bridge(newest.ended, messages, Room(room - 1, each))

    def _opening(self, view: View) -> Context:
        b = self._beginning
        remarks: list[Remark] = []
        if view.first:
            text = SUMMED_UP if self.summary else UNSHOWN
            remarks = [Remark("user", text.format(count=view.first), summary=self.summary)]
        return self._chat.opening(b.instructions, b.tools_json, (*b.messages, *remarks))

    def _whole(self, view: View, room: int) -> Context:
        """All of the next prompt, at most `room` tokens if the newest answer can be shortened so far."""
        pieces = [self._opening(view)]
        for number in range(view.first, len(self._turns)):
            turn, bare = self._turns[number], number < view.bare
            if bare:
                pieces[-1] = _cut(pieces[-1], 0, len(pieces[-1]) - self._chat.thought)  # a generation prompt may open it
            ids = self._bare(number) if bare else turn.ids
            pieces.append(Context(ids, spans_of([(len(ids), ContextKind.REPLAY)])))
            if number < len(self._turns) - 1:
                pieces.append(self._earlier(number, hidden=number < view.hidden))
            else:
                pieces.append(self._answer(room - sum(map(len, pieces))))
                self._shown[number, False] = pieces[-1]
        return _joined(pieces)

    def _earlier(self, number: int, hidden: bool) -> Context:
        if (number, hidden) not in self._shown:
            turn = self._turns[number]
            messages = tuple(Remark(m.role, PLACEHOLDER) for m in turn.messages) if hidden else turn.messages
            self._shown[number, hidden] = self._chat.bridge(
                turn.ended, messages, Room(None, self.rules.observation_tokens or None)
            )
        return self._shown[number, hidden]

    def _prompt(self, whole: Context) -> Prompt:
        """`whole` as what it has in common with the sequence so far, and the rest."""
        shortest = min(len(whole), len(self.ids))
        differs = np.flatnonzero(whole.ids[:shortest] != self.ids[:shortest])
        prefix = int(differs[0]) if len(differs) else shortest
        return Prompt(whole.ids, self.last, prefix, _cut(whole, prefix, len(whole)))


def check_room(chat: Conversation, rules: Rules, limit: int, turn: int) -> None:
    """Raises ValueError when a policy that sums up would have no room for the question, which comes in the model's tokens."""
    if rules.name != "summary" or rules.summary_url:
        return
    question = len(chat.bridge(True, [Message("tool", ""), Remark("user", ASK)]))
    needed = rules.tokens + turn + question + rules.summary_tokens
    if needed > limit:
        raise ValueError(
            f"context.tokens {rules.tokens} comes too late for a summary: with a turn of {turn}, the question ({question}) "
            f"and context.summary_tokens {rules.summary_tokens} it makes {needed} tokens, limits.max_tokens is {limit}"
        )


ENOUGH = 2**31  # room for anything


def _cut(context: Context, begin: int, end: int) -> Context:
    return Context(context.ids[begin:end], spans_from(expand_spans(context.spans, len(context))[begin:end]))


def _joined(pieces: Sequence[Context]) -> Context:
    kinds = [expand_spans(piece.spans, len(piece)) for piece in pieces]
    return Context(np.concatenate([piece.ids for piece in pieces]), spans_from(np.concatenate(kinds)))
