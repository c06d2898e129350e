"""What a check says: one row with its evidence, and all rows as a table or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

SHOWN = 3  # problems of one row; the others are counted
WIDTH = 130


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_RUN = "not run"
    INFO = "info"  # nothing depends on it


@dataclass(frozen=True)
class Row:
    """`check` is "group: what". `evidence` is what was seen, `reason` why the verdict is not "pass"."""

    check: str
    verdict: Verdict
    evidence: str = ""
    reason: str = ""
    required: bool = True  # whether the certificate needs it to have run

    @property
    def holds(self) -> bool:
        return self.verdict in (Verdict.PASS, Verdict.INFO) or (self.verdict == Verdict.NOT_RUN and not self.required)


def judged(check: str, problems: Sequence[str], evidence: str) -> Row:
    """FAIL when there are problems, else pass."""
    if not problems:
        return Row(check, Verdict.PASS, evidence)
    different = list(dict.fromkeys(problems))
    more = f" (and {len(different) - SHOWN} more)" if len(different) > SHOWN else ""
    return Row(check, Verdict.FAIL, evidence, "; ".join(different[:SHOWN]) + more)


def not_run(checks: Iterable[str], reason: str, required: bool = True) -> list[Row]:
    return [Row(check, Verdict.NOT_RUN, reason=reason, required=required) for check in checks]


def quoted(text: str, limit: int = 60) -> str:
    """`text` on one line, its middle left out where it is long."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-limit // 2 :]}"
    return repr(text)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines: verdict, check, evidence, and the reason below."""
    wide = max(len(row.check) for row in rows)
    indent = " " * (7 + 2 + wide + 2)
    lines = [f"{'verdict':<7}  {'check':<{wide}}  evidence"]
    for row in rows:
        parts = [*([row.evidence] if row.evidence else []), *([f"why: {row.reason}"] if row.reason else [])]
        told = [line for part in parts or [""] for line in textwrap.wrap(part, WIDTH - len(indent)) or [""]]
        lines.append(f"{row.verdict:<7}  {row.check:<{wide}}  {told[0]}".rstrip())
        lines += [indent + line for line in told[1:]]
    return lines


def as_json(rows: Sequence[Row]) -> list[dict]:
    return [asdict(row) for row in rows]
