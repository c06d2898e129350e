"""Turns: from sampled ids to what the environment and the record see, and back.

A turn is read as bytes, with the place of every token, so that the kind of each token is exact. Where the tokenizer has ids of
its own for a mark such as <think> or <tool_call>, only these ids delimit; the same characters spelled by other tokens are text.
The end of a call's JSON is found by a JSON decoder, never by looking for a bracket. Nothing in the reasoning is read, and
nothing is executed from a turn that was cut. Each call succeeds or fails alone; a failed one carries a text that tells the
policy what to change. A turn is read once it is whole, so how an engine cuts it into chunks changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from actors.codec import END_THINK, THINK, Codec
from actors.toolcalls.arguments import NO_SCHEMAS, Schemas
from actors.toolcalls.formats import Control, Hermes, ToolFormat
from actors.toolcalls.scan import Mark, Scan, joined, token_kinds
from common.types import Action, ActionKind, Finish, Spans, ToolCall, spans_of


@dataclass(frozen=True, eq=False)
class Turn:
    """A sampled turn as the environment and the record see it."""

    action: Action
    spans: Spans  # ActionKind of each token
    reasoning: str
    problems: int  # calls that failed to parse, plus one if the reasoning never closed


class TurnParser:
    """Reads turns of one tokenizer. `end_id` at the end of a turn is not part of its text."""

    def __init__(
        self,
        codec: Codec,
        end_id: int,
        opens_reasoning: bool = False,
        format: ToolFormat | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        """`end_ids`: others that may end a turn."""
        self._codec = codec
        self._end_id = end_id
        self._end_ids = {end_id, *end_ids}
        self._opens_reasoning = opens_reasoning
        self.format = format or Hermes()
        marks = (THINK, END_THINK, *self.format.marks)
        self._mark_ids = {codec.control[text]: text for text in marks if text in codec.control}
        spelled = [re.escape(text) for text in marks if text not in codec.control]
        self._spelled = re.compile("|".join(spelled).encode()) if spelled else None

    def parse(self, ids: Sequence[int], finish: Finish, turn: int, schemas: Schemas = NO_SCHEMAS) -> Turn:
        """`ids` as sampled; `turn` makes the ids of calls unique in a rollout; `schemas` are those of its tools."""
        length = len(ids) - (len(ids) > 0 and ids[-1] in self._end_ids)
        pieces = [self._codec.pieces[i] for i in ids[:length]]
        offsets = [0, *accumulate(map(len, pieces))]
        data = b"".join(pieces)
        scan = Scan(data, self._marks(ids[:length], offsets, data))
        scan.leading_reasoning(self._opens_reasoning)
        self.format.read(scan, schemas)
        kinds = token_kinds(offsets, scan.regions or [(0, ActionKind.TEXT)])
        runs = [(1, kind) for kind in kinds] + [(len(ids) - length, ActionKind.TEXT)]
        found = scan.calls if finish == Finish.STOP else []
        calls = tuple(ToolCall(f"call-{turn}-{n}", call.name, call.arguments, call.error) for n, call in enumerate(found))
        problems = sum(bool(call.error) for call in calls) + scan.unclosed_reasoning
        return Turn(Action(joined(scan.texts), calls), spans_of(runs), joined(scan.reasoning), problems)

    def _marks(self, ids: Sequence[int], offsets: Sequence[int], data: bytes) -> list[Mark]:
        places = [(n, self._mark_ids[i]) for n, i in enumerate(ids) if i in self._mark_ids]
        marks = [Mark(offsets[n], offsets[n + 1], text) for n, text in places]
        if self._spelled:
            marks += [Mark(found.start(), found.end(), found.group().decode()) for found in self._spelled.finditer(data)]
        return sorted(marks, key=lambda mark: mark.start)

    def encode(self, action: Action) -> list[int]:
        """The ids of a turn that does `action`, as the policy would write it: text, calls, end token."""
        ids: list[int] = []
        for part in self.format.write(action.text, action.tool_calls):
            mark = isinstance(part, Control) and part in self._codec.control
            ids += [self._codec.control[part]] if mark else self._codec.encode_text(part)
        return [*ids, self._end_id]
