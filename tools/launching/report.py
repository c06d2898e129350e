"""The learner's status report as text. Pure functions; a field that is missing or odd is left out, never an error."""

from __future__ import annotations

from typing import Any

from common.addresses import EVAL, STALE

Report = dict[str, Any]
ALL = 1_000
LEAVINGS = {"lost": "outcome/LOST", "refused": "outcome/REFUSED"}  # what should not become of an actor's rollouts
POOLS = {STALE: " (stale pool)", EVAL: " (held for an evaluation)"}
OUTCOMES = ("dispatched", "open", "trained", "filtered", "stale", "failed", "cancelled")


def table(report: Report, key: str) -> dict[str, Any]:
    value = report.get(key)
    return value if isinstance(value, dict) else {}


def rows(report: Report, key: str) -> list[dict[str, Any]]:
    value = report.get(key)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def number(value: Any, digits: int = 0) -> str:
    """With thousands separators; "?" for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "?"
    return f"{value:,.{digits}f}"


def progress(report: Report) -> str:
    return f"update {number(report.get('update'))}/{number(report.get('updates'))}"


def success(report: Report) -> str:
    return ", ".join(f"{domain} {number(value, 3)}" for domain, value in table(report, "success").items())


def lag(report: Report) -> str:
    values = table(report, "lag")
    return f"lag {number(values.get('mean'), 2)} mean, {number(values.get('max'))} max" if values else ""


def outcomes(report: Report, zeros: bool = False) -> str:
    counts = table(report, "rollouts")
    return ", ".join(f"{number(counts[name])} {name}" for name in OUTCOMES if name in counts and (counts[name] or zeros))


def domains(report: Report) -> list[str]:
    """What each of several domains has of the work."""
    return [
        f"{name} has {number(row.get('open'))} of {number(row.get('share'))} groups open, {number(row.get('ready'))} complete"
        + (f" ({row['state']})" if row.get("state") else "")
        + (f"; {counts}" if (counts := outcomes(row)) else "")
        for name, row in table(report, "domains").items()
        if isinstance(row, dict)
    ]


def waits(report: Report, most: int = 6) -> list[str]:
    """The wait-for graph: the root cause, what the learner waits for, then the longest waits."""
    said = report.get("stall")
    return [str(line) for line in said[:most]] if isinstance(said, list) else []


def engines(report: Report) -> list[str]:
    return [
        f"{row.get('name', '?')}{POOLS.get(str(row.get('pool')), '')} {row.get('state', '?')}"
        f", version {number(row.get('version'))}" + (f" ({row['reason']})" if row.get("reason") else "")
        for row in rows(report, "engines")
    ]


def actors(report: Report) -> list[str]:
    return [
        f"{row.get('id', '?')} runs {number(row.get('running'))} rollouts, heard {number(row.get('age_s'), 1)} s ago"
        + "".join(f", {number(row[key])} {word}" for word, key in LEAVINGS.items() if row.get(key))
        for row in rows(report, "actors")
    ]


def evaluation(row: dict[str, Any]) -> str:
    """One entry of `evals`; `ci95` may be an interval or a half-width."""
    interval = row.get("ci95")
    if isinstance(interval, list) and len(interval) == 2:
        bounds = f" [{number(interval[0], 3)}, {number(interval[1], 3)}]"
    else:
        bounds = f" ± {number(interval, 3)}" if isinstance(interval, int | float) else ""
    several = [x for x in rows(row, "pass_k") if x.get("k") != 1]
    chances = "".join(f", pass@{x.get('k')} {number(x.get('pass_at'), 3)}" for x in several)
    chances += "".join(f", pass^{x.get('k')} {number(x.get('pass_all'), 3)}" for x in several)
    return (
        f"eval {row.get('phase', '?')}: {row.get('domain', '?')} {number(row.get('success'), 3)}{bounds}"
        f" {row.get('mode', '')}, n {number(row.get('n'))}, version {number(row.get('version'))}{chances}"
    )


def line(report: Report) -> str:
    """One line for a log: where the run is."""
    parts = [f"{progress(report)} {report.get('phase', '?')}", success(report), lag(report)]
    if "tokens_per_s" in report:
        parts.append(f"{number(report['tokens_per_s'])} tokens/s")
    parts.append(outcomes(report))
    return " · ".join(part for part in parts if part)


def sentences(report: Report) -> list[str]:
    """The whole report, for `status`."""
    said = report.get("sentence")
    lines = waits(report, ALL) or ([str(said)] if said else [])
    lines.append(f"Phase {report.get('phase', '?')}, {progress(report)}.")
    if table(report, "success"):
        lines.append(f"Success in training: {success(report)}.")
    if lag(report):
        lines.append(f"Off-policy: {lag(report)} (updates).")
    if "tokens_per_s" in report:
        lines.append(f"Speed: {number(report['tokens_per_s'])} sampled tokens/s.")
    if outcomes(report):
        lines.append(f"Rollouts: {outcomes(report)}.")
    lines += [f"Domain {said}." for said in domains(report)]
    for title, entries in (("Engines", engines(report)), ("Actors", actors(report))):
        if entries:
            lines.append(f"{title}: {'; '.join(entries)}.")
    return lines + [f"{evaluation(row)}." for row in rows(report, "evals")]


def summary(values: dict[str, Any], restarts: dict[str, int]) -> list[str]:
    """summary.json as an aligned table."""
    tokens = table(values, "tokens")
    cells = [
        ("updates", number(values.get("updates"))),
        ("wall clock", f"{number(values['wall_seconds'], 1)} s" if "wall_seconds" in values else ""),
        ("rollouts", outcomes(values, zeros=True)),
        ("tokens", f"{number(tokens.get('sampled'))} sampled, {number(tokens.get('trained'))} trained" if tokens else ""),
        ("off-policy", lag(values)),
        ("recompilations", number(values["recompilations_after_warmup"]) if "recompilations_after_warmup" in values else ""),
        *(("", evaluation(row)) for row in rows(values, "evals")),
        ("restarts", ", ".join(f"{name} {count}" for name, count in restarts.items()) or "none"),
    ]
    return [f"  {name:<15} {text}" for name, text in cells if text]
