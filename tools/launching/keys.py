"""Single keys from the terminal, while something else is drawn on it."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Self


class Keys:
    """While entered, `pressed` returns what was typed, at once and unseen; Ctrl-C stays what it is. Without a terminal as input,
    or in the background of one, nothing is ever typed."""

    def __init__(self) -> None:
        self._before: list | None = None

    def __enter__(self) -> Self:
        if self._ours():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin, termios.TCSANOW)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None and self._ours():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)

    def pressed(self) -> str:
        """Keys since the last call."""
        if self._before is None or not self._ours() or not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")

    def _ours(self) -> bool:
        """Whoever reads or changes a terminal from its background is stopped by it."""
        try:
            return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):  # closed, or no terminal of this session
            return False
