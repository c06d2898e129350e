"""Packing and the weights of tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.record import segments
from common.types import ContextKind, spans_of
from learner.advantages import grpo
from learner.examples import observations
from learner.losses import log_ratio, ppo_clip
from learner.pack import Aggregation, PackError, Shape, pack, token_weights
from tests.learner_math import build


def example(rollout, ids, mask, advantage=0.0, logprob=-1.0):
    numbers = {"old_logprobs": logprob, "reference": -3.0, "advantages": advantage, "returns": 0.5, "old_values": 0.25}
    return build.example(rollout, ids, mask, **{n: np.where(mask, x, 0).astype(np.float32) for n, x in numbers.items()})


def acting(rollout, actions, length, advantage=0.0):
    """`length` tokens of which the last `actions` are trained."""
    return example(rollout, np.arange(length), np.arange(length) >= length - actions, advantage)


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_example_lies_somewhere_whole_and_alone(lengths, rows):
    examples = [example(f"r{i}", np.arange(n) + 100 * i, np.arange(n) % 2, i) for i, n in enumerate(lengths)]
    packed = pack(examples, Shape(10, rows), Aggregation(), keep_tails=True)
    for field in ("ids", "mask", "old_logprobs", "reference", "advantages", "returns", "old_values"):
        for own, found in zip(examples, packed.read([getattr(b, field) for b in packed.microbatches]), strict=True):
            np.testing.assert_array_equal(getattr(own, field), found)
    for own, found in zip(examples, packed.read([b.positions for b in packed.microbatches]), strict=True):
        np.testing.assert_array_equal(found, np.arange(len(own.ids)))
    segments = packed.read([b.segment_ids for b in packed.microbatches])
    assert all(len(set(found.tolist())) == 1 and found[0] > 0 for found in segments)
    taken = {(p.microbatch, p.row, s[0]) for p, s in zip(packed.places, segments, strict=True)}
    assert len(taken) == len(examples)  # no two share a segment id in a row
    assert sum((b.segment_ids > 0).sum() for b in packed.microbatches) == sum(lengths)
    for batch in packed.microbatches:
        assert batch.ids.shape == (rows, 10)
        assert not batch.mask[batch.segment_ids == 0].any()
        assert not batch.weights[~batch.mask].any()
        assert (batch.temperature > 0).all()
    total = sum(b.weights.sum(dtype=float) for b in packed.microbatches)
    assert total == pytest.approx(1.0 if packed.trained else 0.0, abs=1e-5)


def test_rows_are_filled_before_new_ones_are_begun():
    packed = pack([acting(str(n), 1, n) for n in (3, 6, 4, 7)], Shape(10, 2), Aggregation())
    assert len(packed.microbatches) == 1  # 7 + 3, 6 + 4
    assert (packed.microbatches[0].segment_ids > 0).all()


def test_008_token_values_never_decide_what_is_valid():
    """Field bug 008. No end token; pad id = end id = 2; end id in the middle: the mask is the record's, as long as it is."""
    cases = [([9, 5, 6, 7], [0, 1, 1, 1]), ([9, 5, 2], [0, 1, 1]), ([0, 2, 5, 2], [0, 1, 1, 1]), ([0, 0, 0], [0, 1, 1])]
    packed = pack([example(str(i), *case) for i, case in enumerate(cases)], Shape(5, 4), Aggregation())
    for (ids, mask), place in zip(cases, packed.places, strict=True):
        row = packed.microbatches[0].mask[place.row]
        assert row.tolist() == [bool(m) for m in mask] + [False] * (5 - len(ids))


def test_context_that_does_not_fit_is_cut_and_an_action_is_not():
    fits = example("a", range(8), [0, 0, 1, 1, 0, 0, 0, 0])
    packed = pack([fits], Shape(5, 1), Aggregation(), keep_tails=True)
    assert (packed.cut, packed.trained, packed.places[0].length) == (3, 2, 5)
    packed = pack([fits], Shape(5, 1), Aggregation())  # a loss has no use for what follows the last trained token
    assert (packed.cut, packed.trained, packed.places[0].length) == (0, 2, 4)
    with pytest.raises(PackError, match=r"rollout long needs rows of 7 tokens; set learner\.row_length 5 at least so high"):
        pack([example("long", range(8), [0, 0, 1, 1, 0, 0, 1, 0])], Shape(5, 1), Aggregation())


def test_a_rollout_in_two_segments_counts_once():
    """Rollout a: 1 + 3 tokens, b: 2. Sequence means: 1/(2·4) each in both segments of a, 1/(2·2) in b."""
    examples = [acting("a", 1, 3), acting("a", 3, 5), acting("b", 2, 4), acting("c", 0, 4)]
    assert token_weights(examples, Aggregation("seq_mean_token_mean"))[:3] == [1 / 8, 1 / 8, 1 / 4]
    assert token_weights(examples, Aggregation("token_mean"))[:3] == [1 / 6] * 3
    assert token_weights(examples, Aggregation("constant", 10.0))[:3] == [1 / 20] * 3


def test_value_weights_are_a_token_mean_whatever_the_policy_does():
    packed = pack([acting("a", 1, 3), acting("b", 3, 5)], Shape(8, 1), Aggregation("constant", 100.0))
    assert packed.microbatches[0].value_weights[packed.microbatches[0].mask].tolist() == [0.25] * 4


# Rollouts of 2, 3 and 5 action tokens with rewards 1, 0, 0. Their whole lengths decide which rows they get, and so the
# split into micro-batches: longest first, `rows` to a micro-batch.
SPLITS = {
    "1|2,3": ((7, 8, 8), 2),
    "1,2|3": ((8, 8, 7), 2),
    "1|2|3": ((8, 8, 8), 1),
    "all": ((8, 8, 8), 3),
}


@jax.jit
@jax.value_and_grad
def loss_and_gradient(logprobs, batch):
    return jnp.sum(batch.weights * ppo_clip(jnp.exp(log_ratio(logprobs, batch.old_logprobs)), batch.advantages, 0.2, 0.28))


def loss_and_slopes(advantages, aggregation, lengths, rows, order=(0, 1, 2), width=8):
    """Σ weight · loss over micro-batches at ratio 1, and d loss / d logprob of one token of each rollout."""
    actions = (2, 3, 5)
    examples = [acting(str(i), actions[i], lengths[i], advantages[i]) for i in order]
    packed = pack(examples, Shape(width, rows), aggregation)

    found = [loss_and_gradient(jnp.asarray(batch.old_logprobs), batch) for batch in packed.microbatches]
    by_rollout = dict(zip(order, packed.read([np.asarray(gradient) for _, gradient in found]), strict=True))
    return sum(float(loss) for loss, _ in found), [by_rollout[i][-1] for i in range(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("split", SPLITS)
def test_047_one_denominator_however_the_step_is_split(split, order):
    """Advantages of 1, 0, 0 with population std √2/3: √2, -1/√2, -1/√2.

    Token mean: -(2·√2 - 3/√2 - 5/√2)/10 = +.282843. Sequence means: each rollout's mean is its advantage: 0.
    Constant 8, A = R - mean: -(2·2/3 - 3/3 - 5/3)/(3·8) = +.055556.
    """
    lengths, rows = SPLITS[split]
    normal = np.asarray(grpo(jnp.array([1.0, 0, 0]), jnp.ones(3, bool), ddof=0))
    centred = np.array([2 / 3, -1 / 3, -1 / 3])
    for advantages, aggregation, loss, slopes in (
        (normal, Aggregation("token_mean"), 0.282843, [-0.141421, 0.070711, 0.070711]),
        (normal, Aggregation("seq_mean_token_mean"), 0.0, [-0.235702, 0.078567, 0.047140]),
        (centred, Aggregation("constant", 8.0), 0.055556, [-0.027778, 0.013889, 0.013889]),
    ):
        got, own = loss_and_slopes(advantages, aggregation, lengths, rows, order)
        assert got == pytest.approx(loss, abs=1e-5)
        np.testing.assert_allclose(own, slopes, atol=1e-5)


@pytest.mark.parametrize("width", [8, 11, 16])
def test_048_the_constant_divisor_knows_no_width(width):
    got, _ = loss_and_slopes([2 / 3, -1 / 3, -1 / 3], Aggregation("constant", 8.0), (8, 8, 8), 2, width=width)
    assert got == pytest.approx(0.055556, abs=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_050_rows_without_a_trained_token_add_nothing(rows):
    """Two tokens of loss 3 and a row without any: 3, however they are split. Nothing at all is 0, not NaN."""
    both = [acting("a", 2, 6, -3.0), acting("b", 0, 6)]
    for aggregation in (Aggregation("token_mean"), Aggregation("seq_mean_token_mean"), Aggregation("constant", 2.0)):
        packed = pack(both, Shape(6, rows), aggregation)
        assert sum((-b.weights * b.advantages).sum() for b in packed.microbatches) == pytest.approx(3.0)
        empty = pack([acting("b", 0, 6)], Shape(6, rows), aggregation)
        assert (empty.trained, empty.microbatches[0].weights.sum()) == (0, 0)
    assert pack([], Shape(6, rows), Aggregation()).trained == 0


def test_038_rows_of_equal_reward_stay_in_the_denominator():
    """Groups 1,1 and 1,0, one token each: A = 0, 0, 1, -1; each token weighs a quarter."""
    examples = [acting(str(i), 1, 3, a) for i, a in enumerate((0.0, 0.0, 1.0, -1.0))]
    assert token_weights(examples, Aggregation()) == [0.25] * 4


def observing(rollout, kinds, answers):
    """s: sampled, o: observed, anything else: context."""
    mask, observed = ([kind == which for kind in kinds] for which in "so")
    return build.example(rollout, np.arange(len(kinds)), mask, observed=np.array(observed), answers=answers)


def test_observations_have_a_denominator_of_their_own():
    """Rollout a: targets 2 and 1 in two segments, and a notice: 4 answers; b: 1 of 1; c has none. Coefficient .5 of 2 rollouts:
    .5/(2·4) and .5/(2·1), whatever the policy's loss is. Tails are kept for it, and a target has temperature 1."""
    examples = [observing("a", "cssoo", 3), observing("a", "cso", 1), observing("b", "cso", 1), observing("c", "cscc", 0)]
    for aggregation in (Aggregation(observations=0.5), Aggregation("constant", 9.0, policy=0.0, observations=0.5)):
        packed = pack(examples, Shape(8, 2), aggregation)
        found = packed.read([batch.observed_weights for batch in packed.microbatches])
        assert [x.tolist() for x in found] == [[0, 0, 0, 1 / 16, 1 / 16], [0, 0, 1 / 16], [0, 0, 0.25], [0, 0, 0, 0]]
    assert not sum(batch.weights.sum() for batch in packed.microbatches)
    heat = packed.read([batch.temperature for batch in packed.microbatches])
    np.testing.assert_allclose(heat[0], [0.7, 0.7, 0.7, 1, 1], rtol=1e-6)
    off = pack(examples, Shape(8, 2), Aggregation())
    assert [place.length for place in off.places] == [3, 2, 2, 2]
    assert not sum(batch.observed_weights.sum() for batch in off.microbatches)


def test_a_sum_over_tokens_counts_rollouts():
    examples = [acting("a", 1, 3), acting("a", 3, 5), acting("b", 2, 4), acting("c", 0, 4)]
    assert token_weights(examples, Aggregation("seq_mean_token_sum")) == [0.5] * 4
    assert token_weights(examples, Aggregation("seq_mean_token_sum", policy=0.5)) == [0.25] * 4


def test_targets_are_what_the_environment_said():
    """Task, a turn, an answer with a notice, a turn in a rewritten context that shows the first again, and the tail: each answer
    is a target once, notices count in the length only, and a token with nothing before it is no target."""
    turns = [build.turn([1, 2], [3]), build.turn([4, 5], [6], 0.0, 0, 3), build.turn([9], [7], 1.0, 1, 2)]
    kinds = [[(2, ContextKind.TASK)], [(1, ContextKind.OBSERVATION), (1, ContextKind.NOTICE)], [(1, ContextKind.OBSERVATION)]]
    steps = [replace(step, context_spans=spans_of(own)) for step, own in zip(turns, kinds, strict=True)]
    trajectory = build.rollout(steps, tail=[8, 8])
    found = [observations(segment) for segment in segments(trajectory)]
    assert [own["observed"].tolist() for own in found] == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1]]
    assert [own["answers"] for own in found] == [2, 3]
    alone = build.rollout([build.turn([1], [2])])  # its context is an observation
    assert observations(segments(alone)[0])["observed"].tolist() == [0, 0]
