"""The record: what a rollout is, from the actor that sampled it to the update that trained on it.

Plain frozen dataclasses over NumPy arrays; no field is optional. Derived views (full prompts, segments) are
functions in `common/record.py`; the rules a record must obey are in `common/validate.py`.

Dimension key: C context tokens of a step, A action tokens of a step, N runs, R trailing tokens of a trajectory.

Index convention of the whole repository: `x[t]` describes token `t`; `logprob[t] = log p(ids[t] | ids[<t])`;
`mask[t] = 1` iff the policy sampled `ids[t]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from common.addresses import MAIN

Json = Any


class ContextKind(IntEnum):
    """Where a context token came from."""

    TEMPLATE = 1  # written by the chat template: role headers, separators, wrappers
    TASK = 2  # instructions, tools and the task's own text
    OBSERVATION = 3  # what the environment answered
    REPLAY = 4  # the policy's own earlier tokens, shown again
    SUMMARY = 5  # a summary of earlier turns
    NOTICE = 6  # a message of the agent loop (truncation marks, limits)


class ActionKind(IntEnum):
    """What a run of action tokens is."""

    REASONING = 1
    CALL = 2
    TEXT = 3


class StepKind(IntEnum):
    ACT = 1
    SUMMARY = 2
    SUBAGENT = 3


class Finish(IntEnum):
    """The engine's reason for ending a turn."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


class Source(IntEnum):
    POLICY = 1  # sampled by our policy: has logprobs, may enter policy and value losses
    REFERENCE = 2  # the domain's reference solution: supervised losses only
    EXTERNAL = 3  # anyone else's tokens: supervised losses only


class Status(IntEnum):
    RUNNING = 1
    TERMINATED = 2  # the task ended: nothing to bootstrap
    TRUNCATED = 3  # cut by a limit: bootstrap from the value after the tail
    FAILED = 4  # infrastructure: never a reward, never trained


@dataclass(frozen=True, eq=False)
class Task:
    """One problem of a domain. `payload` is JSON and opaque to all but the domain."""

    domain: str
    id: str
    seed: int
    payload: Json


@dataclass(frozen=True)
class Sampling:
    """What a training rollout may ask of the engine; everything else that changes the distribution is refused.

    `temperature` 0 means greedy and is for evaluation only.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs over an array of tokens: run `i` covers `[starts[i], starts[i+1])` and has `kinds[i]`."""

    starts: np.ndarray  # [N] int32, strictly increasing, starts[0] == 0
    kinds: np.ndarray  # [N] int32, ContextKind or ActionKind


@dataclass(frozen=True)
class VersionRun:
    """From action token `start` on, tokens came from `version` on `engine` of `pool`."""

    start: int
    version: int
    engine: str
    pool: str


@dataclass(frozen=True)
class ToolOutcome:
    name: str
    ok: bool
    error: str  # "" when ok
    seconds: float


@dataclass(frozen=True, eq=False)
class Step:
    """One model turn. Its full prompt is `(prompt_parent + action_parent)[:prefix_len] + context_ids`."""

    parent: int  # index of the step it continues; -1: none
    prefix_len: int  # leading tokens of the parent's full sequence that stay visible
    context_ids: np.ndarray  # [C] int32
    context_spans: Spans
    action_ids: np.ndarray  # [A] int32, exactly what the engine sampled
    action_logprobs: np.ndarray  # [A] float32; [0] unless the source is POLICY
    action_spans: Spans
    versions: tuple[VersionRun, ...]  # empty unless the source is POLICY
    kind: StepKind
    reward: float
    finish: Finish
    tool_outcomes: tuple[ToolOutcome, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)  # seconds by name
    state_key: bytes = b""
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # each [A, ...]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One attempt at one task. The return is the sum of step rewards; an outcome reward stands on the last ACT step."""

    rollout_id: str
    attempt: int
    group_id: str
    task: Task
    source: Source
    steps: tuple[Step, ...]
    tail_ids: np.ndarray  # [R] int32: the observation after the last action
    tail_spans: Spans
    status: Status
    flags: tuple[str, ...]
    metrics: dict[str, float]
    sampling: Sampling

    @property
    def total_reward(self) -> float:
        return float(sum(step.reward for step in self.steps))


# ---- what actors and environments say to each other -------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """A parsed call. `error` is not empty when the text could not be parsed; the environment answers with it."""

    id: str
    name: str
    arguments: dict[str, Json] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Action:
    """`text` is what the policy wrote outside its tool calls and its reasoning."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Message:
    role: str  # "system", "user" or "tool"
    text: str
    tool_call_id: str = ""


@dataclass(frozen=True)
class Observation:
    messages: tuple[Message, ...]
    reward: float
    status: Status  # RUNNING, TERMINATED or TRUNCATED
    metrics: dict[str, float] = field(default_factory=dict)
    tool_outcomes: tuple[ToolOutcome, ...] = ()
    state_key: bytes = b""


# ---- what the learner hands out ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    max_turns: int
    max_tokens: int  # of a full sequence: prompt and action
    deadline_s: float  # wall clock after which no turn begins


@dataclass(frozen=True)
class ContextPolicy:
    """How history is shown to the policy. `append` keeps everything."""

    name: str = "append"
    options: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Assignment:
    rollout_id: str
    attempt: int
    group_id: str
    task: Task
    source: Source
    purpose: str  # "train" or "eval"
    limits: Limits
    sampling: Sampling
    context: ContextPolicy
    stale_share: float = 0.0  # probability that the stale pool samples a turn
    stage: int = 0  # of the curriculum, from 1; 0: the domain's whole budget of turns


@dataclass(frozen=True)
class EngineInfo:
    """A row of the engine table. Only engines in state "ready" serve rollouts."""

    name: str
    url: str
    pool: str
    version: int
    state: str  # "starting", "ready", "updating" or "quarantined"
    reason: str = ""

    @property
    def in_main(self) -> bool:
        return self.pool == MAIN


def ids_array(ids: Any) -> np.ndarray:
    """Token ids as int32.

    Raises OverflowError if an id does not fit int32: ids are never narrowed silently.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and (not ids.size or ids.min() >= 0):
        return ids  # nothing to narrow
    wide = np.asarray(ids, dtype=np.int64)
    if wide.size and (wide.min() < 0 or wide.max() > 2**31 - 1):
        bad = wide[(wide < 0) | (wide > 2**31 - 1)][0]
        raise OverflowError(f"token id {bad} is outside 0..2^31-1")
    return wide.astype(np.int32)


def spans_of(runs: list[tuple[int, int]]) -> Spans:
    """Spans from `(length, kind)` pairs; empty runs vanish and equal neighbours join."""
    starts: list[int] = []
    kinds: list[int] = []
    at = 0
    for length, kind in runs:
        if length and (not kinds or kinds[-1] != kind):
            starts.append(at)
            kinds.append(int(kind))
        at += length
    return Spans(np.asarray(starts, np.int32), np.asarray(kinds, np.int32))


def expand_spans(spans: Spans, length: int) -> np.ndarray:
    """Kind of each token, [length] int32."""
    out = np.zeros(length, np.int32)
    ends = np.append(spans.starts, length)[1:]
    for start, end, kind in zip(spans.starts, ends, spans.kinds, strict=True):
        out[start:end] = kind
    return out


def spans_from(kinds: np.ndarray) -> Spans:
    """Spans from the kind of each token, [length]: the inverse of `expand_spans`."""
    starts = np.flatnonzero(np.diff(kinds, prepend=-1)).astype(np.int32)
    return Spans(starts, kinds[starts].astype(np.int32))
