"""evaluations.jsonl: what held-out rollouts scored, a line each, so that an evaluation which is cut off goes on with the rest.

A score counts for the weights that it was made with and for no others: `weights` names them by what made them, not by their
version, which a resume publishes again under another number.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from learner.jsonlines import JsonLines, read_lines

NAME = "evaluations.jsonl"


class Attempt(NamedTuple):
    """One of the rollouts of an evaluation."""

    mode: str
    domain: str
    task: str
    sample: int


class Scores:
    """Of a run. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / NAME)
        self._known: dict[str, dict[Attempt, bool]] = {}
        for line in read_lines(folder / NAME):
            self._keep(line["weights"], Attempt(line["mode"], line["domain"], line["task"], line["sample"]), line["success"])

    def of(self, weights: str) -> dict[Attempt, bool]:
        return dict(self._known.get(weights, {}))

    def add(self, weights: str, attempt: Attempt, success: bool) -> None:
        self._keep(weights, attempt, success)
        self._lines.append({"weights": weights, **attempt._asdict(), "success": success})

    def _keep(self, weights: str, attempt: Attempt, success: bool) -> None:
        self._known.setdefault(weights, {})[attempt] = success
