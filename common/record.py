"""Views of a record: full prompts, full sequences and segments. All derived, nothing stored.

A segment is a maximal chain of steps whose prefix is whole; the first such child continues it. It is one row of
token ids for the learner: every sampled token stands in exactly one segment with `mask` 1. Tokens that a new segment
inherits from its parent (a shorter prefix) are context there: `kinds` says REPLAY and they are never trained again.

Dimension key: T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.types import ContextKind, Source, Step, Trajectory, expand_spans

ACTION = 0  # the value of `Segment.kinds` at action tokens; context tokens have their ContextKind


@dataclass(frozen=True, eq=False)
class Segment:
    """One row of a rollout. `x[t]` describes token `t`."""

    steps: tuple[int, ...]  # indices into trajectory.steps, in order
    ids: np.ndarray  # [T] int32
    mask: np.ndarray  # [T] bool: the policy sampled this token, here
    action: np.ndarray  # [T] bool: an action token of any source, here
    logprobs: np.ndarray  # [T] float32: behaviour logprob; 0 where mask is 0
    versions: np.ndarray  # [T] int64: the version that sampled the token; -1 where mask is 0
    kinds: np.ndarray  # [T] int32: ContextKind, or ACTION
    step_of: np.ndarray  # [T] int32: index of the step whose action holds the token; -1 elsewhere
    tail: int  # how many trailing tokens are the trajectory's tail (0 unless this segment ends the rollout)


def full_prompt(trajectory: Trajectory, index: int) -> np.ndarray:
    """The ids that the engine was given for step `index`, [P] int32."""
    step = trajectory.steps[index]
    if step.parent < 0:
        return step.context_ids
    return np.concatenate([sequence(trajectory, step.parent)[: step.prefix_len], step.context_ids])


def sequence(trajectory: Trajectory, index: int) -> np.ndarray:
    """Prompt and action of step `index`, [P + A] int32."""
    return np.concatenate([full_prompt(trajectory, index), trajectory.steps[index].action_ids])


def sequence_lengths(steps: tuple[Step, ...]) -> list[int]:
    """Length of each step's full sequence, without building it."""
    lengths: list[int] = []
    for step in steps:
        lengths.append(step.prefix_len + len(step.context_ids) + len(step.action_ids))
    return lengths


def chains(steps: tuple[Step, ...]) -> list[list[int]]:
    """Step indices of each segment, in order of their first step."""
    lengths = sequence_lengths(steps)
    chain_of: dict[int, int] = {}  # last step of a chain -> chain
    out: list[list[int]] = []
    for index, step in enumerate(steps):
        whole = step.parent >= 0 and step.prefix_len == lengths[step.parent]
        if whole and step.parent in chain_of:
            chain = chain_of.pop(step.parent)
            out[chain].append(index)
        else:
            chain = len(out)
            out.append([index])
        chain_of[index] = chain
    return out


def segment_lengths(trajectory: Trajectory) -> list[int]:
    """Tokens of each of `segments`, without building them."""
    lengths, last = sequence_lengths(trajectory.steps), len(trajectory.steps) - 1
    return [lengths[chain[-1]] + (len(trajectory.tail_ids) if chain[-1] == last else 0) for chain in chains(trajectory.steps)]


def segments(trajectory: Trajectory) -> list[Segment]:
    """The rollout's rows. The tail is appended to the segment that holds the last step."""
    last = len(trajectory.steps) - 1
    return [_segment(trajectory, chain, with_tail=chain[-1] == last) for chain in chains(trajectory.steps)]


def _segment(trajectory: Trajectory, chain: list[int], with_tail: bool) -> Segment:
    sampled = trajectory.source == Source.POLICY
    first = trajectory.steps[chain[0]]
    prefix = full_prompt(trajectory, chain[0])[: first.prefix_len] if first.parent >= 0 else np.zeros(0, np.int32)
    ids, kinds, step_of, logprobs, versions = [prefix], [np.full(len(prefix), ContextKind.REPLAY, np.int32)], [], [], []
    step_of.append(np.full(len(prefix), -1, np.int32))
    logprobs.append(np.zeros(len(prefix), np.float32))
    versions.append(np.full(len(prefix), -1, np.int64))

    def add(token_ids: np.ndarray, kind: np.ndarray, owner: int) -> None:
        ids.append(token_ids)
        kinds.append(kind)
        step_of.append(np.full(len(token_ids), owner, np.int32))

    for index in chain:
        step = trajectory.steps[index]
        add(step.context_ids, expand_spans(step.context_spans, len(step.context_ids)), -1)
        add(step.action_ids, np.full(len(step.action_ids), ACTION, np.int32), index)
        context, action = len(step.context_ids), len(step.action_ids)
        logprobs.append(np.zeros(context, np.float32))
        logprobs.append(step.action_logprobs if sampled else np.zeros(action, np.float32))
        versions.append(np.full(context, -1, np.int64))
        versions.append(token_versions(step) if sampled else np.full(action, -1, np.int64))
    tail = len(trajectory.tail_ids) if with_tail else 0
    if tail:
        add(trajectory.tail_ids, expand_spans(trajectory.tail_spans, tail), -1)
        logprobs.append(np.zeros(tail, np.float32))
        versions.append(np.full(tail, -1, np.int64))
    owner = np.concatenate(step_of)
    action_mask = owner >= 0
    return Segment(
        steps=tuple(chain),
        ids=np.concatenate(ids),
        mask=action_mask & sampled,
        action=action_mask,
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        kinds=np.concatenate(kinds),
        step_of=owner,
        tail=tail,
    )


def token_versions(step: Step) -> np.ndarray:
    """The version that sampled each action token, [A] int64."""
    out = np.full(len(step.action_ids), -1, np.int64)
    for run in step.versions:
        out[run.start :] = run.version
    return out
