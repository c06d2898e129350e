"""From ids to text, piece by piece: characters are never split, and a stop string is found whichever tokens spell it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import accumulate


class TextStream:
    """Text of tokens that arrive one after another. What is pushed plus what `end` returns is the text of all of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The text that `piece` completes; "" while a character is not whole."""
        return self._decoder.decode(piece)

    def end(self) -> str:
        """What is left: one replacement character for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def texts(pieces: Iterable[bytes]) -> list[str]:
    """The text that each piece completes; the last one also shows what never became whole."""
    stream = TextStream()
    out = [stream.push(piece) for piece in pieces]
    if out:
        out[-1] += stream.end()
    return out


def tokens_to_stop(pieces: Sequence[bytes], stops: Sequence[str]) -> int | None:
    """How many tokens it takes to complete the first stop string, with the token that completes it; None when none does.

    What an engine that does not look for it samples behind it belongs to no record. The tokens before are distributed as if it
    had stopped there.
    """
    data = b"".join(pieces)
    ends = [at + len(stop.encode()) for stop in stops if stop and (at := data.find(stop.encode())) >= 0]
    if not ends:
        return None
    lengths = accumulate(map(len, pieces))
    return next(count for count, length in enumerate(lengths, 1) if length >= min(ends))
