"""Whether two implementations agree, and whether what is said about a difference is so.

A reason is no sentence alone: it comes with Polyturn's function, changed in the way that the sentence says, and counts only if
that reproduces the peer's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tools.math_peers.batches import Answers, Batch

Ours = Callable[[Batch], np.ndarray]
TOLERANCE = {
    np.dtype(np.float64): 1e-9,
    np.dtype(np.float32): 2e-5,
}  # by the coarser precision of the two, of the peer's largest number


@dataclass(frozen=True, eq=False)
class Reason:
    """Why a peer's numbers differ, and the computation that shows it."""

    text: str
    ours: Ours


@dataclass(frozen=True, eq=False)
class Comparison:
    """One function of Polyturn beside one of a peer."""

    what: str  # for people
    peer: str  # the answer's name: "PEER function, variant"
    ours: Ours
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a comparison showed on the batches of one kind."""

    difference: float  # largest, absolute
    reason: str | None = None  # that reproduces the peer
    remaining: float = 0.0  # largest difference to what the reason computes

    def __str__(self) -> str:
        return f"{self.difference:.0e}" if self.reason is None else f"{self.difference:.2g} → {self.remaining:.0e}"


@dataclass(frozen=True)
class Result:
    """Of a comparison: a finding for each kind, and what is wrong, if anything."""

    comparison: Comparison
    findings: Mapping[str, Finding]
    wrong: tuple[str, ...] = ()

    @property
    def explained(self) -> bool:
        """It differs somewhere, and everywhere for a reason that was shown."""
        return not self.wrong and any(finding.reason for finding in self.findings.values())

    @property
    def agrees(self) -> bool:
        return not self.wrong and not self.explained


def compare(comparison: Comparison, batches: Mapping[str, Batch], answers: Mapping[str, Answers]) -> Result:
    """`batches` and `answers` are by "KIND/SEED". Raises KeyError for an answer that the peer did not give."""
    findings, wrong = {}, []
    for kind in dict.fromkeys(name.partition("/")[0] for name in batches):
        own = [name for name in batches if name.partition("/")[0] == kind]
        peers = [answers[name][comparison.peer] for name in own]

        def against(ours: Ours, own: list[str] = own, peers: list[np.ndarray] = peers) -> tuple[float, bool]:
            return _worst((_difference(ours(batches[name]), peer, comparison) for name, peer in zip(own, peers, strict=True)))

        difference, close = against(comparison.ours)
        findings[kind] = Finding(difference)
        if close:
            continue
        for reason in comparison.reasons:
            remaining, close = against(reason.ours)
            if close:
                findings[kind] = Finding(difference, reason.text, remaining)
                break
        else:
            wrong.append(f"differs by {difference:.3g} ({kind}), and nothing that is known explains it")
    used = {finding.reason for finding in findings.values()}
    wrong += [f"differs nowhere because {reason.text}" for reason in comparison.reasons if reason.text not in used]
    return Result(comparison, findings, tuple(wrong))


def _difference(ours: np.ndarray, peer: np.ndarray, comparison: Comparison) -> tuple[float, bool]:
    """Largest absolute difference, and whether it is within the precision of both. NaN is not."""
    ours = np.asarray(ours)
    if ours.shape != peer.shape:
        raise ValueError(f"{comparison.what}: Polyturn's answer has shape {ours.shape}, that of {comparison.peer} {peer.shape}")
    difference = float(np.max(np.abs(ours.astype(np.float64) - peer)))
    coarse = np.float32 in (ours.dtype, peer.dtype)
    precision = TOLERANCE[np.dtype(np.float32 if coarse else np.float64)]
    return difference, difference <= precision * max(1.0, float(np.max(np.abs(peer))))


def _worst(found: Iterable[tuple[float, bool]]) -> tuple[float, bool]:
    pairs = list(found)
    return float(np.max([difference for difference, _ in pairs])), all(close for _, close in pairs)


def measurements(results: Iterable[Result]) -> dict[str, float]:
    """What runs/bench/math.json says."""
    results = list(results)
    agreeing = [finding.difference for result in results if result.agrees for finding in result.findings.values()]
    return {
        "comparisons": len(results),
        "agreeing": sum(result.agrees for result in results),
        "explained": sum(result.explained for result in results),
        "unexplained": sum(bool(result.wrong) for result in results),
        "largest_difference_of_agreeing": max(agreeing, default=0.0),
    }


def table(results: Iterable[Result]) -> list[str]:
    """Markdown, a line for each. `a → b` is a difference a of which b remains when Polyturn's function is changed as is said."""
    lines: list[str] = []
    for result in results:
        if not lines:
            lines += [f"| what | peer | {' | '.join(result.findings)} | why |", "|" + " --- |" * (len(result.findings) + 3)]
        reasons = "; ".join(finding.reason for finding in result.findings.values() if finding.reason)
        why = "; ".join(result.wrong) or "; ".join(dict.fromkeys(reasons.split("; ")))
        cells = " | ".join(str(finding) for finding in result.findings.values())
        lines.append(f"| {result.comparison.what} | {_peer(result)} | {cells} | {why} |")
    return lines


def document(results: Iterable[Result]) -> list[str]:
    """What the documentation shows: differences in full, and of what agrees the largest difference, gradients included."""
    results = list(results)
    found = measurements(results)
    largest: dict[str, float] = {}
    for result in results:
        if result.agrees:
            row = f"{result.comparison.what} | {_peer(result)}".replace(", gradient", "")
            largest[row] = max(largest.get(row, 0.0), *(finding.difference for finding in result.findings.values()))
    return [
        f"Of {found['comparisons']:.0f} comparisons {found['agreeing']:.0f} agree, {found['explained']:.0f} differ for a reason"
        f" that was shown, {found['unexplained']:.0f} without one.",
        "",
        *table(result for result in results if not result.agrees),
        "",
        "| what agrees, with its gradient | peer | largest difference |",
        "| --- | --- | --- |",
        *(f"| {row} | {difference:.0e} |" for row, difference in largest.items()),
    ]


def _peer(result: Result) -> str:
    peer, _, function = result.comparison.peer.partition(" ")
    return f"{peer} `{function}`"
