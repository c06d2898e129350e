"""Losses of single tokens, and the one shift."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.losses import before, cross_entropy, log_ratio, ppo_clip, token_logprobs, value_loss


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
