"""Texts that are too long for the room they have: the middle goes, a notice says how much, and whole tokens stay.

What is kept are tokens of the whole text's own encoding, at the borders of characters, so that it reads exactly as the text does.
Wrappers are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.codec import Codec
from common.types import ContextKind


@dataclass(frozen=True)
class Part:
    """Ids that stand next to one another; `text`: the words of a message, which may be shortened."""

    ids: Sequence[int]
    kind: ContextKind
    text: bool = False


@dataclass(frozen=True)
class Room:
    """`whole`: tokens of all parts together; `each`: of one text. None: any number."""

    whole: int | None = None
    each: int | None = None


ENDLESS = Room()


def assemble(parts: Sequence[Part], codec: Codec, room: Room = ENDLESS) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids, and runs (length, kind). Texts are shortened as far as `room` wants, the longest ones first. Where not a token of
    each would be left they are not: then the result is longer than `room`, and nobody can go on with it."""
    lengths = [len(part.ids) for part in parts if part.text]
    allowed = lengths if room.each is None else [min(length, room.each) for length in lengths]
    pieces = _pieces(parts, allowed, codec)
    if room.whole is not None and sum(len(piece.ids) for piece in pieces) > room.whole:
        total = room.whole - sum(len(part.ids) for part in parts if not part.text)
        pieces = _pieces(parts, _level(allowed, total), codec) if total >= sum(map(bool, lengths)) else pieces
    ids: list[int] = []
    for piece in pieces:
        ids += piece.ids
    return ids, [(len(piece.ids), int(piece.kind)) for piece in pieces]


def _pieces(parts: Sequence[Part], allowed: Sequence[int], codec: Codec) -> list[Part]:
    """Each text with at most as many tokens as it is allowed, in the order of texts."""
    left = iter(allowed)
    return [piece for part in parts for piece in (_shorten(part, next(left), codec) if part.text else [part])]


def _level(lengths: list[int], total: int) -> list[int]:
    """The largest level such that texts cut down to it have `total` tokens together."""
    out, left = [0] * len(lengths), total
    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        out[index] = min(lengths[index], left // (len(lengths) - rank))
        left -= out[index]
    return out


def _shorten(part: Part, length: int, codec: Codec) -> list[Part]:
    """At most `length` tokens: the beginning, a notice, the end (its last line, if that fits: errors stand there)."""
    count = len(part.ids)
    if count <= length:
        return [part]
    notice = _notice(count, length, codec)
    kept = length - len(notice)
    starts = [codec.pieces[i][:1] for i in part.ids]
    last = _last_line(part.ids, codec)
    end = last if kept // 2 < last <= kept else kept // 2
    head, tail = kept - end, count - end
    while head and _inside(starts[head]):
        head -= 1
    while tail < count and _inside(starts[tail]):
        tail += 1
    pieces = [
        Part(part.ids[:head], part.kind),
        Part(notice, ContextKind.NOTICE),
        Part(part.ids[tail:], part.kind),
    ]
    return [piece for piece in pieces if len(piece.ids)]


def _notice(count: int, length: int, codec: Codec) -> list[int]:
    """What stands in the place of the missing tokens; less of it where there is hardly room."""
    for text in (f"\n[... {count - length} of {count} tokens left out ...]\n", "…"):
        ids = codec.encode_text(text)
        if 2 * len(ids) <= length:
            return ids
    return []


def _last_line(ids: Sequence[int], codec: Codec) -> int:
    """Tokens of the last line that says something."""
    said = False
    for count, i in enumerate(reversed(ids)):
        piece = codec.pieces[i]
        if said and b"\n" in piece:
            return count
        said = said or bool(piece.strip())
    return len(ids)


def _inside(first: bytes) -> bool:
    """Whether a token that begins with this byte begins inside a character."""
    return bool(first) and 0x80 <= first[0] < 0xC0
