"""What a rollout is asked to do, and whether what came back is an answer to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from common.addresses import EVAL, MAIN, STALE
from common.config import DomainConfig, RunConfig
from common.convert import ConvertError, trajectory_parse
from common.record import sequence_lengths
from common.types import Assignment, EngineInfo, Limits, Sampling, Source, Status, StepKind, Trajectory
from common.validate import RecordError, Vocabulary, check, sampled_tokens
from learner.ledger import Ledger
from learner.proofs import Proofs, Verdict
from learner.rollouts import Group, Kind, Origin, Rollout


@dataclass(frozen=True)
class Leased:
    """What an actor gets for its free slots."""

    assignments: list[Assignment]
    retry_after_s: float
    no_more: bool


@dataclass(frozen=True)
class Answer:
    """To a delivery; `status` is a name of DeliverStatus, or EXPECTED."""

    status: str
    reason: str = ""


EXPECTED = Answer("EXPECTED")
NOT_YET = "not_yet"


class EveryRolloutFails(RuntimeError):
    """So many rollouts ran out of attempts, without one that was scored, that going on makes no sense."""


@dataclass
class FailureStreak:
    """Rollouts that failed for good since the last one that was scored. A task, an engine or a server that is set up
    wrongly fails every rollout at once: the run then ends with the reason instead of failing for ever."""

    limit: int
    count: int = 0

    def add(self, reason: str) -> None:
        self.count += 1
        self.reason = reason

    def check(self) -> None:
        """Raises EveryRolloutFails."""
        if self.count >= self.limit:
            raise EveryRolloutFails(
                f"the last {self.count} rollouts all failed, the newest with: {self.reason}; see events.jsonl (rollout_failed)"
            )


REASON = 300  # characters of a failure that are told


def assignment(
    config: RunConfig, domain: DomainConfig, group: Group, rollout: Rollout, greedy: bool, max_turns: int
) -> Assignment:
    limits = domain.limits
    held_out = group.kind is Kind.EVAL
    temperature = 0.0 if greedy else (held_out and config.eval.temperature) or config.sampling.temperature
    return Assignment(
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        group_id=group.id,
        task=group.task,
        source=group.kind.source,
        purpose="eval" if held_out else "train",
        limits=Limits(max_turns, limits.max_tokens, limits.deadline_s),
        sampling=Sampling(temperature, limits.max_new_tokens, seed=rollout.seed),
        context=domain.context.policy,
        stale_share=config.cross_policy.share if group.kind is Kind.RL and config.cross_policy.engines else 0.0,
        stage=group.stage,
    )


def held_out_pool(engines: Iterable[EngineInfo]) -> str:
    """Where held-out rollouts are sampled: by the engine that is held for them, or, where there is but one, by it."""
    return EVAL if any(engine.pool == EVAL for engine in engines) else MAIN


def read(data: bytes, rollout_id: str, vocabulary: Vocabulary, versions: Collection[int]) -> Trajectory:
    """The trajectory in `data`. Raises RecordError when it is none, or breaks a rule of the record."""
    try:
        trajectory = trajectory_parse(data)
    except ConvertError as error:
        raise RecordError("parse", rollout_id, str(error)) from error
    check(trajectory, vocabulary, versions)
    return trajectory


def check_assignment(trajectory: Trajectory, asked: Assignment) -> None:
    """Raise RecordError unless `trajectory` is an answer to `asked`. A held-out rollout cannot pass for training: its id,
    group and sampling are not those of a training rollout. One that is longer than allowed would not fit a row."""
    pairs = [
        ("rollout_id", trajectory.rollout_id, asked.rollout_id),
        ("attempt", trajectory.attempt, asked.attempt),
        ("group_id", trajectory.group_id, asked.group_id),
        ("task", (trajectory.task.domain, trajectory.task.id), (asked.task.domain, asked.task.id)),
        ("source", trajectory.source, asked.source),
        ("sampling", trajectory.sampling, asked.sampling),
    ]
    for name, got, want in pairs:
        if got != want:
            raise RecordError("assignment", asked.rollout_id, f"{name} is {got!r}, assigned was {want!r}")
    pools = (MAIN, EVAL) if asked.purpose == "eval" else (MAIN, STALE) if asked.stale_share else (MAIN,)
    for origin in origins_of(trajectory):
        if origin.pool not in pools:
            detail = f"version {origin.version} sampled it in pool {origin.pool!r}, assigned was {' or '.join(pools)}"
            raise RecordError("assignment", asked.rollout_id, detail)
    lengths = sequence_lengths(trajectory.steps)
    longest = max([*lengths, sum(lengths[-1:]) + len(trajectory.tail_ids)])
    kinds = Counter(step.kind for step in trajectory.steps)
    options = asked.context.options
    helped = int(options.get("subagent_turns", 0)) * int(options.get("subagent_calls", 0))
    own = asked.context.name == "summary" and not options.get("summary_url")
    summed_up = kinds[StepKind.ACT] + kinds[StepKind.SUBAGENT] if own else 0
    bounds = [
        ("turns", kinds[StepKind.ACT], asked.limits.max_turns),
        ("turns of sub-agents", kinds[StepKind.SUBAGENT], helped),
        ("summaries", kinds[StepKind.SUMMARY], summed_up),
        ("tokens", longest, asked.limits.max_tokens),
    ]
    for name, got, most in bounds:
        if got > most:
            raise RecordError("limits", asked.rollout_id, f"{got} {name}, allowed are {most}")
    sizes = dict.fromkeys(StepKind, asked.sampling.max_new_tokens) | {StepKind.SUMMARY: int(options.get("summary_tokens", 0))}
    for index, step in enumerate(trajectory.steps):
        what = f"step {index} ({step.kind.name})"
        if len(step.action_ids) > sizes[step.kind]:
            detail = f"{what} has {len(step.action_ids)} sampled tokens, allowed are {sizes[step.kind]}"
            raise RecordError("limits", asked.rollout_id, detail)
        if step.kind != StepKind.ACT and step.parent < 0:
            raise RecordError("limits", asked.rollout_id, f"{what} continues no other step")


def failure(trajectory: Trajectory, held: int) -> str:
    """Why there is nothing to score, from the flag `reason:<why>` of a FAILED rollout; empty when there is something. `held`:
    the version that had to sample all of it; 0: whichever was served."""
    if trajectory.status == Status.FAILED:
        return next((flag.removeprefix("reason:")[:REASON] for flag in trajectory.flags if flag.startswith("reason:")), "unknown")
    if trajectory.source == Source.POLICY and not sampled_tokens(trajectory.steps):
        return "no_tokens"
    if held and any(origin.version != held for origin in origins_of(trajectory)):
        return "other_version"
    return ""


def obstacle(trajectory: Trajectory, held: int, proofs: Proofs, since: float) -> tuple[str, str]:
    """Why a rollout that was handed out at `since` is not scored, and more about it; empty when it is. NOT_YET: it may be in a
    moment. An evaluation is of the version `held` alone (0: training)."""
    if reason := failure(trajectory, held):
        return reason, ""
    verdict, why = proofs.judge(pairs_of(trajectory), since)
    return {Verdict.PROVEN: "", Verdict.PENDING: NOT_YET, Verdict.FAILED: "unproven_weights"}[verdict], why


def serves(engines: Collection[EngineInfo], version: int) -> bool:
    """Some engine for held-out rollouts."""
    pool = held_out_pool(engines)
    return any(e.pool == pool and e.state == "ready" and e.version == version for e in engines)


def fresh(engines: Iterable[EngineInfo], ledger: Ledger) -> bool:
    """Some engine of main, on which turns of the stale pool fall back, has weights that are young enough for training."""
    return any(e.in_main and e.state == "ready" and ledger.live(Origin(e.version, e.pool)) for e in engines)


def pairs_of(trajectory: Trajectory) -> set[tuple[str, int]]:
    """What sampled its tokens: engines and their versions."""
    return {(run.engine, run.version) for step in trajectory.steps for run in step.versions}


def origins_of(trajectory: Trajectory) -> tuple[Origin, ...]:
    """What sampled its tokens, versions rising."""
    return tuple(sorted({Origin(run.version, run.pool) for step in trajectory.steps for run in step.versions}))
