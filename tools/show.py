"""Shows one rollout of a run, token by token.

    python tools/show.py RUN ROLLOUT [--tokens] [--runs DIR]

RUN is a run's folder, or its name below --runs; ROLLOUT an id from its trajectories, or the beginning of one. What the policy
sampled, what the environment answered, what was shown again and what the template wrote have colours of their own. --tokens
prints a line per token: id, kind, logprob, version, advantage.

The advantage is shown where the group alone makes it; others need the critic or the whole batch of that update: tools/replay.py.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from actors.codec import CodecError, load_model_files
from actors.decoding import texts
from common.addresses import MAIN
from common.cli import ConfigError, load
from common.config import RunConfig
from common.record import ACTION, Segment, segments
from common.types import ContextKind, StepKind, Trajectory
from learner import credit, examples
from learner.runfolder import TRAJECTORIES, read_trajectories
from tools.launching.runs import Refusal, find

STYLES = {
    ACTION: "bold green",
    ContextKind.TEMPLATE: "dim",
    ContextKind.TASK: "cyan",
    ContextKind.OBSERVATION: "yellow",
    ContextKind.REPLAY: "green",
    ContextKind.SUMMARY: "magenta",
    ContextKind.NOTICE: "red",
}
STEPS = {
    StepKind.ACT: ("turn", "turns"),
    StepKind.SUMMARY: ("summary", "summaries"),
    StepKind.SUBAGENT: ("sub-agent's turn", "turns of sub-agents"),
}
FROM_GROUP = ("grpo", "dr_grpo", "rloo", "gigpo")
NAMES = {ACTION: "sampled"} | {kind: kind.name.lower() for kind in ContextKind}


def look_up(run: Path, wanted: str) -> tuple[Trajectory, list[Trajectory]]:
    """The rollout, of the newest update that trained on it, and its group. Raises Refusal."""
    found: dict[str, tuple[Trajectory, list[Trajectory]]] = {}
    files = [path for path in (run / TRAJECTORIES).glob("*.parquet") if path.stem.isdigit()]
    for path in sorted(files, key=lambda path: int(path.stem)):
        rollouts = [rollout for _, rollout in read_trajectories(path)]
        for rollout in rollouts:
            if rollout.rollout_id.startswith(wanted):
                group = [other for other in rollouts if other.group_id == rollout.group_id]
                found[rollout.rollout_id] = (rollout, group)
    if wanted in found:
        return found[wanted]
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise Refusal(f"{wanted!r} begins {len(found)} rollouts: {', '.join(list(found)[:5])}...; write more of the id")
    raise Refusal(f"no rollout {wanted!r} in {len(files)} files of {run / TRAJECTORIES}; their ids are in column rollout_id")


def advantages(config: RunConfig, rollout: Trajectory, group: list[Trajectory], parts: list[Segment]) -> list[np.ndarray]:
    """[T] per segment; nan where it is not known."""
    algorithm = config.algorithms[rollout.task.domain]
    from_group = algorithm.advantage in FROM_GROUP and algorithm.normalize == "none" and algorithm.kl.where != "reward"
    if not from_group or len(group) < 2:
        return [np.full(len(part.ids), np.nan) for part in parts]
    (credits,) = credit.of_batch([examples.group_of(group, {}, algorithm)], algorithm.model_copy(update={"correction": "none"}))
    place = next(index for index, other in enumerate(group) if other.rollout_id == rollout.rollout_id)
    return [found.advantages for found in credits[place]]


def head(rollout: Trajectory, group: list[Trajectory]) -> Iterator[str]:
    counts = Counter(step.kind for step in rollout.steps)
    steps = ", ".join(f"{counts[kind]} {many}" for kind, (_, many) in STEPS.items() if counts[kind] or kind == StepKind.ACT)
    flags = f" ({', '.join(rollout.flags)})" if rollout.flags else ""
    yield f"rollout {rollout.rollout_id}, attempt {rollout.attempt}, {rollout.source.name.lower()}"
    yield f"task {rollout.task.domain}/{rollout.task.id}, temperature {rollout.sampling.temperature:g}"
    yield f"ended {rollout.status.name.lower()}{flags}; return {rollout.total_reward:g}, {steps}"
    yield f"group {rollout.group_id}: returns {' '.join(f'{other.total_reward:g}' for other in group)}"
    yield "metrics " + ", ".join(f"{name} {value:g}" for name, value in sorted(rollout.metrics.items()))


def flow(rollout: Trajectory, part: Segment, pieces: list[str]) -> Text:
    """The text of a segment, each run in the colour of its kind; a line behind each turn says what came of it."""
    out = Text()
    for position, (piece, kind, step) in enumerate(zip(pieces, part.kinds.tolist(), part.step_of.tolist(), strict=True)):
        out.append(piece, STYLES[kind])
        last = position + 1 == len(pieces) or part.step_of[position + 1] != step
        if step >= 0 and last:
            turn = rollout.steps[step]
            outcomes = "".join(f", {o.name} {'ok' if o.ok else o.error or 'failed'}" for o in turn.tool_outcomes)
            origins = sorted({(run.version, run.pool) for run in turn.versions})
            versions = ", ".join(f"{version}{'' if pool == MAIN else f' ({pool})'}" for version, pool in origins)
            told = f"reward {turn.reward:g}, {turn.finish.name.lower()}, version {versions or '-'}{outcomes}"
            out.append(f" ⟨{STEPS[turn.kind][0]} {step}: {told}⟩", "blue")
    return out


def table(part: Segment, pieces: list[str], gains: np.ndarray) -> Iterator[str]:
    yield f"{'position':>8} {'id':>7} {'kind':<12} {'logprob':>9} {'version':>7} {'advantage':>9}  text"
    for position, piece in enumerate(pieces):
        kind = part.kinds[position]
        sampled = bool(part.mask[position])
        logprob = f"{part.logprobs[position]:.4f}" if sampled else ""
        version = str(part.versions[position]) if sampled else ""
        gain = f"{gains[position]:+.3f}" if sampled and np.isfinite(gains[position]) else ""
        line = f"{position:>8} {part.ids[position]:>7} {NAMES[kind]:<12} {logprob:>9} {version:>7} {gain:>9}  {piece!r}"
        yield f"[{STYLES[kind]}]{escape(line)}[/]"


def show(console: Console, run: Path, wanted: str, tokens: bool) -> None:
    """Raises Refusal, ConfigError and CodecError."""
    config, files = load(run / "config.toml"), load_model_files(run / "model")
    rollout, group = look_up(run, wanted)
    for line in head(rollout, group):
        console.print(line, markup=False, highlight=False)
    legend = "  ".join(f"[{style}]{NAMES[kind]}[/]" for kind, style in STYLES.items())
    console.print(legend, highlight=False)
    parts = segments(rollout)
    for index, (part, gains) in enumerate(zip(parts, advantages(config, rollout, group, parts), strict=True)):
        known = gains[part.mask & np.isfinite(gains)]
        told = f", advantage {known.mean():+.3f}" if len(known) else ""
        console.rule(f"segment {index + 1} of {len(parts)}: {len(part.ids)} tokens, {int(part.mask.sum())} sampled{told}")
        pieces = texts([files.codec.pieces[i] for i in part.ids.tolist()])
        if tokens:
            for line in table(part, pieces, gains):
                console.print(line, highlight=False, soft_wrap=True)
        else:
            console.print(flow(rollout, part, pieces), soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("rollout")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    try:
        show(Console(), find(args.run, args.runs), args.rollout, args.tokens)
    except (Refusal, ConfigError, CodecError) as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
