"""The record of a rollout while it is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.chat import EMPTY, Context
from actors.decoding import tokens_to_stop
from actors.engines import Generation
from actors.history import Prompt
from actors.toolcalls.turns import Turn
from common.record import sequence_lengths
from common.types import (
    Assignment,
    Finish,
    Observation,
    Source,
    Status,
    Step,
    StepKind,
    ToolOutcome,
    Trajectory,
    VersionRun,
    ids_array,
)
from common.validate import RecordError, Vocabulary, check, check_lengths

log = logging.getLogger("actors.tape")

COUNT_OF = {StepKind.ACT: "turns", StepKind.SUMMARY: "summaries", StepKind.SUBAGENT: "subagent_turns"}
CALLS = ("call_turns", "calls", "calls_unparsed", "calls_ok", "calls_failed")
COUNTS = (*COUNT_OF.values(), *CALLS, "format_errors", "engine_retries", "stale_fallbacks")


@dataclass(eq=False)
class Sampled:
    """A turn as it grows: more than one request when an engine aborted it on the way."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    finish: Finish = Finish.ABORT

    def add(self, piece: Generation) -> None:
        for run in piece.versions:
            run = replace(run, start=run.start + len(self.ids))
            last = self.versions[-1] if self.versions else None
            if last is None or (last.version, last.engine, last.pool) != (run.version, run.engine, run.pool):
                self.versions.append(run)
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.finish = piece.finish

    def cut_at(self, stops: Sequence[str], pieces: Sequence[bytes]) -> None:
        """End the turn with the token that completes a stop string, if one does; `pieces` are the tokenizer's."""
        count = tokens_to_stop([pieces[i] for i in self.ids], stops) if stops else None
        if count is not None:
            self.ids, self.logprobs, self.finish = self.ids[:count], self.logprobs[:count], Finish.STOP
            self.versions = [run for run in self.versions if run.start < count]


class Tape:
    """Writes a rollout's record. `append` is the only way in for tokens."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.begun = time.monotonic()
        self.steps: list[Step] = []
        self.env_steps = 0  # the next index at the environment
        self.tail = EMPTY
        self.status = Status.RUNNING
        self.flags: list[str] = []
        self.metrics: dict[str, float] = {}
        self.counts = dict.fromkeys(COUNTS, 0.0)

    def append(
        self, prompt: Prompt, sampled: Sampled, turn: Turn, timings: dict[str, float], kind: StepKind = StepKind.ACT
    ) -> int:
        """Store one turn, all its arrays or none; returns its index. Raises RecordError when their lengths differ."""
        ids, logprobs = ids_array(sampled.ids), np.asarray(sampled.logprobs, np.float32)
        if self.assignment.source == Source.POLICY:
            check_lengths(ids, logprobs, len(self.steps), self.assignment.rollout_id)
        step = Step(
            parent=prompt.parent,
            prefix_len=prompt.prefix_len,
            context_ids=prompt.context.ids,
            context_spans=prompt.context.spans,
            action_ids=ids,
            action_logprobs=logprobs,
            action_spans=turn.spans,
            versions=tuple(sampled.versions),
            kind=kind,
            reward=0.0,
            finish=sampled.finish,
            timings=timings,
        )
        self.steps.append(step)
        self.counts[COUNT_OF[kind]] += 1
        calls = turn.action.tool_calls if kind != StepKind.SUMMARY else ()  # a call in a summary is text
        self.counts["call_turns"] += bool(calls)
        self.counts["calls"] += len(calls)
        self.counts["calls_unparsed"] += sum(bool(call.error) for call in calls)
        self.counts["format_errors"] += turn.problems
        return len(self.steps) - 1

    def observe(self, index: int, observation: Observation, seconds: float) -> None:
        """What the environment answered to step `index`."""
        step = self.steps[index]
        self.steps[index] = replace(
            step,
            reward=float(observation.reward),
            timings={**step.timings, "env": seconds},
            state_key=observation.state_key,
        )
        self.env_steps += 1
        self.metrics.update(observation.metrics)
        self.called(index, observation.tool_outcomes)

    def called(self, index: int, outcomes: Sequence[ToolOutcome]) -> None:
        """Calls of step `index`, and how they went."""
        self.steps[index] = replace(self.steps[index], tool_outcomes=(*self.steps[index].tool_outcomes, *outcomes))
        for outcome in outcomes:
            self.counts["calls_ok" if outcome.ok else "calls_failed"] += 1

    def end(self, status: Status, *flags: str, tail: Context = EMPTY) -> None:
        """A tail that passes limits.max_tokens even with its texts shortened is left out: no row of the learner is longer."""
        if self.steps and sequence_lengths(tuple(self.steps[-1:]))[0] + len(tail) > self.assignment.limits.max_tokens:
            tail, flags = EMPTY, (*flags, "tail_cut")
        self.status, self.tail = status, tail
        self.flags += flags

    def fail(self, reason: str) -> None:
        self.status, self.tail = Status.FAILED, EMPTY
        self.flags = [f"reason:{reason}"]
        self.steps = [replace(step, reward=0.0) for step in self.steps]
        self.metrics = {}

    def trajectory(self, vocabulary: Vocabulary) -> Trajectory:
        """The record, checked. One that breaks a rule becomes FAILED, without its steps."""
        record = self._record()
        try:
            check(record, vocabulary)
        except RecordError as error:
            log.error("%s", error)
            self.fail(f"record:{error.rule}: {error.detail}")
            self.steps = []
            record = self._record()
        return record

    def _record(self) -> Trajectory:
        a = self.assignment
        return Trajectory(
            rollout_id=a.rollout_id,
            attempt=a.attempt,
            group_id=a.group_id,
            task=a.task,
            source=a.source,
            steps=tuple(self.steps),
            tail_ids=self.tail.ids,
            tail_spans=self.tail.spans,
            status=self.status,
            flags=tuple(self.flags),
            metrics={**self.metrics, **self.counts, **({"stage": float(a.stage)} if a.stage else {})},
            sampling=a.sampling,
        )
