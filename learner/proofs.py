"""Which weights were proven on which engine. Tokens of anything else are never trained on.

A pair (engine, version) is pending from the moment an update to that version begins until the engine's canary has passed. One
that failed may pass at a later try; what was sampled before the failure stays unproven, so rollouts that were handed out before
it are refused for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

LEAVES_S = 10.0  # an engine that failed is no worker of a router any more
MEMORY = 4096  # pairs of an engine that are remembered; older ones count as never proven

Pair = tuple[str, int]  # engine, version


class Verdict(StrEnum):
    PROVEN = "proven"
    PENDING = "pending"
    FAILED = "failed"


@dataclass
class _Proof:
    verdict: Verdict
    reason: str = ""
    failed_at: float = float("-inf")  # the newest failure


class Proofs:
    """Thread-safe. Times are those of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._engines: dict[str, dict[int, _Proof]] = {}
        self._groups: dict[str, Sequence[str]] = {}

    def stands_for(self, name: str, engines: Sequence[str]) -> None:
        """Tokens that are recorded under `name` (a router) may come from any of `engines`."""
        with self._lock:
            self._groups[name] = engines

    def began(self, engine: str, version: int) -> None:
        """From now on `engine` may sample with `version`."""
        with self._lock:
            versions = self._engines.setdefault(engine, {})
            versions.setdefault(version, _Proof(Verdict.PENDING)).verdict = Verdict.PENDING
            while len(versions) > MEMORY:
                del versions[min(versions)]

    def passed(self, engine: str, version: int) -> None:
        with self._lock:
            self._engines.setdefault(engine, {}).setdefault(version, _Proof(Verdict.PENDING)).verdict = Verdict.PROVEN

    def failed(self, engine: str, version: int, reason: str) -> None:
        """Also of a pair that had passed: the engine has become doubtful."""
        with self._lock:
            proof = self._engines.setdefault(engine, {}).setdefault(version, _Proof(Verdict.FAILED))
            proof.verdict, proof.reason, proof.failed_at = Verdict.FAILED, reason, self._clock()

    def abandoned(self, engine: str, reason: str) -> None:
        """The engine went away: what is pending on it will not be proven."""
        with self._lock:
            pending = [version for version, proof in self._engines.get(engine, {}).items() if proof.verdict is Verdict.PENDING]
        for version in pending:
            self.failed(engine, version, reason)

    def judge(self, pairs: Collection[Pair], since: float) -> tuple[Verdict, str]:
        """Of a rollout that was handed out at `since` and has tokens of `pairs`; and why it failed or waits."""
        with self._lock:
            found = [self._one(engine, version, since) for engine, version in sorted(pairs)]
        for verdict in (Verdict.FAILED, Verdict.PENDING):
            for own, reason in found:
                if own is verdict:
                    return own, reason
        return Verdict.PROVEN, ""

    def _one(self, engine: str, version: int, since: float) -> tuple[Verdict, str]:
        known = [self._engines.get(name, {}).get(version) for name in self._groups.get(engine, (engine,))]
        proofs = [proof for proof in known if proof is not None]
        what = f"version {version} on {engine}"
        if not proofs:
            return Verdict.FAILED, f"{what}: the engine was never brought to it"
        if engine in self._groups:  # one that had failed and left before the rollout was handed out has sampled none of it
            proofs = [p for p in proofs if p.verdict is not Verdict.FAILED or p.failed_at + LEAVES_S >= since] or proofs
        for proof in proofs:
            if proof.verdict is Verdict.FAILED or proof.failed_at >= since:
                return Verdict.FAILED, f"{what}: {proof.reason}"
        if any(proof.verdict is Verdict.PENDING for proof in proofs):
            return Verdict.PENDING, f"{what} is not proven yet"
        return Verdict.PROVEN, ""
