"""A turn as bytes, cut into reasoning, calls and text, with the kind of every byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from actors.codec import END_THINK, THINK
from common.types import ActionKind, Json

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Mark:
    """A string that delimits, at bytes [start, end)."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Call:
    """A call as it was found. `error` is for the policy; then nothing is executed."""

    name: str = ""
    arguments: dict[str, Json] = field(default_factory=dict)
    error: str = ""


@dataclass(eq=False)
class Scan:
    """What readers fill, from byte `at` on: readers move `at` forward and leave no byte without a kind."""

    data: bytes
    marks: list[Mark]  # in order, none overlapping
    at: int = 0
    texts: list[bytes] = field(default_factory=list)
    reasoning: list[bytes] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    regions: list[tuple[int, ActionKind]] = field(default_factory=list)  # kind from this byte on
    unclosed_reasoning: bool = False

    def text(self, end: int) -> None:
        self._region(ActionKind.TEXT)
        self.texts.append(self.data[self.at : end])
        self.at = end

    def drop(self, end: int) -> None:
        """Text that nobody reads."""
        if end > self.at:
            self._region(ActionKind.TEXT)
            self.at = end

    def think(self, begin: int, end: int, behind: int) -> None:
        """Reasoning up to `behind`; its words stand at [begin, end)."""
        self._region(ActionKind.REASONING)
        self.reasoning.append(self.data[begin:end])
        self.at = behind

    def reason(self, begin: int) -> None:
        """Reasoning whose words begin at `begin`, to the mark that closes it; other marks inside it mean nothing."""
        closing = self.next(END_THINK, start=begin)
        if closing:
            self.think(begin, closing.start, closing.end)
        else:
            self.unclosed_reasoning = True
            self.think(begin, len(self.data), len(self.data))

    def leading_reasoning(self, opened: bool) -> None:
        """Reasoning at the beginning of the turn; `opened`: the prompt has opened it."""
        if opened:
            self.reason(self.at)
        while (mark := self.next(THINK)) and mark.start == self.skip_space(self.at):
            self.drop(mark.start)
            self.reason(mark.end)

    def call(self, end: int, *calls: Call) -> None:
        self._region(ActionKind.CALL)
        self.calls += calls
        self.at = end

    def _region(self, kind: ActionKind) -> None:
        self.regions.append((self.at, kind))

    def marks_between(self, *texts: str) -> Iterator[Mark]:
        """Each next mark of `texts`, with the text before it read; reasoning between them, too. The last text is read."""
        while mark := self.next(*texts, THINK, END_THINK):
            self.text(mark.start)
            if mark.text == THINK:
                self.reason(mark.end)
            elif mark.text in texts:
                yield mark
                self.at = max(self.at, mark.end)
            else:
                self.drop(mark.end)  # a closing mark that closes nothing
        self.text(len(self.data))

    # ---- looking ------------------------------------------------------------------------------------------

    def next(self, *texts: str, start: int | None = None) -> Mark | None:
        """The first mark at or behind `start` (default: `at`) that is one of `texts`."""
        begin = self.at if start is None else start
        return next((mark for mark in self.marks if mark.start >= begin and mark.text in texts), None)

    def skip_space(self, start: int) -> int:
        while self.data[start : start + 1] in (b" ", b"\n", b"\r", b"\t") and start < len(self.data):
            start += 1
        return start

    def json_end(self, start: int) -> int:
        """Where the JSON value that begins at `start` ends; `start` itself when none does."""
        # One character per byte, so that positions are byte offsets: JSON's own characters are ASCII.
        try:
            return _DECODER.raw_decode(self.data.decode("latin-1"), start)[1]
        except (ValueError, RecursionError):
            return start


def token_kinds(offsets: Sequence[int], regions: list[tuple[int, ActionKind]]) -> list[int]:
    """Kind of each token: that of the region where its first byte stands. `offsets` has one entry more than there are
    tokens; regions begin at byte 0."""
    kinds: list[int] = []
    bounds = [start for start, _ in regions[1:]] + [offsets[-1] + 1]
    at = 0
    for start, _ in pairwise(offsets):
        while start >= bounds[at]:
            at += 1
        kinds.append(regions[at][1])
    return kinds


def joined(parts: list[bytes]) -> str:
    """Parts as lines: "1" and "2" around a call must not read as "12"."""
    texts = [part.decode("utf-8", "replace").strip() for part in parts]
    return "\n".join(text for text in texts if text)
