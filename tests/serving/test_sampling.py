"""Sampling from logits: the distribution, the edges, independence of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.serving.sampling import _invert, sample

invert = jax.jit(_invert)
invert_rows = jax.jit(jax.vmap(_invert))
sample_rows = jax.jit(sample)


def slow_invert(probabilities, uniform):
    """The first token whose cumulative probability exceeds the uniform number, in float64."""
    total = 0.0
    for token, probability in enumerate(probabilities):
        total += float(probability)
        if total > uniform * float(np.sum(probabilities, dtype=np.float64)):
            return token
    raise AssertionError("uniform is not below 1")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**24 - 1).map(lambda n: n / 2**24))
def test_inversion_is_the_slow_definition_up_to_rounding(seed, uniform):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(200, 0.05)).astype(np.float32)
    token = int(invert(probabilities, np.float32(uniform)))
    cumulative = np.cumsum(probabilities.astype(np.float64))
    assert probabilities[token] > 0
    assert cumulative[token] + 1e-6 > uniform > cumulative[token] - probabilities[token] - 1e-6
    if abs(cumulative - uniform).min() > 1e-6:
        assert token == slow_invert(probabilities, uniform)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 69), (0.75, 130), (0.99999994, 130)])
def test_inversion_golden(uniform, token):
    """0.25 on token 1, 0.5 on 69, 0.25 on 130: three blocks of 64, with tokens of probability 0 at every edge."""
    probabilities = np.zeros(131, np.float32)
    probabilities[[1, 69, 130]] = 0.25, 0.5, 0.25
    assert int(invert(probabilities, np.float32(uniform))) == token


def test_a_number_on_the_edge_of_a_block_never_gives_a_token_without_probability():
    """Block sums and running sums round differently: 0 tokens end each block, and the target is where it ends."""
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(200, 0.3), 500).astype(np.float32)
    probabilities[:, 50:64] = 0
    probabilities[:, 110:128] = 0
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    edges = np.cumsum(probabilities.astype(np.float64), axis=1)[:, 63].astype(np.float32)
    for uniforms in (edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1))):
        tokens = np.asarray(invert_rows(probabilities, uniforms))
        assert (probabilities[np.arange(500), tokens] > 0).all()


def test_frequencies_are_the_softmax_at_the_temperature():
    """20,000 draws of 5 tokens: every frequency within 5 standard deviations of its probability."""
    logits, temperature, draws = np.array([1.0, 0.0, -1.0, 2.0, 0.5], np.float32), 0.7, 20_000
    ids, logprobs = sample_rows(
        jnp.tile(logits, (draws, 1)),
        np.arange(draws, dtype=np.uint32),
        np.full(draws, 9),
        np.full(draws, temperature, np.float32),
    )
    probabilities = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    counts = np.bincount(np.asarray(ids), minlength=5) / draws
    assert (abs(counts - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities) / draws)).all()
    np.testing.assert_allclose(np.exp(logprobs), probabilities[np.asarray(ids)], rtol=1e-5)


def test_positions_of_one_seed_are_independent_draws():
    """Two equal tokens, one seed, 4,000 positions: neighbours agree in half of the cases (5 sigma: 0.04)."""
    count = 4_000
    ids, _ = sample_rows(jnp.zeros((count, 2)), np.full(count, 3, np.uint32), np.arange(count), np.ones(count, np.float32))
    assert abs(np.mean(np.asarray(ids)[1:] == np.asarray(ids)[:-1]) - 0.5) < 0.04


def test_greedy_logprob_is_unscaled():
    """softmax([0, ln 3]) = [1/4, 3/4]."""
    ids, logprobs = sample_rows(
        np.log([[1.0, 3.0]]).astype(np.float32), np.zeros(1, np.uint32), np.zeros(1, int), np.zeros(1, np.float32)
    )
    assert ids.tolist() == [1]
    np.testing.assert_allclose(logprobs, [np.log(0.75)], rtol=1e-6)
