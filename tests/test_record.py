"""The record: round trips through the wire form, each rule of the validator, segments."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import convert
from common.proto import rl_pb2 as pb
from common.record import ACTION, full_prompt, segment_lengths, segments, sequence
from common.types import (
    Action,
    Assignment,
    ContextKind,
    ContextPolicy,
    EngineInfo,
    Finish,
    Limits,
    Message,
    Observation,
    Sampling,
    Source,
    Spans,
    Status,
    Task,
    ToolCall,
    ToolOutcome,
    VersionRun,
    expand_spans,
    ids_array,
    spans_of,
)
from common.validate import RULES, RecordError, Vocabulary, check, check_lengths, sampled_tokens
from tests.records import ANY_IDS, difference, spans, step, trajectories, trajectory

# ---- round trips ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_a_trajectory_survives_the_wire(record):
    check(record, ANY_IDS)
    assert difference(record, convert.trajectory_parse(convert.trajectory_bytes(record))) == ""


def test_014_ids_are_never_narrowed():
    """Field bug 014, on the wire."""
    ids = [0, 65535, 65536, 151643, 151645, 2**31 - 1]
    record = trajectory(step(ids, ids), tail=ids)
    back = convert.trajectory_parse(convert.trajectory_bytes(record))
    for array in (back.steps[0].context_ids, back.steps[0].action_ids, back.tail_ids):
        assert array.tolist() == ids
        assert array.dtype == np.int32


@pytest.mark.parametrize("bad", [2**31, -1, 2**40])
def test_014_an_id_outside_int32_is_an_error_not_a_wrap(bad):
    with pytest.raises(OverflowError, match=f"token id {bad} is outside"):
        ids_array([5, bad])
    wide = np.asarray([5, bad], np.int64)
    for record in (
        trajectory(step([1], [2], context_ids=wide)),
        trajectory(step([1], [2], action_ids=wide)),
        trajectory(step([1], [2]), tail_ids=wide),
    ):
        with pytest.raises(OverflowError, match=f"token id {bad} is outside"):
            convert.trajectory_bytes(record)


def test_ids_that_are_int32_are_not_copied():
    ids = np.asarray([0, 2**31 - 1], np.int32)
    assert ids_array(ids) is ids
    with pytest.raises(OverflowError, match="token id -1"):
        ids_array(np.asarray([3, -1], np.int32))


def test_arrays_of_another_byte_order_are_read_as_ours():
    message = convert.trajectory_to(trajectory(step([1], [2])))
    message.steps[0].extras["x"].CopyFrom(pb.ArrayMessage(dtype=">i2", shape=[1], data=b"\x01\x02"))
    (array,) = convert.trajectory_from(message).steps[0].extras.values()
    assert (array.tolist(), array.dtype) == ([0x0102], np.dtype("=i2"))


def test_the_other_messages_survive_the_wire():
    call = ToolCall("call-0", "move", {"direction": "left", "n": [1, None]}, "")
    action = Action("I go left", (call, ToolCall("call-1", "", {}, "not JSON")))
    assert difference(action, convert.action_from(convert.action_to(action))) == ""
    outcome = ToolOutcome("move", False, "no such direction", 0.25)
    messages = (Message("tool", "You are at b3.", "call-0"), Message("user", "", ""))
    observation = Observation(messages, 0.5, Status.RUNNING, {"moves": 2.0}, (outcome,), b"\x00key")
    assert difference(observation, convert.observation_from(convert.observation_to(observation))) == ""
    sampling = Sampling(0.7, 16, ("\n",), (151645,), 2**62)
    assignment = Assignment(
        rollout_id="2-g000017-3",
        attempt=1,
        group_id="2-g000017",
        task=Task("frozenlake", "train-7", -1, {"holes": ["b2"]}),
        source=Source.REFERENCE,
        purpose="train",
        limits=Limits(10, 320, 120.0),
        sampling=sampling,
        context=ContextPolicy("append", {"window": 3}),
        stale_share=0.25,
    )
    assert difference(assignment, convert.assignment_from(convert.assignment_to(assignment))) == ""
    engine = EngineInfo("engine-0", "http://127.0.0.1:1", "main", 7, "quarantined", "canary off by 0.3")
    assert difference(engine, convert.engine_from(convert.engine_to(engine))) == ""


def test_bytes_that_are_no_record_are_refused():
    good = convert.trajectory_to(trajectory(step([1], [2])))

    def broken(change) -> bytes:
        message = pb.TrajectoryMessage()
        message.CopyFrom(good)
        change(message)
        return message.SerializeToString()

    def set_extra(message, dtype, shape, data):
        message.steps[0].extras["x"].CopyFrom(pb.ArrayMessage(dtype=dtype, shape=shape, data=data))

    cases = {
        b"\xff\xff": "not a TrajectoryMessage",
        broken(lambda m: setattr(m.steps[0], "action_ids", b"123")): "step 0 action_ids: 3 bytes",
        broken(lambda m: setattr(m.steps[0], "kind", 0)): "step 0: StepKind 0 is unknown",
        broken(lambda m: setattr(m, "status", 99)): "Status 99 is unknown",
        broken(lambda m: setattr(m.task, "payload_json", "{")): "payload of task train-0 is not JSON",
        broken(lambda m: set_extra(m, "<f4", [2], b"1234")): "extras\\['x'\\]",
        broken(lambda m: set_extra(m, "|O", [1], b"12345678")): "extras\\['x'\\]: dtype",
        broken(lambda m: set_extra(m, "nonsense", [1], b"1")): "extras\\['x'\\]: data type",
        broken(lambda m: set_extra(m, "|V0", [1], b"")): "extras\\['x'\\]: dtype",
    }
    for data, words in cases.items():
        with pytest.raises(convert.ConvertError, match=words):
            convert.trajectory_parse(data)


# ---- rules ---------------------------------------------------------------------------------------------------

VOCABULARY = Vocabulary(rows=12, sampleable=10)  # ids 10 and 11 are padding rows: context may hold them, actions not


def good():
    first = step([1, 2, 3], [4, 5])
    return trajectory(first, step([6, 11], [7], parent=0, prefix_len=5, reward=1.0), tail=[8])


def with_step(index, **changes):
    record = good()
    steps = list(record.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(record, steps=tuple(steps))


NAN, FAILED = float("nan"), {"status": Status.FAILED}
BROKEN = {
    "identity": [
        dataclasses.replace(good(), group_id=""),
        dataclasses.replace(good(), attempt=-1),
        dataclasses.replace(good(), task=Task("frozenlake", "", 0, None)),
    ],
    "known_enums": [dataclasses.replace(good(), status=Status.RUNNING), with_step(0, kind=9), with_step(0, finish=0)],
    "has_steps": [dataclasses.replace(good(), steps=())],
    "array_types": [
        with_step(0, context_ids=np.asarray([1, 2, 3], np.int64)),
        with_step(0, action_logprobs=np.asarray([-1, -1], np.float64)),
        dataclasses.replace(good(), tail_ids=np.asarray([8], np.uint16)),
    ],
    "equal_lengths": [
        with_step(0, action_logprobs=np.zeros(3, np.float32)),
        with_step(0, action_logprobs=np.zeros(1, np.float32)),
        with_step(1, extras={"expert": np.zeros((2, 4))}),
    ],
    "parent_and_prefix": [
        with_step(1, prefix_len=6),
        with_step(1, parent=1),
        with_step(0, prefix_len=1),
        trajectory(step([], [4])),
    ],
    "ids_in_vocabulary": [
        with_step(0, action_ids=ids_array([4, 10])),
        with_step(0, context_ids=ids_array([1, 2, 12])),
        dataclasses.replace(good(), tail_ids=ids_array([12])),
        with_step(1, action_ids=np.asarray([-1], np.int32)),
    ],
    "finite_logprobs": [
        with_step(0, action_logprobs=np.asarray([-1, NAN], np.float32)),
        with_step(0, action_logprobs=np.asarray([-np.inf, -1], np.float32)),
        with_step(0, action_logprobs=np.asarray([0.01, -1], np.float32)),
        with_step(1, action_logprobs=np.asarray([np.inf], np.float32)),
    ],
    "versions_cover": [
        with_step(0, versions=()),
        with_step(0, versions=(VersionRun(1, 1, "", ""),)),
        with_step(0, versions=(VersionRun(0, 1, "", ""), VersionRun(2, 2, "", ""))),
        with_step(0, versions=(VersionRun(0, -1, "", ""),)),
    ],
    "spans_cover": [
        with_step(0, context_spans=Spans(np.asarray([1], np.int32), np.asarray([1], np.int32))),
        with_step(0, action_spans=Spans(np.asarray([0, 0], np.int32), np.asarray([1, 2], np.int32))),
        with_step(0, action_spans=Spans(np.asarray([0], np.int32), np.asarray([4], np.int32))),
        dataclasses.replace(good(), tail_spans=spans_of([])),
        with_step(0, context_spans=Spans(np.asarray([0, 1], np.int32), np.asarray([1], np.int32))),
    ],
    "finish_and_status": [
        with_step(0, finish=Finish.ABORT),
        with_step(1, finish=Finish.LENGTH),
        with_step(0, action_ids=ids_array([]), action_logprobs=np.zeros(0, np.float32), action_spans=spans_of([]), versions=()),
    ],
    "finite_rewards": [
        with_step(1, reward=NAN),
        dataclasses.replace(good(), **FAILED),  # it has a reward of 1
    ],
    "sampling": [
        dataclasses.replace(good(), sampling=Sampling(NAN, 16)),
        dataclasses.replace(good(), sampling=Sampling(1.0, 0)),
        dataclasses.replace(good(), sampling=Sampling(-0.1, 16)),
    ],
}
BROKEN["finish_and_status"][2] = dataclasses.replace(
    BROKEN["finish_and_status"][2],
    steps=(BROKEN["finish_and_status"][2].steps[0], dataclasses.replace(good().steps[1], prefix_len=3)),
)


def test_every_rule_has_a_trajectory_that_breaks_it():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize(("rule", "record"), [(rule, record) for rule, records in BROKEN.items() for record in records])
def test_a_broken_record_breaks_exactly_its_rule(rule, record):
    assert [name for name, function in RULES.items() if list(function(record, VOCABULARY))] == [rule]
    with pytest.raises(RecordError, match=f"rollout 1-g000000-0 breaks rule {rule}: ") as raised:
        check(record, VOCABULARY)
    assert raised.value.rule == rule


TOKENS = st.tuples(st.integers(-2, 12), st.sampled_from([-30.0, 0.0, 5e-5, 2e-4, NAN, np.inf, -np.inf]))


@given(st.lists(st.lists(TOKENS, max_size=3), min_size=1, max_size=4))
def test_checking_all_tokens_at_once_is_checking_each(turns):
    """And whatever is wrong is told with its place."""
    steps = []
    for turn in turns:
        ids, logprobs = np.asarray([i for i, _ in turn], np.int32), np.asarray([p for _, p in turn], np.float32)
        steps.append(dataclasses.replace(step([1], [0] * len(turn)), action_ids=ids, action_logprobs=logprobs))
    places = [(at, i, p) for at, turn in enumerate(turns) for i, p in turn]
    out, high = ([f"step {at}" for at, i, p in places if wrong(i, p)] for wrong in (unknown_id, no_logprob))
    for rule, where in (("ids_in_vocabulary", out), ("finite_logprobs", high)):
        told = [detail.split(":")[0].removesuffix(" action") for detail in RULES[rule](trajectory(*steps), VOCABULARY)]
        assert told == list(dict.fromkeys(where))


def unknown_id(token, _):
    return not 0 <= token < VOCABULARY.sampleable


def no_logprob(_, logprob):
    return not -np.inf < logprob <= 1e-4


def test_good_records_pass():
    check(good(), VOCABULARY, versions={1})
    nothing = dataclasses.replace(good(), steps=(), tail_ids=ids_array([]), tail_spans=spans_of([]), **FAILED)
    check(nothing, VOCABULARY)
    bare = {"action_logprobs": np.zeros(0, np.float32), "versions": ()}
    check(trajectory(step([1], [2], **bare), source=Source.REFERENCE), VOCABULARY)
    cut = with_step(1, finish=Finish.LENGTH)
    check(dataclasses.replace(cut, status=Status.TRUNCATED), VOCABULARY)


def test_a_version_that_was_never_published_is_refused():
    with pytest.raises(RecordError, match="version_exists: step 0: version 1 was never published"):
        check(good(), VOCABULARY, versions={2, 3})


def test_002_unequal_lengths_are_refused_by_the_writer_at_once():
    check_lengths(np.zeros(4), np.zeros(4), 2, "1-g000000-0")
    with pytest.raises(RecordError, match="rollout 1-g000000-0 breaks rule equal_lengths: step 2: 4 action ids, 5 logprobs"):
        check_lengths(np.zeros(4), np.zeros(5), 2, "1-g000000-0")


# ---- segments ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_every_sampled_token_stands_in_exactly_one_segment(record):
    rows = segments(record)
    assert sorted(index for row in rows for index in row.steps) == list(range(len(record.steps)))
    assert sum(int(row.action.sum()) for row in rows) == sampled_tokens(record.steps)
    for row in rows:
        assert len({len(x) for x in (row.ids, row.mask, row.action, row.logprobs, row.versions, row.kinds, row.step_of)}) == 1
        policy = record.source == Source.POLICY
        for index in row.steps:
            own = row.step_of == index
            turn = record.steps[index]
            assert row.ids[own].tolist() == turn.action_ids.tolist()
            assert (row.kinds[own] == ACTION).all()
            assert row.mask[own].all() == policy or not own.any()
            if policy:
                assert row.logprobs[own].tolist() == turn.action_logprobs.tolist()
                starts = Spans(np.asarray([r.start for r in turn.versions], np.int32), np.arange(len(turn.versions)))
                runs = expand_spans(starts, len(turn.action_ids))
                assert row.versions[own].tolist() == [turn.versions[r].version for r in runs]
        assert (row.action == (row.step_of >= 0)).all()
        assert not row.logprobs[~row.mask].any()
        assert (row.versions[~row.mask] == -1).all()


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_a_segment_is_what_the_engine_saw(record):
    """The ids of a row are the full sequence of its last step, and the tail where the rollout ends."""
    rows = segments(record)
    assert segment_lengths(record) == [len(row.ids) for row in rows]
    for row in rows:
        last = row.steps[-1]
        whole = sequence(record, last).tolist()
        assert row.ids[: len(whole)].tolist() == whole
        assert row.ids[len(whole) :].tolist() == (record.tail_ids.tolist() if row.tail else [])
        for index in row.steps:
            at = np.flatnonzero(row.step_of == index)
            if len(at):
                assert row.ids[: at[0]].tolist() == full_prompt(record, index).tolist()
        chain = [record.steps[index].parent for index in row.steps[1:]]
        assert chain == list(row.steps[:-1])
    assert sum(row.tail for row in rows) == len(record.tail_ids)


@settings(max_examples=30, deadline=None)
@given(trajectories(append_only=True))
def test_append_only_is_one_segment(record):
    (row,) = segments(record)
    assert row.steps == tuple(range(len(record.steps)))
    kinds = []
    for turn in record.steps:
        kinds += expand_spans(turn.context_spans, len(turn.context_ids)).tolist() + [ACTION] * len(turn.action_ids)
    assert row.kinds.tolist() == kinds + expand_spans(record.tail_spans, len(record.tail_ids)).tolist()


def test_003_a_template_that_drops_reasoning_opens_a_second_segment():
    """Turn 1 samples 8 5 9 7 2, of which 8 5 9 is reasoning; the second prompt shows 7 2 only, as context."""
    first = step([1, 12, 4], [8, 5, 9, 7, 2])
    rewritten = step([7, 2, 13, 4], [7, 2], parent=0, prefix_len=3)
    one, two = segments(trajectory(first, rewritten))
    assert one.ids.tolist() == [1, 12, 4, 8, 5, 9, 7, 2]
    assert one.mask.tolist() == [False] * 3 + [True] * 5
    assert two.ids.tolist() == [1, 12, 4, 7, 2, 13, 4, 7, 2]
    assert two.mask.tolist() == [False] * 7 + [True] * 2
    assert two.kinds[:3].tolist() == [ContextKind.REPLAY] * 3
    appended = step([13, 4], [7, 2], parent=0, prefix_len=8)
    (row,) = segments(trajectory(first, appended))
    assert row.ids.tolist() == [1, 12, 4, 8, 5, 9, 7, 2, 13, 4, 7, 2]
    assert row.mask.tolist() == [False] * 3 + [True] * 5 + [False] * 2 + [True] * 2


def test_001_sampled_ids_are_kept_where_the_tokenizer_would_choose_others():
    """5 6 ("he" "llo") decodes like 7 ("hello"): the next prompt still holds 5 6."""
    record = trajectory(step([1, 13, 4], [5, 6, 2]), step([4, 1], [7, 2], parent=0, prefix_len=6))
    assert full_prompt(record, 1).tolist() == [1, 13, 4, 5, 6, 2, 4, 1]


def test_the_first_whole_child_continues_a_segment_and_a_branch_opens_one():
    root, child = step([1], [2]), step([3], [4], parent=0, prefix_len=2)
    branch = step([5], [6], parent=0, prefix_len=2)
    one, two = segments(trajectory(root, child, branch, tail=[9]))
    assert (one.steps, one.ids.tolist(), one.tail) == ((0, 1), [1, 2, 3, 4], 0)
    assert (two.steps, two.ids.tolist(), two.tail) == ((2,), [1, 2, 5, 6, 9], 1)
    assert two.mask.tolist() == [False, False, False, True, False]  # the inherited 2 was trained in the first


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ContextKind)), max_size=6))
def test_spans_are_the_shortest_runs(runs):
    kinds = [int(kind) for length, kind in runs for _ in range(length)]
    made = spans_of([(length, int(kind)) for length, kind in runs])
    assert expand_spans(made, len(kinds)).tolist() == kinds
    changes = sum(a != b for a, b in itertools.pairwise(kinds))
    assert len(made.starts) == (changes + 1 if kinds else 0)


@given(spans(5, ContextKind))
def test_expanding_spans_covers_every_token(made):
    kinds = expand_spans(made, 5)
    assert kinds.min() >= 1
    assert [int(kinds[at]) for at in made.starts] == made.kinds.tolist()
