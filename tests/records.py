"""Random valid trajectories (hypothesis), a small fixed one, and equality field by field."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from common.types import (
    ActionKind,
    ContextKind,
    Finish,
    Sampling,
    Source,
    Spans,
    Status,
    Step,
    StepKind,
    Task,
    ToolOutcome,
    Trajectory,
    VersionRun,
    ids_array,
    spans_of,
)
from common.validate import Vocabulary

ANY_IDS = Vocabulary(rows=2**31, sampleable=2**31)

texts = st.text(max_size=6)
names = st.text(min_size=1, max_size=6)
ids = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
outcomes = st.builds(ToolOutcome, names, st.booleans(), texts, seconds)


@st.composite
def spans(draw, length: int, kinds: type) -> Spans:
    starts = [0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=2)))] if length > 1 else [0] * length
    return Spans(np.asarray(starts, np.int32), np.asarray([draw(st.sampled_from(kinds)) for _ in starts], np.int32))


@st.composite
def version_runs(draw, length: int) -> tuple[VersionRun, ...]:
    cuts = draw(spans(length, ContextKind)).starts
    return tuple(VersionRun(int(at), draw(st.integers(0, 2**63 - 1)), draw(texts), draw(texts)) for at in cuts)


@st.composite
def extras(draw, length: int) -> dict[str, np.ndarray]:
    dtype = draw(st.sampled_from(["float32", "float64", "int16", "int64", "uint8", "bool"]))
    shape = draw(st.sampled_from([(length,), (length, 3), (length, 2, 2)]))
    values = draw(st.integers(0, 255))
    return draw(st.sampled_from([{}, {"extra": np.full(shape, values).astype(dtype)}]))


@st.composite
def steps(draw, source: Source, lengths: list[int], append_only: bool) -> Step:
    parent = -1 if not lengths else len(lengths) - 1 if append_only else draw(st.integers(-1, len(lengths) - 1))
    whole = 0 if parent < 0 else lengths[parent]
    prefix = whole if append_only else draw(st.sampled_from([whole, draw(st.integers(0, whole))]))
    context = ids_array(draw(st.lists(ids, min_size=0 if prefix else 1, max_size=4)))
    action = ids_array(draw(st.lists(ids, max_size=4)))
    sampled = len(action) if source == Source.POLICY else 0
    return Step(
        parent=parent,
        prefix_len=prefix,
        context_ids=context,
        context_spans=draw(spans(len(context), ContextKind)),
        action_ids=action,
        action_logprobs=np.asarray(draw(st.lists(st.floats(-30, 0, width=32), min_size=sampled, max_size=sampled)), np.float32),
        action_spans=draw(spans(len(action), ActionKind)),
        versions=draw(version_runs(sampled)),
        kind=draw(st.sampled_from(StepKind)),
        reward=draw(numbers),
        finish=Finish.STOP if len(action) else Finish.LENGTH,
        tool_outcomes=tuple(draw(st.lists(outcomes, max_size=2))),
        timings=draw(st.dictionaries(texts, seconds, max_size=2)),
        state_key=draw(st.binary(max_size=8)),
        extras=draw(extras(len(action))),
    )


@st.composite
def trajectories(draw, append_only: bool = False) -> Trajectory:
    source = draw(st.sampled_from(Source))
    chosen: list[Step] = []
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        step = draw(steps(source, lengths, append_only))
        chosen.append(step)
        lengths.append(step.prefix_len + len(step.context_ids) + len(step.action_ids))
    tail = ids_array(draw(st.lists(ids, max_size=3)))
    return Trajectory(
        rollout_id=draw(names),
        attempt=draw(st.integers(0, 2**31 - 1)),
        group_id=draw(names),
        task=Task(draw(names), draw(names), draw(st.integers(-(2**63), 2**63 - 1)), draw(json_values)),
        source=source,
        steps=tuple(chosen),
        tail_ids=tail,
        tail_spans=draw(spans(len(tail), ContextKind)),
        status=Status.TRUNCATED,
        flags=tuple(draw(st.lists(texts, max_size=2))),
        metrics=draw(st.dictionaries(texts, numbers, max_size=2)),
        sampling=Sampling(draw(st.floats(0, 2)), draw(st.integers(1, 4096)), tuple(draw(st.lists(texts, max_size=2))), (1, 2), 7),
    )


def step(context: Sequence[int], action: Sequence[int], parent: int = -1, prefix_len: int = 0, **changes) -> Step:
    """A sampled turn by version 1."""
    made = Step(
        parent=parent,
        prefix_len=prefix_len,
        context_ids=ids_array(context),
        context_spans=spans_of([(len(context), ContextKind.OBSERVATION)]),
        action_ids=ids_array(action),
        action_logprobs=np.full(len(action), -0.5, np.float32),
        action_spans=spans_of([(len(action), ActionKind.TEXT)]),
        versions=(VersionRun(0, 1, "engine-0", "main"),) if len(action) else (),
        kind=StepKind.ACT,
        reward=0.0,
        finish=Finish.STOP,
    )
    return dataclasses.replace(made, **changes)


def trajectory(*made: Step, tail: Sequence[int] = (), **changes) -> Trajectory:
    """A terminated rollout of the policy."""
    out = Trajectory(
        rollout_id="1-g000000-0",
        attempt=0,
        group_id="1-g000000",
        task=Task("frozenlake", "train-0", 3, {"size": 4}),
        source=Source.POLICY,
        steps=made,
        tail_ids=ids_array(tail),
        tail_spans=spans_of([(len(tail), ContextKind.OBSERVATION)]),
        status=Status.TERMINATED,
        flags=(),
        metrics={},
        sampling=Sampling(1.0, 16),
    )
    return dataclasses.replace(out, **changes)


def difference(a, b, where: str = "record") -> str:
    """The first field in which two records differ, "" when they are equal. Types and dtypes count."""
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if dataclasses.is_dataclass(a):
        pairs = [(f"{where}.{f.name}", getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
    elif isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
        return "" if same else f"{where}: {a!r} and {b!r}"
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(a)} and {sorted(b)}"
        pairs = [(f"{where}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, tuple | list):
        if len(a) != len(b):
            return f"{where}: lengths {len(a)} and {len(b)}"
        pairs = [(f"{where}[{index}]", x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return "" if a == b else f"{where}: {a!r} and {b!r}"
    return next(filter(None, (difference(x, y, name) for name, x, y in pairs)), "")
