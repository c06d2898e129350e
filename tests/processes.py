"""Waiting for what other threads and processes do, and seeing that they are gone."""

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait until `condition()` is true; the bound only ends a hanging test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


async def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """The same on an event loop, which goes on meanwhile; the condition may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)


def open_files(folder: Path) -> int:
    """How many files in `folder` this process has open. Linux shows it."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(Path(link).parent == folder for link in links)


def left_clean(made: Any) -> Iterator[Any]:
    """The body of a fixture around something with `alive()` and `close()`: a test must leave nothing alive, and nothing stays."""
    yield made
    left = made.alive()
    made.close()
    assert left == []
