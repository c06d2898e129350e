"""Waiting for what other threads and processes do, and seeing that they are gone."""

import time
from collections.abc import Callable, Iterator
from typing import Any


def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait until `condition()` is true; the bound only ends a hanging test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


def left_clean(made: Any) -> Iterator[Any]:
    """The body of a fixture around something with `alive()` and `close()`: a test must leave nothing alive, and nothing stays."""
    yield made
    left = made.alive()
    made.close()
    assert left == []
