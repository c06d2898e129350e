"""Whether long rollouts make it: how long those are that actors play, beside those that train.

Long rollouts are over age first: where they are dropped, or begun again and again, training sees short episodes only, and nothing
else says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 2048  # newest rollouts of each kind
FEW = 256  # fewer say nothing of a tail
STARVED = 0.5  # of the length that one played rollout in ten exceeds


class Lengths:
    """Sampled tokens of rollouts of the policy. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._played: deque[int] = deque(maxlen=WINDOW)
        self._trained: deque[int] = deque(maxlen=WINDOW)
        self._told = False

    def played(self, tokens: int) -> None:
        """A rollout of `tokens` ended, whatever becomes of it."""
        with self._lock:
            self._played.append(tokens)

    def trained(self, tokens: Iterable[int]) -> None:
        """Rollouts that had a token in the loss of an update."""
        with self._lock:
            self._trained.extend(tokens)

    def metrics(self) -> dict[str, float]:
        """Mean and 90th percentile of both; of what there has been none of, nothing."""
        out = {}
        with self._lock:
            for name, lengths in (("played", self._played), ("trained", self._trained)):
                if lengths:
                    values = np.fromiter(lengths, np.int64, len(lengths))
                    out[f"length/{name}_mean"] = float(values.mean())
                    out[f"length/{name}_p90"] = float(np.percentile(values, 90))
        return out

    def alarm(self) -> str:
        """Why training sees short rollouts only, once for each time that it begins to; empty otherwise."""
        found = self.metrics()
        with self._lock:
            known = min(len(self._played), len(self._trained)) >= FEW
        starved = known and found["length/trained_p90"] < STARVED * found["length/played_p90"]
        news, self._told = starved and not self._told, starved
        if not news:
            return ""
        return (
            f"one rollout in ten that is played has more than {found['length/played_p90']:g} tokens, of those that train more"
            f" than {found['length/trained_p90']:g}: long ones are too old when they arrive, or fail; raise learner.max_lag, or"
            " see events.jsonl (stale, rollout_failed)"
        )
