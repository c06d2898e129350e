"""Losses of single tokens, and the one shift."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.types import Status
from learner.losses import (
    before,
    cispo,
    clipped_mae,
    cross_entropy,
    double_sided,
    dual_clip,
    log_ratio,
    ppo_clip,
    reinforce,
    sequence_log_ratio,
    token_logprobs,
    value_loss,
)
from learner.shaping import compactly_filtered, soft_overlong
from tests.learner_math.build import chain, rollout


def identity(states):
    """A vocabulary head for hidden states that are logits already."""
    return states


compiled_logprobs = jax.jit(partial(token_logprobs, identity), static_argnames="chunk")


def logprobs_of(hidden, ids, mask, temperature=1.0, chunk=4):
    ids, mask = jnp.array([ids]), jnp.array([mask], bool)
    hot = jnp.full(ids.shape, temperature, jnp.float32)
    found, entropy = compiled_logprobs(jnp.array([hidden], jnp.float32), ids, mask, hot, chunk=chunk)
    return np.asarray(found[0]), np.asarray(entropy[0])


def test_a_wrong_shape_fails():
    """The checks would be silently off if a tool stripped the quotes of the shapes."""
    with pytest.raises(Exception, match="advantages"):
        ppo_clip(jnp.ones(3), jnp.ones(4), 0.2, 0.2)
    with pytest.raises(Exception, match="ids"):
        token_logprobs(identity, jnp.ones((1, 3, 5)), jnp.zeros((1, 4), int), jnp.ones((1, 3), bool), jnp.ones((1, 3)))
    with pytest.raises(Exception, match="temperature"):
        token_logprobs(identity, jnp.ones((1, 3, 5)), jnp.zeros((1, 3), int), jnp.ones((1, 3), bool), jnp.ones((2, 3)))


def test_before_moves_by_one():
    assert before(jnp.array([[1.0, 2, 3], [4, 5, 6]])).tolist() == [[0, 1, 2], [0, 4, 5]]


def test_009_a_trained_token_is_predicted_by_the_state_before_it():
    """Field bug 009. Ids 12 7 2, mask 0 1 1: exactly (row 0 → 7) and (row 1 → 2) are trained."""
    hidden = np.zeros((3, 16), np.float32)
    hidden[1, 2] = 3.0  # row 1 predicts id 2

    def loss(hidden):
        found, _ = token_logprobs(
            identity, hidden[None], jnp.array([[12, 7, 2]]), jnp.array([[False, True, True]]), jnp.ones((1, 3)), 2
        )
        return -found.sum()

    gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(hidden)))
    assert gradient.any(axis=1).tolist() == [True, True, False]
    assert gradient.argmin(axis=1)[:2].tolist() == [7, 2]
    np.testing.assert_allclose(gradient[0], np.full(16, 1 / 16) - np.eye(16)[7], atol=1e-6)


def test_061_logprob_i_is_of_id_i():
    """Vocabulary 8, logits 1 at the next id: log(e / (e + 7)) = -1.274009; a shift would give -log(e + 7) = -2.274009."""
    ids = [7, 3, 5, 2]
    hidden = np.zeros((4, 8))
    hidden[np.arange(3), ids[1:]] = 1
    found, _ = logprobs_of(hidden, ids, [0, 0, 1, 1])
    np.testing.assert_allclose(found, [0, 0, -1.274009, -1.274009], atol=1e-6)
    twice, _ = logprobs_of(np.tile(hidden, (2, 1)), ids * 2, [0, 0, 1, 1] * 2)
    np.testing.assert_allclose(twice, np.tile(found, 2), atol=1e-6)


def test_059_temperature_divides_the_logits():
    hidden = np.array([[2.0, 1, 0]] * 4)
    for heat, expected in {
        1.0: [-0.407606, -1.407606, -2.407606],
        0.5: [-0.142932, -2.142932, -4.142932],
        2.0: [-0.680270, -1.180270, -1.680270],
    }.items():
        found, _ = logprobs_of(hidden, [0, 0, 1, 2], [0, 1, 1, 1], heat)
        np.testing.assert_allclose(found[1:], expected, atol=1e-6)


def head_of(kernel):
    return lambda states: states @ kernel


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_token_logprobs_are_the_plain_definition_in_any_chunks(chunk):
    """Against log-softmax of every row; the gradient too, with logprobs and entropies weighted at random."""
    rng, heat = np.random.default_rng(chunk), 0.7
    ids, mask = jnp.asarray(rng.integers(0, 6, (2, 5))), rng.random((2, 5)) < 0.5
    mask[:, 0] = False
    weights = jnp.asarray(rng.normal(size=(2, 2, 5)), jnp.float32)

    def chunked(hidden, kernel):
        return token_logprobs(head_of(kernel), hidden, ids, jnp.asarray(mask), jnp.full((2, 5), heat, jnp.float32), chunk)

    def plain(hidden, kernel):
        rows = jax.nn.log_softmax(hidden @ kernel / heat)[:, :-1]
        found = jnp.take_along_axis(rows, ids[:, 1:, None], -1)[..., 0]
        entropy = -(jnp.exp(rows) * rows).sum(-1)
        return tuple(jnp.where(mask, jnp.pad(x, ((0, 0), (1, 0))), 0) for x in (found, entropy))

    def both(function):
        def total(*arguments):
            found = function(*arguments)
            return sum((w * x).sum() for w, x in zip(weights, found, strict=True)), found

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    compiled, expected = both(chunked), both(plain)
    for _ in range(5):
        arguments = jnp.asarray(rng.normal(size=(2, 5, 4)), jnp.float32), jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
        own, want = compiled(*arguments), expected(*arguments)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), own, want)
        assert all((np.asarray(x)[~mask] == 0).all() for x in own[0][1])


def test_entropy_golden():
    _, entropy = logprobs_of(np.zeros((2, 8)), [0, 0], [0, 1])
    np.testing.assert_allclose(entropy, [0, np.log(8)], atol=1e-6)


def test_ppo_clip_golden():
    """Bounds .2 and .28. Only the pessimistic side is clipped, and a clipped token has no gradient."""
    ratios = jnp.array([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
    np.testing.assert_allclose(ppo_clip(ratios, advantages, 0.2, 0.28), [-1.28, 1.5, -0.5, 0.8, -2.2], rtol=1e-6)
    gradient = jax.grad(lambda r: ppo_clip(r, advantages, 0.2, 0.28).sum())(ratios)
    np.testing.assert_allclose(gradient, [0, 1, -1, 0, -2])


def test_ppo_clip_is_never_better_than_unclipped():
    rng = np.random.default_rng(0)
    ratios, advantages = jnp.asarray(np.exp(rng.normal(size=200)), jnp.float32), jnp.asarray(rng.normal(size=200), jnp.float32)
    assert (ppo_clip(ratios, advantages, 0.2, 0.28) >= -advantages * ratios).all()


def test_on_policy_the_gradient_is_reinforce():
    logprobs, advantages = jnp.array([-1.0, -2.0, -0.5]), jnp.array([1.0, -2.0, 0.5])
    gradient = jax.grad(lambda x: ppo_clip(jnp.exp(log_ratio(x, logprobs)), advantages, 0.2, 0.28).sum())(logprobs)
    np.testing.assert_allclose(gradient, -advantages)


def test_the_ratio_is_bounded():
    ratios = log_ratio(jnp.array([-1.0, -200.0, -1.0]), jnp.array([-200.0, -1.0, -1.5]))
    np.testing.assert_allclose(ratios, [20, -20, 0.5])
    gradient = jax.grad(lambda mu: log_ratio(jnp.array([-1.0]), mu).sum())(jnp.array([-1.5]))
    assert gradient.tolist() == [0]  # the behaviour policy is data


def test_058_value_clipping_golden():
    """Old .5, new .9, clip .2. R=1: ½·max(.1², .3²) = .045, flat. R=0: ½·max(.9², .7²) = .405, slope .9."""
    for target, loss, slope in ((1.0, 0.045, 0.0), (0.0, 0.405, 0.9)):
        arguments = jnp.array([0.5]), jnp.array([target])
        np.testing.assert_allclose(value_loss(jnp.array([0.9]), *arguments, 0.2), [loss], rtol=1e-5)
        gradient = jax.grad(lambda v, a=arguments: value_loss(v, *a, 0.2).sum())(jnp.array([0.9]))
        np.testing.assert_allclose(gradient, [slope], rtol=1e-5)
    np.testing.assert_allclose(value_loss(jnp.array([0.9]), jnp.array([0.5]), jnp.array([1.0]), 0.0), [0.005], rtol=1e-4)


def test_cross_entropy_is_minus_logprob():
    assert cross_entropy(jnp.array([-0.5, -2.0])).tolist() == [0.5, 2.0]


def test_reinforce_is_minus_advantage_times_logprob():
    assert reinforce(jnp.array([-1.0, -2.0]), jnp.array([2.0, -0.5])).tolist() == [2.0, -1.0]


def test_053_off_policy_data_is_clipped():
    """Behaviour .2, current .3: ratio 1.5. A = 1: -1.2, flat; A = -1: 1.5, with a slope."""
    old, own = jnp.log(jnp.array([0.2])), jnp.log(jnp.array([0.3]))
    for gain, loss, slope in ((1.0, -1.2, 0.0), (-1.0, 1.5, 1.5)):

        def total(logprobs, gain=gain):
            return ppo_clip(jnp.exp(log_ratio(logprobs, old)), jnp.array([gain]), 0.2, 0.2).sum()

        assert float(total(own)) == pytest.approx(loss, rel=1e-6)
        assert jax.grad(total)(own)[0] == pytest.approx(slope, rel=1e-6)


def test_dual_clip_golden():
    """A = -1 at ratio 5 is a loss of 5, held at 3; at 2 it is 2; a good token is left alone."""
    ratios, gains = jnp.array([5.0, 2.0, 5.0]), jnp.array([-1.0, -1.0, 1.0])
    losses = ppo_clip(ratios, gains, 0.2, 0.28)
    np.testing.assert_allclose(dual_clip(losses, gains, 3.0), [3, 2, -1.28], rtol=1e-6)
    gradient = jax.grad(lambda r: dual_clip(ppo_clip(r, gains, 0.2, 0.28), gains, 3.0).sum())(ratios)
    assert gradient.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("method", "weights"),
    [(cispo, [0.8, 0.9, 1.0, 1.28, 1.28]), (double_sided, [0, 0.9, 1.0, 0, 0])],
)
def test_weighted_reinforce_golden(method, weights):
    """Ratios .5 .9 1 1.3 4, bounds .2 and .28. CISPO keeps the gradient of a clipped token, double-sided masking drops it."""
    logprobs, ratios = jnp.full(5, -2.0), jnp.array([0.5, 0.9, 1.0, 1.3, 4.0])
    for gain in (1.0, -1.0):

        def total(logprobs, gain=gain):
            return method(logprobs, ratios * jnp.exp(logprobs + 2), jnp.full(5, gain), 0.2, 0.28).sum()

        np.testing.assert_allclose(jax.grad(total)(logprobs), -gain * np.array(weights), rtol=1e-6)
        np.testing.assert_allclose(total(logprobs), 2 * gain * sum(weights), rtol=1e-6)


def sequences_of(logprobs, old, of, mask):
    return sequence_log_ratio(logprobs, log_ratio(logprobs, old), jnp.array(of), jnp.array(mask, bool))


def test_gspo_golden():
    """Two sequences in a row: log-ratios .1 and .3 around an answer (mean .2), and -.2 alone; a masked 9 between them."""
    old = jnp.array([-1.0, -1.0, -1.0, -2.0, -3.0])
    own = old + jnp.array([0.1, 9.0, 0.3, -0.2, 5.0])
    of, mask = [1, 1, 1, 2, 0], [1, 0, 1, 1, 0]
    np.testing.assert_allclose(sequences_of(own, old, of, mask), [0.2, 0, 0.2, -0.2, 0], atol=1e-6)
    # the gradient of a token is the sequence's ratio, not its own; each token moves itself alone
    gradient = jax.grad(lambda x: jnp.exp(sequences_of(x, old, of, mask)).sum())(own)
    np.testing.assert_allclose(gradient, [np.exp(0.2), 0, np.exp(0.2), np.exp(-0.2), 0], atol=1e-5)
    sick = jnp.where(jnp.array(mask, bool), own, jnp.nan)
    np.testing.assert_array_equal(sequences_of(sick, old, of, mask), sequences_of(own, old, of, mask))
    assert jax.grad(lambda x: sequences_of(x, old, of, mask).sum())(sick).tolist() == [1, 0, 1, 1, 0]
    assert float(sequences_of(old + 15, old, of, mask)[0]) == 10


def test_gspo_of_one_token_is_ppo():
    old, own, gains = jnp.array([-1.0, -2.0]), jnp.array([-0.9, -2.5]), jnp.array([1.0, -1.0])

    def losses(x, logs):
        return ppo_clip(jnp.exp(logs(x)), gains, 0.2, 0.2).sum()

    sequence, token = (lambda x: sequences_of(x, old, [0, 1], [1, 1])), (lambda x: log_ratio(x, old))
    for mine, plain in zip(*(jax.value_and_grad(losses)(own, logs) for logs in (sequence, token)), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-6)


@pytest.mark.parametrize("method", [cispo, double_sided, "ppo_clip", "gspo", "dual_clip"])
def test_on_policy_every_gradient_is_reinforce(method):
    logprobs, gains = jnp.array([-1.0, -2.0, -0.5]), jnp.array([1.0, -2.0, 0.5])

    def total(x):
        logs = log_ratio(x, logprobs)
        if method == "gspo":
            logs = sequence_log_ratio(x, logs, jnp.zeros(3, int), jnp.ones(3, bool))
        if not isinstance(method, str):
            return method(x, jnp.exp(logs), gains, 0.2, 0.28).sum()
        losses = ppo_clip(jnp.exp(logs), gains, 0.2, 0.28)
        return (dual_clip(losses, gains, 3.0) if method == "dual_clip" else losses).sum()

    np.testing.assert_allclose(jax.grad(total)(logprobs), jax.grad(lambda x: reinforce(x, gains).sum())(logprobs), rtol=1e-6)


def test_clipped_mae_stops_at_its_bound():
    """1 - .05 = .95 with slope -p; at p = .5, past .2, .8 and flat."""
    logprobs = jnp.log(jnp.array([0.05, 0.5]))
    np.testing.assert_allclose(clipped_mae(logprobs, 0.2), [0.95, 0.8], rtol=1e-6)
    gradient = jax.grad(lambda x: clipped_mae(x, 0.2).sum())(logprobs)
    np.testing.assert_allclose(gradient, [-0.05, 0], rtol=1e-5)


def test_soft_overlong_golden():
    """Limit 20, cache 4: nothing to 16 tokens, then a quarter each, -1 from 20 on."""
    assert [soft_overlong(n, 20, 4) for n in (0, 16, 17, 18, 20, 21, 99)] == [0, 0, -0.25, -0.5, -1, -1, -1]
    assert soft_overlong(18_432, 20_480, 4_096) == -0.5  # DAPO's own


def test_compact_filtering_is_of_rollouts_that_a_limit_ended():
    ended = rollout(chain([([1], [2], 1.0)]))
    assert not compactly_filtered(ended)
    assert compactly_filtered(replace(ended, status=Status.TRUNCATED))


@pytest.mark.parametrize("answer", [0, 3, 40])
def test_057_entropy_is_of_sampled_tokens_alone(answer):
    """Vocabulary 4, uniform at two sampled tokens: ln 4 each, however long the certain answer between them, and the padding."""
    hidden = np.zeros((answer + 8, 4))
    hidden[2 : 2 + answer, 1] = 50  # rows that predict the answer, and padding
    hidden[answer + 4 :, 1] = 50
    mask = [t in (1, answer + 3) for t in range(answer + 8)]
    _, entropy = logprobs_of(hidden, [1] * (answer + 8), mask)
    assert entropy[mask].tolist() == pytest.approx([np.log(4)] * 2)
    assert entropy.sum() == pytest.approx(2 * np.log(4))
