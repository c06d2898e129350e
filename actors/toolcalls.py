"""Tool calls in the Qwen/Hermes format: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`.

A turn is read as bytes, with the place of every token, so that the kind of each token is exact. Where the tokenizer has
ids of its own for <think> and <tool_call>, only these ids delimit; the same characters spelled by other tokens are text.
The end of a call's JSON is found by a JSON decoder, never by looking for a bracket. Nothing in the reasoning is read, and
nothing is executed from a turn that was cut. Each call succeeds or fails alone; a failed one carries a text that tells the
policy what to change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from actors.codec import CALL, END_CALL, END_THINK, MARKS, THINK, Codec
from common.types import Action, ActionKind, Finish, Json, Spans, ToolCall, spans_of

_DECODER = json.JSONDecoder()
_MARK = re.compile("|".join(map(re.escape, MARKS)).encode())


@dataclass(frozen=True, eq=False)
class Turn:
    """A sampled turn as the environment and the record see it."""

    action: Action
    spans: Spans  # ActionKind of each token
    reasoning: str
    problems: int  # calls that failed to parse, plus one if the reasoning never closed


@dataclass(frozen=True)
class Mark:
    start: int  # byte offsets
    end: int
    text: str


class TurnParser:
    """Reads turns of one tokenizer. `end_id` at the end of a turn is not part of its text."""

    def __init__(self, codec: Codec, end_id: int, opens_reasoning: bool = False) -> None:
        self._codec = codec
        self._end_id = end_id
        self._opens_reasoning = opens_reasoning
        self._mark_ids = {codec.control[text]: text for text in MARKS if text in codec.control}

    def parse(self, ids: Sequence[int], finish: Finish, turn: int) -> Turn:
        """`ids` as sampled; `turn` makes the ids of calls unique in a rollout."""
        length = len(ids) - (len(ids) > 0 and ids[-1] == self._end_id)
        pieces = [self._codec.pieces[i] for i in ids[:length]]
        offsets = [0, *accumulate(map(len, pieces))]
        data = b"".join(pieces)
        scan = _Scan(data, self._marks(ids[:length], offsets, data))
        scan.run(self._opens_reasoning)
        kinds = _token_kinds(offsets, scan.regions)
        runs = [(1, kind) for kind in kinds] + [(len(ids) - length, ActionKind.TEXT)]
        whole = finish == Finish.STOP
        calls = tuple(_read_call(body, f"call-{turn}-{n}") for n, body in enumerate(scan.calls)) if whole else ()
        problems = sum(bool(call.error) for call in calls) + scan.unclosed_reasoning
        return Turn(Action(_joined(scan.texts), calls), spans_of(runs), _joined(scan.reasoning), problems)

    def _marks(self, ids: Sequence[int], offsets: Sequence[int], data: bytes) -> list[Mark]:
        if self._mark_ids:
            places = [(n, self._mark_ids[i]) for n, i in enumerate(ids) if i in self._mark_ids]
            return [Mark(offsets[n], offsets[n + 1], text) for n, text in places]
        return [Mark(found.start(), found.end(), found.group().decode()) for found in _MARK.finditer(data)]


class _Scan:
    """Cuts a turn's bytes into reasoning, calls and text."""

    def __init__(self, data: bytes, marks: list[Mark]) -> None:
        self.data = data
        self.marks = marks
        self.texts: list[bytes] = []
        self.reasoning: list[bytes] = []
        self.calls: list[tuple[bytes, str]] = []  # JSON text, or what stands there and what is wrong with it
        self.regions: list[tuple[int, ActionKind]] = []  # from this byte on
        self.unclosed_reasoning = False

    def run(self, in_reasoning: bool) -> None:
        at, n = 0, 0
        if in_reasoning:
            at, n = self._reason(0, 0)
        while n < len(self.marks):
            mark = self.marks[n]
            if mark.text == THINK:
                self._text(at, mark.start)
                at, n = self._reason(mark.start, n + 1)
            elif mark.text == CALL:
                self._text(at, mark.start)
                at, n = self._call(n)
            else:  # a closing mark that closes nothing
                self._text(at, mark.start)
                at, n = mark.end, n + 1
        self._text(at, len(self.data))

    def _text(self, start: int, end: int) -> None:
        self.regions.append((start, ActionKind.TEXT))
        self.texts.append(self.data[start:end])

    def _reason(self, start: int, n: int) -> tuple[int, int]:
        """Reasoning from `start` to the mark that closes it; marks inside it mean nothing."""
        self.regions.append((start, ActionKind.REASONING))
        begin = self.marks[n - 1].end if n and self.marks[n - 1].start == start else start
        while n < len(self.marks) and self.marks[n].text != END_THINK:
            n += 1
        if n == len(self.marks):
            self.unclosed_reasoning = True
            self.reasoning.append(self.data[begin:])
            return len(self.data), n
        self.reasoning.append(self.data[begin : self.marks[n].start])
        return self.marks[n].end, n + 1

    def _call(self, n: int) -> tuple[int, int]:
        """The call that mark `n` opens: up to the first closing mark behind its JSON."""
        opening = self.marks[n]
        self.regions.append((opening.start, ActionKind.CALL))
        begin = opening.end
        # One character per byte, so that positions are byte offsets. JSON's own characters are ASCII.
        text = self.data.decode("latin-1")
        while text[begin : begin + 1] in (" ", "\n", "\r", "\t"):
            begin += 1
        try:
            _, json_end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            json_end = begin
        n += 1
        while n < len(self.marks) and self.marks[n].start < json_end:
            n += 1  # a mark inside a JSON string is a part of that string
        if n < len(self.marks) and self.marks[n].text == END_CALL:
            self.calls.append((self.data[begin : self.marks[n].start], ""))
            return self.marks[n].end, n + 1
        end = self.marks[n].start if n < len(self.marks) else len(self.data)
        self.calls.append((self.data[begin:end], f"the call has no {END_CALL}"))
        return end, n


def _token_kinds(offsets: Sequence[int], regions: list[tuple[int, ActionKind]]) -> list[int]:
    """Kind of each token: that of the region where its first byte stands."""
    kinds: list[int] = []
    bounds = [start for start, _ in regions[1:]] + [offsets[-1] + 1]
    at = 0
    for start, _ in pairwise(offsets):
        while start >= bounds[at]:
            at += 1
        kinds.append(regions[at][1])
    return kinds


def _joined(parts: list[bytes]) -> str:
    """Parts as lines: "1" and "2" around a call must not read as "12"."""
    texts = [part.decode("utf-8", "replace").strip() for part in parts]
    return "\n".join(text for text in texts if text)


# ---- one call ---------------------------------------------------------------------------------------------


def _read_call(found: tuple[bytes, str], call_id: str) -> ToolCall:
    body, problem = found
    if problem:
        return ToolCall(call_id, "", error=f"{problem}; write {CALL}, the JSON object, {END_CALL}")
    try:
        value = parse_json(body)
    except ValueError as error:
        return ToolCall(call_id, "", error=f"the call is not valid JSON: {error}")
    if not isinstance(value, dict):
        return ToolCall(call_id, "", error='the call must be one JSON object: {"name": ..., "arguments": {...}}')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", error='the call has no "name": write {"name": ..., "arguments": {...}}')
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, error='"arguments" must be a JSON object: {"name": ..., "arguments": {...}}')
    return ToolCall(call_id, name, arguments)


def parse_json(body: bytes) -> Json:
    """Strict JSON: UTF-8, no NaN or infinity, no duplicate keys, no lone surrogates. Raises ValueError that says what."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from error
    return value


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return out


def _no_constant(text: str) -> Json:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


# ---- the inverse ------------------------------------------------------------------------------------------


def encode_action(action: Action, codec: Codec, end_id: int) -> list[int]:
    """The ids of a turn that does `action`, as the policy would write it: text, calls, end token."""
    ids = codec.encode_text(action.text) if action.text else []
    for n, call in enumerate(action.tool_calls):
        if n or action.text:
            ids = ids + codec.encode_text("\n")
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        ids = ids + _mark(codec, CALL) + codec.encode_text(f"\n{body}\n") + _mark(codec, END_CALL)
    return [*ids, end_id]


def _mark(codec: Codec, text: str) -> list[int]:
    return [codec.control[text]] if text in codec.control else codec.encode_text(text)
