"""The rules of the record, in one place. Actors check before they send, the learner checks at its door."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from common.record import sequence_lengths
from common.types import ActionKind, ContextKind, Finish, Source, Spans, Status, Step, StepKind, Trajectory

CONTEXT_KINDS = frozenset(map(int, ContextKind))
ACTION_KINDS = frozenset(map(int, ActionKind))
SOURCES, STEP_KINDS, FINISHES = frozenset(map(int, Source)), frozenset(map(int, StepKind)), frozenset(map(int, Finish))
LOGPROB_SLACK = 1e-4  # a log-softmax in float32 may come out a little above 0


@dataclass(frozen=True)
class Vocabulary:
    """`rows` ids exist in the embedding; only ids below `sampleable` have a meaning for the tokenizer."""

    rows: int
    sampleable: int


class RecordError(ValueError):
    """A trajectory breaks a rule. `rule` is the rule's name, as it stands in RULES."""

    def __init__(self, rule: str, rollout_id: str, detail: str) -> None:
        super().__init__(f"rollout {rollout_id} breaks rule {rule}: {detail}")
        self.rule = rule
        self.rollout_id = rollout_id
        self.detail = detail


def check(trajectory: Trajectory, vocabulary: Vocabulary, versions: Collection[int] | None = None) -> None:
    """Raise RecordError for the first rule that `trajectory` breaks.

    `versions` are the published versions; None skips the rule that needs them.
    """
    for rule, function in RULES.items():
        for detail in function(trajectory, vocabulary):
            raise RecordError(rule, trajectory.rollout_id, detail)
    if versions is not None:
        for index, step in enumerate(trajectory.steps):
            for run in step.versions:
                if run.version not in versions:
                    detail = f"step {index}: version {run.version} was never published"
                    raise RecordError("version_exists", trajectory.rollout_id, detail)


def _identity(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    if not t.rollout_id or not t.group_id or not t.task.domain or not t.task.id:
        yield "rollout_id, group_id, task.domain and task.id must not be empty"
    if t.attempt < 0:
        yield f"attempt is {t.attempt}"


def _enums(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    if t.source not in SOURCES:
        yield f"source is {t.source}"
    if t.status not in (Status.TERMINATED, Status.TRUNCATED, Status.FAILED):
        yield f"status is {t.status!r}, it must be TERMINATED, TRUNCATED or FAILED"
    for index, step in enumerate(t.steps):
        if step.kind not in STEP_KINDS or step.finish not in FINISHES:
            yield f"step {index}: kind {step.kind}, finish {step.finish}"


def _not_empty(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    if not t.steps and t.status != Status.FAILED:
        yield "no steps, and the status is not FAILED"


def _array_types(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    arrays = [("tail_ids", t.tail_ids, np.int32)]
    for index, step in enumerate(t.steps):
        arrays += [
            (f"step {index} context_ids", step.context_ids, np.int32),
            (f"step {index} action_ids", step.action_ids, np.int32),
            (f"step {index} action_logprobs", step.action_logprobs, np.float32),
        ]
    for name, array, dtype in arrays:
        if array.dtype != dtype or array.ndim != 1:
            yield f"{name} is {array.dtype}{list(array.shape)}, it must be one-dimensional {np.dtype(dtype)}"


def _equal_lengths(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    for index, step in enumerate(t.steps):
        want = len(step.action_ids) if t.source == Source.POLICY else 0
        if len(step.action_logprobs) != want:
            yield f"step {index}: {len(step.action_ids)} action ids, {len(step.action_logprobs)} logprobs, {want} expected"
        for name, array in step.extras.items():
            if array.ndim < 1 or len(array) != len(step.action_ids):
                yield f"step {index}: extras[{name!r}] has shape {array.shape} for {len(step.action_ids)} action ids"


def _parents(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    lengths = sequence_lengths(t.steps)
    for index, step in enumerate(t.steps):
        if not -1 <= step.parent < index:
            yield f"step {index}: parent is {step.parent}"
        elif step.parent == -1 and step.prefix_len != 0:
            yield f"step {index}: no parent, but prefix_len {step.prefix_len}"
        elif step.parent >= 0 and not 0 <= step.prefix_len <= lengths[step.parent]:
            yield f"step {index}: prefix_len {step.prefix_len}, its parent's sequence has {lengths[step.parent]} tokens"
        elif lengths[index] == len(step.action_ids):
            yield f"step {index}: its prompt is empty"


def _vocabulary(t: Trajectory, vocabulary: Vocabulary) -> Iterator[str]:
    context = [t.tail_ids, *[step.context_ids for step in t.steps]]
    action = [step.action_ids for step in t.steps]
    if _all_below(context, vocabulary.rows) and _all_below(action, vocabulary.sampleable):
        return  # else: where?
    names = ["tail", *[f"step {index} context" for index in range(len(t.steps))]]
    places = [(name, ids, vocabulary.rows) for name, ids in zip(names, context, strict=True)]
    places += [(f"step {index} action", ids, vocabulary.sampleable) for index, ids in enumerate(action)]
    for name, ids, bound in places:
        wrong = (ids < 0) | (ids >= bound)
        if wrong.any():
            yield f"{name}: id {ids[wrong][0]} is outside 0..{bound - 1}"


def _all_below(arrays: Sequence[np.ndarray], bound: int) -> bool:
    """Whether all ids are in 0..bound-1. Many short arrays are checked as one; a negative int32, read as uint32, is large."""
    ids = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return not len(ids) or int(ids.view(np.uint32).max()) < bound


def _logprobs(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    logprobs = np.concatenate([step.action_logprobs for step in t.steps]) if t.steps else np.zeros(0, np.float32)
    if not len(logprobs) or (logprobs.max() <= LOGPROB_SLACK and logprobs.min() > -np.inf):
        return  # a NaN is the maximum, and is not below anything
    for index, step in enumerate(t.steps):
        wrong = ~np.isfinite(step.action_logprobs) | (step.action_logprobs > LOGPROB_SLACK)
        if wrong.any():
            at = int(np.argmax(wrong))
            yield f"step {index}: logprob {step.action_logprobs[at]} of action token {at}"


def _versions(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    for index, step in enumerate(t.steps):
        length = len(step.action_ids) if t.source == Source.POLICY else 0
        problem = _run_problem([run.start for run in step.versions], length)
        if problem:
            yield f"step {index} versions: {problem}"
        if any(run.version < 0 for run in step.versions):
            yield f"step {index}: negative version"


def _spans(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    places: list[tuple[str, Spans, int, frozenset[int]]] = [("tail_spans", t.tail_spans, len(t.tail_ids), CONTEXT_KINDS)]
    for index, step in enumerate(t.steps):
        places.append((f"step {index} context_spans", step.context_spans, len(step.context_ids), CONTEXT_KINDS))
        places.append((f"step {index} action_spans", step.action_spans, len(step.action_ids), ACTION_KINDS))
    for name, spans, length, kinds in places:
        if len(spans.starts) != len(spans.kinds):
            yield f"{name}: {len(spans.starts)} starts, {len(spans.kinds)} kinds"
        elif problem := _run_problem(spans.starts.tolist(), length):
            yield f"{name}: {problem}"
        elif not kinds.issuperset(spans.kinds.tolist()):
            yield f"{name}: unknown kind in {spans.kinds.tolist()}"


def _run_problem(starts: list[int], length: int) -> str:
    """Why runs that begin at `starts` do not cover `length` tokens; empty when they do. They are few: plain Python is ten times
    faster than NumPy here."""
    if length == 0:
        return f"{len(starts)} runs over no tokens" if starts else ""
    if not starts or starts[0] != 0:
        return "the first run must start at 0"
    if starts[-1] >= length or any(a >= b for a, b in pairwise(starts)):
        return f"starts {starts} do not increase below {length}"
    return ""


def _finish(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    for index, step in enumerate(t.steps):
        if step.finish == Finish.ABORT and t.status == Status.TERMINATED:
            yield f"step {index} was aborted: a fragment must not be graded"
        if not len(step.action_ids) and step.finish == Finish.STOP:
            yield f"step {index} stopped without a token"
        last = index == len(t.steps) - 1 and step.kind == StepKind.ACT
        if last and step.finish == Finish.LENGTH and t.status == Status.TERMINATED:
            yield f"step {index}, the last one, was cut by the token limit, but the status is TERMINATED"


def _rewards(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    for index, step in enumerate(t.steps):
        if not math.isfinite(step.reward):
            yield f"step {index}: reward {step.reward}"
        if t.status == Status.FAILED and step.reward:
            yield f"step {index}: reward {step.reward} in a FAILED rollout"


def _sampling(t: Trajectory, _: Vocabulary) -> Iterator[str]:
    if not math.isfinite(t.sampling.temperature) or t.sampling.temperature < 0:
        yield f"temperature {t.sampling.temperature}"
    if t.sampling.max_new_tokens < 1:
        yield f"max_new_tokens {t.sampling.max_new_tokens}"


Rule = Callable[[Trajectory, Vocabulary], Iterator[str]]
RULES: dict[str, Rule] = {
    "identity": _identity,
    "known_enums": _enums,
    "has_steps": _not_empty,
    "array_types": _array_types,
    "equal_lengths": _equal_lengths,
    "parent_and_prefix": _parents,
    "ids_in_vocabulary": _vocabulary,
    "finite_logprobs": _logprobs,
    "versions_cover": _versions,
    "spans_cover": _spans,
    "finish_and_status": _finish,
    "finite_rewards": _rewards,
    "sampling": _sampling,
}


def check_lengths(ids: np.ndarray, logprobs: np.ndarray, step: int, rollout_id: str) -> None:
    """The writer's guard: raise RecordError at once if a turn's arrays differ in length."""
    if len(ids) != len(logprobs):
        raise RecordError("equal_lengths", rollout_id, f"step {step}: {len(ids)} action ids, {len(logprobs)} logprobs")


def sampled_tokens(steps: tuple[Step, ...]) -> int:
    """How many tokens the engine sampled for these steps."""
    return sum(len(step.action_ids) for step in steps)
