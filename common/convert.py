"""The record to and from its wire form. Arrays travel as little-endian bytes; ids are int32.

The only module that knows both sides. Reading raises ConvertError when bytes do not make an array.
"""

from __future__ import annotations

import json

import numpy as np

from common import types as t
from common.proto import rl_pb2 as pb
from common.waits import Edge

INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class ConvertError(ValueError):
    """A message cannot be read as a record."""


def to_bytes(array: np.ndarray, dtype: np.dtype) -> bytes:
    if array.dtype != dtype:
        array = array.astype(dtype, casting="same_kind")
    return array.tobytes()


def ids_to_bytes(ids: np.ndarray) -> bytes:
    """Token ids as int32. Raises OverflowError when one does not fit: a wider array is never narrowed silently."""
    return to_bytes(t.ids_array(ids), INT32)


def from_bytes(data: bytes, dtype: np.dtype, what: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ConvertError(f"{what}: {len(data)} bytes are not a whole number of {dtype.itemsize}-byte items")
    array = np.frombuffer(data, dtype)  # a view: the bytes are not copied again
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _json_loads(text: str, what: str) -> t.Json:
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise ConvertError(f"{what} is not JSON: {error}") from error


def task_to(task: t.Task) -> pb.TaskMessage:
    return pb.TaskMessage(domain=task.domain, id=task.id, seed=task.seed, payload_json=json.dumps(task.payload))


def task_from(m: pb.TaskMessage) -> t.Task:
    return t.Task(m.domain, m.id, m.seed, _json_loads(m.payload_json, f"payload of task {m.id}"))


def sampling_to(s: t.Sampling) -> pb.SamplingMessage:
    stop_ids = ids_to_bytes(np.asarray(s.stop_token_ids, np.int64))
    return pb.SamplingMessage(
        temperature=s.temperature, max_new_tokens=s.max_new_tokens, stop=s.stop, stop_token_ids=stop_ids, seed=s.seed
    )


def sampling_from(m: pb.SamplingMessage) -> t.Sampling:
    stop_ids = tuple(int(i) for i in from_bytes(m.stop_token_ids, INT32, "stop_token_ids"))
    return t.Sampling(m.temperature, m.max_new_tokens, tuple(m.stop), stop_ids, m.seed)


def _spans_to(s: t.Spans) -> pb.SpansMessage:
    return pb.SpansMessage(starts=to_bytes(s.starts, INT32), kinds=to_bytes(s.kinds, INT32))


def _spans_from(m: pb.SpansMessage, what: str) -> t.Spans:
    return t.Spans(from_bytes(m.starts, INT32, what), from_bytes(m.kinds, INT32, what))


def _outcomes_to(outcomes: tuple[t.ToolOutcome, ...]) -> list[pb.ToolOutcomeMessage]:
    return [pb.ToolOutcomeMessage(name=o.name, ok=o.ok, error=o.error, seconds=o.seconds) for o in outcomes]


def _outcomes_from(messages) -> tuple[t.ToolOutcome, ...]:  # noqa: ANN001 - a repeated field
    return tuple(t.ToolOutcome(m.name, m.ok, m.error, m.seconds) for m in messages)


def _array_to(a: np.ndarray) -> pb.ArrayMessage:
    little = np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<"), copy=False)
    return pb.ArrayMessage(dtype=little.dtype.str, shape=a.shape, data=little.tobytes())


def _array_from(m: pb.ArrayMessage, what: str) -> np.ndarray:
    try:
        dtype = np.dtype(m.dtype)
    except TypeError as error:
        raise ConvertError(f"{what}: {error}") from error
    if dtype.hasobject or not dtype.itemsize:
        raise ConvertError(f"{what}: dtype {m.dtype}")
    try:
        return from_bytes(m.data, dtype, what).reshape(tuple(m.shape))
    except ValueError as error:
        raise ConvertError(f"{what}: {error}") from error


def _step_to(s: t.Step) -> pb.StepMessage:
    message = pb.StepMessage(
        parent=s.parent,
        prefix_len=s.prefix_len,
        context_ids=ids_to_bytes(s.context_ids),
        context_spans=_spans_to(s.context_spans),
        action_ids=ids_to_bytes(s.action_ids),
        action_logprobs=to_bytes(s.action_logprobs, FLOAT32),
        action_spans=_spans_to(s.action_spans),
        versions=[pb.VersionRunMessage(start=v.start, version=v.version, engine=v.engine, pool=v.pool) for v in s.versions],
        kind=int(s.kind),  # pyright: ignore[reportArgumentType]
        reward=s.reward,
        finish=int(s.finish),  # pyright: ignore[reportArgumentType]
        tool_outcomes=_outcomes_to(s.tool_outcomes),
        timings=s.timings,
        state_key=s.state_key,
    )
    for name, array in s.extras.items():
        message.extras[name].CopyFrom(_array_to(array))
    return message


def _step_from(m: pb.StepMessage, index: int) -> t.Step:
    what = f"step {index}"
    return t.Step(
        parent=m.parent,
        prefix_len=m.prefix_len,
        context_ids=from_bytes(m.context_ids, INT32, f"{what} context_ids"),
        context_spans=_spans_from(m.context_spans, f"{what} context_spans"),
        action_ids=from_bytes(m.action_ids, INT32, f"{what} action_ids"),
        action_logprobs=from_bytes(m.action_logprobs, FLOAT32, f"{what} action_logprobs"),
        action_spans=_spans_from(m.action_spans, f"{what} action_spans"),
        versions=tuple(t.VersionRun(v.start, v.version, v.engine, v.pool) for v in m.versions),
        kind=_enum(t.StepKind, m.kind, what),
        reward=m.reward,
        finish=_enum(t.Finish, m.finish, what),
        tool_outcomes=_outcomes_from(m.tool_outcomes),
        timings=dict(m.timings),
        state_key=m.state_key,
        extras={name: _array_from(a, f"{what} extras[{name!r}]") for name, a in m.extras.items()},
    )


def _enum(kind, value: int, what: str):  # noqa: ANN001, ANN202 - any IntEnum, and its member
    try:
        return kind(value)
    except ValueError as error:
        raise ConvertError(f"{what}: {kind.__name__} {value} is unknown") from error


def trajectory_to(x: t.Trajectory) -> pb.TrajectoryMessage:
    return pb.TrajectoryMessage(
        rollout_id=x.rollout_id,
        attempt=x.attempt,
        group_id=x.group_id,
        task=task_to(x.task),
        source=int(x.source),  # pyright: ignore[reportArgumentType]
        steps=[_step_to(step) for step in x.steps],
        tail_ids=ids_to_bytes(x.tail_ids),
        tail_spans=_spans_to(x.tail_spans),
        status=int(x.status),  # pyright: ignore[reportArgumentType]
        flags=x.flags,
        metrics=x.metrics,
        sampling=sampling_to(x.sampling),
    )


def trajectory_from(m: pb.TrajectoryMessage) -> t.Trajectory:
    return t.Trajectory(
        rollout_id=m.rollout_id,
        attempt=m.attempt,
        group_id=m.group_id,
        task=task_from(m.task),
        source=_enum(t.Source, m.source, "trajectory"),
        steps=tuple(_step_from(step, index) for index, step in enumerate(m.steps)),
        tail_ids=from_bytes(m.tail_ids, INT32, "tail_ids"),
        tail_spans=_spans_from(m.tail_spans, "tail_spans"),
        status=_enum(t.Status, m.status, "trajectory"),
        flags=tuple(m.flags),
        metrics=dict(m.metrics),
        sampling=sampling_from(m.sampling),
    )


def trajectory_bytes(x: t.Trajectory) -> bytes:
    return trajectory_to(x).SerializeToString()


def trajectory_parse(data: bytes) -> t.Trajectory:
    """Raises ConvertError when `data` is not a trajectory."""
    from google.protobuf.message import DecodeError

    try:
        message = pb.TrajectoryMessage.FromString(data)
    except DecodeError as error:
        raise ConvertError(f"not a TrajectoryMessage: {error}") from error
    return trajectory_from(message)


def action_to(a: t.Action) -> pb.ActionMessage:
    calls = [
        pb.ToolCallMessage(id=c.id, name=c.name, arguments_json=json.dumps(c.arguments), error=c.error) for c in a.tool_calls
    ]
    return pb.ActionMessage(text=a.text, tool_calls=calls)


def action_from(m: pb.ActionMessage) -> t.Action:
    calls = tuple(
        t.ToolCall(c.id, c.name, _json_loads(c.arguments_json, f"arguments of call {c.id}") or {}, c.error) for c in m.tool_calls
    )
    return t.Action(m.text, calls)


def observation_to(o: t.Observation) -> pb.ObservationMessage:
    return pb.ObservationMessage(
        messages=[pb.MessageMessage(role=x.role, text=x.text, tool_call_id=x.tool_call_id) for x in o.messages],
        reward=o.reward,
        status=int(o.status),  # pyright: ignore[reportArgumentType]
        metrics=o.metrics,
        tool_outcomes=_outcomes_to(o.tool_outcomes),
        state_key=o.state_key,
    )


def observation_from(m: pb.ObservationMessage) -> t.Observation:
    return t.Observation(
        messages=tuple(t.Message(x.role, x.text, x.tool_call_id) for x in m.messages),
        reward=m.reward,
        status=_enum(t.Status, m.status, "observation"),
        metrics=dict(m.metrics),
        tool_outcomes=_outcomes_from(m.tool_outcomes),
        state_key=m.state_key,
    )


def assignment_to(a: t.Assignment) -> pb.AssignmentMessage:
    return pb.AssignmentMessage(
        rollout_id=a.rollout_id,
        attempt=a.attempt,
        group_id=a.group_id,
        task=task_to(a.task),
        source=int(a.source),  # pyright: ignore[reportArgumentType]
        purpose=a.purpose,
        limits=pb.LimitsMessage(max_turns=a.limits.max_turns, max_tokens=a.limits.max_tokens, deadline_s=a.limits.deadline_s),
        sampling=sampling_to(a.sampling),
        context=pb.ContextPolicyMessage(name=a.context.name, options_json=json.dumps(a.context.options)),
        stale_share=a.stale_share,
        stage=a.stage,
    )


def assignment_from(m: pb.AssignmentMessage) -> t.Assignment:
    return t.Assignment(
        rollout_id=m.rollout_id,
        attempt=m.attempt,
        group_id=m.group_id,
        task=task_from(m.task),
        source=_enum(t.Source, m.source, "assignment"),
        purpose=m.purpose,
        limits=t.Limits(m.limits.max_turns, m.limits.max_tokens, m.limits.deadline_s),
        sampling=sampling_from(m.sampling),
        context=t.ContextPolicy(m.context.name, _json_loads(m.context.options_json, "context options") or {}),
        stale_share=m.stale_share,
        stage=m.stage,
    )


def engine_to(e: t.EngineInfo) -> pb.EngineMessage:
    return pb.EngineMessage(name=e.name, url=e.url, pool=e.pool, version=e.version, state=e.state, reason=e.reason)


def engine_from(m: pb.EngineMessage) -> t.EngineInfo:
    return t.EngineInfo(m.name, m.url, m.pool, m.version, m.state, m.reason)


def edge_to(e: Edge) -> pb.WaitMessage:
    return pb.WaitMessage(
        name=e.name,
        owner=e.owner,
        on=e.on,
        seconds=e.seconds,
        deadline=e.deadline,
        why=e.why,
        silent=e.silent,
        number=e.number,
    )


def edge_from(m: pb.WaitMessage) -> Edge:
    return Edge(m.owner, m.name, m.on, m.why, m.seconds, m.deadline, m.silent, m.number)
