"""The forward pass against a slow definition, and what padding, packing, caching and the future must not change.

Dimension key: T tokens, D hidden, H head size.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.qwen3 import CacheWindow, Qwen3
from learner.model.spec import ModelSpec

SPEC = ModelSpec(31, 16, 24, 2, 4, 2, 8, 10_000.0)
WIDTH = 96


def make_model(seed=0, **changes):
    spec = ModelSpec(**{**SPEC.__dict__, **{k: v for k, v in changes.items() if k not in ("dtype", "remat")}})
    options = {k: v for k, v in changes.items() if k in ("dtype", "remat")}
    model = Qwen3(spec, rngs=nnx.Rngs(seed), **options)
    model.embedding[...] = model.embedding[...] * 20
    rng = np.random.default_rng(seed)
    for block in model.blocks:  # scales of 1 would hide a norm that is left out, or put in the wrong place
        for norm in (block.attention_norm, block.mlp_norm, block.attention.q_norm, block.attention.k_norm):
            norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, norm.scale.shape), jnp.float32)
    return model


@cache
def _cached_model():
    return make_model()


@pytest.fixture(scope="module")
def model():
    return _cached_model()


@partial(jax.jit, static_argnums=0)
def _logits(graph, state, ids, positions, segments):
    model = nnx.merge(graph, state)
    return model.logits(model(ids, positions, segments))


def logits(model, ids, positions=None, segments=None):
    """[B, T] -> [B, T, V]; one sequence per row unless told otherwise."""
    ids = np.atleast_2d(np.asarray(ids, np.int32))
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1)) if positions is None else positions
    segments = np.ones_like(ids) if segments is None else segments
    return np.asarray(_logits(nnx.graphdef(model), nnx.state(model), ids, positions.astype(np.int32), segments.astype(np.int32)))


def slow_logits(model, ids):
    """Qwen3 for one sequence, token by token and head by head, in float64: the paper's formulas, no batching, no masks."""
    w = {"/".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    spec = model.spec
    group = spec.num_heads // spec.num_kv_heads

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2) + spec.rms_eps) * w[f"{name}/scale"]

    def rope(x, position):
        half, out = spec.head_dim // 2, np.empty_like(x)
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def part(x, head):
        return x[head * spec.head_dim : (head + 1) * spec.head_dim]

    xs = [w["embedding"][token] for token in ids]
    for layer in range(spec.num_layers):
        p = f"blocks/{layer}"
        keys, values, mixed = [], [], []
        for t, x in enumerate(xs):
            y = norm(x, f"{p}/attention_norm")
            q, k, v = (y @ w[f"{p}/attention/{name}/kernel"] for name in "qkv")
            kv_heads = range(spec.num_kv_heads)
            keys.append([rope(norm(part(k, h), f"{p}/attention/k_norm"), t) for h in kv_heads])
            values.append([part(v, h) for h in kv_heads])
            outs = []
            for head in range(spec.num_heads):
                query = rope(norm(part(q, head), f"{p}/attention/q_norm"), t)
                scores = np.array([query @ keys[s][head // group] / np.sqrt(spec.head_dim) for s in range(t + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                outs.append(sum(weights[s] * values[s][head // group] for s in range(t + 1)))
            mixed.append(x + np.concatenate(outs) @ w[f"{p}/attention/o/kernel"])
        xs = []
        for x in mixed:
            y = norm(x, f"{p}/mlp_norm")
            gate = y @ w[f"{p}/mlp/gate/kernel"]
            xs.append(x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{p}/mlp/up/kernel"])) @ w[f"{p}/mlp/down/kernel"])
    head = w["embedding"].T if spec.tie_embeddings else w["head/kernel"]
    return np.stack([norm(x, "norm") @ head for x in xs])


IDS = [3, 30, 7, 7, 0, 12, 29, 1, 18, 4, 4, 21]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"num_kv_heads": 4}, {"num_kv_heads": 1, "rope_theta": 1e6}])
def test_logits_are_those_of_the_slow_definition(changes):
    model = make_model(2, **changes)
    np.testing.assert_allclose(logits(model, IDS)[0], slow_logits(model, IDS), atol=1e-4)


def test_bfloat16_computes_near_float32_and_returns_float32(model):
    half = nnx.merge(nnx.graphdef(make_model(dtype=jnp.bfloat16)), nnx.state(model))
    out = logits(half, IDS)
    assert out.dtype == np.float32
    assert 0 < abs(out - logits(model, IDS)).max() < 0.2


def test_remat_changes_no_gradient(model):
    ids = jnp.asarray([IDS])

    def loss(graph, state):
        model = nnx.merge(graph, state)
        return jax.nn.logsumexp(model.logits(model(ids, jnp.arange(12)[None], jnp.ones_like(ids)))).sum()

    state, gradients = nnx.state(model), []
    for graph in (nnx.graphdef(model), nnx.graphdef(make_model(remat=True))):
        gradient = jax.grad(partial(loss, graph))
        assert ("remat" in str(jax.make_jaxpr(gradient)(state))) == (graph != nnx.graphdef(model))
        gradients.append(jax.tree.leaves(jax.jit(gradient)(state)))
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


# ---- 063: padding and packing ---------------------------------------------------------------------------

ROWS = [[5, 9, 11, 2], [7, 7, 30, 1, 4, 8, 19], [23, 3, 3, 28, 6, 10, 11, 12, 13, 0, 29]]


def laid_out(pieces, width=WIDTH):
    """ids, positions, segments [1, width] of sequences that start at given columns: [(column, ids), ...]."""
    ids = np.full((1, width), 17, np.int32)  # whatever padding holds must not matter
    positions, segments = np.full((1, width), 41, np.int32), np.zeros((1, width), np.int32)
    for number, (column, row) in enumerate(pieces, 1):
        place = slice(column, column + len(row))
        ids[0, place], positions[0, place], segments[0, place] = row, np.arange(len(row)), number
    return ids, positions, segments


@pytest.mark.parametrize("left", [0, 1, 7, 64])
@pytest.mark.parametrize("row", range(3))
def test_063_padding_changes_nothing(model, row, left):
    """Field record 063: alone, left-padded by 1, 7, 64 and right-padded."""
    alone = logits(model, ROWS[row])[0]
    padded = logits(model, *laid_out([(left, ROWS[row])]))[0, left : left + len(ROWS[row])]
    np.testing.assert_allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("width", [WIDTH, 128])
def test_063_packing_changes_nothing(model, order, width):
    """Field record 063: packed in two orders, with and without gaps, bucketed to two sizes."""
    for gap in (0, 3):
        pieces, column = [], gap
        for row in order:
            pieces.append((column, ROWS[row]))
            column += len(ROWS[row]) + gap
        packed = logits(model, *laid_out(pieces, width))[0]
        for column, row in pieces:
            np.testing.assert_allclose(packed[column : column + len(row)], logits(model, row)[0], atol=1e-5)


def test_063_changing_one_packed_row_leaves_the_others_bit_equal(model):
    columns = [(0, ROWS[0]), (4, ROWS[1]), (11, ROWS[2])]
    before = logits(model, *laid_out(columns))[0]
    after = logits(model, *laid_out([(0, ROWS[0]), (4, [1, 2, 3, 4, 5, 6, 7]), (11, ROWS[2])]))[0]
    np.testing.assert_array_equal(after[:4], before[:4])
    np.testing.assert_array_equal(after[11:22], before[11:22])
    assert abs(after[4:11] - before[4:11]).max() > 0.1


def test_063_positions_are_not_columns(model):
    """The test above would pass if positions were ignored: they are not."""
    ids, positions, segments = laid_out([(0, ROWS[1])])
    assert abs(logits(model, ids, positions * 2, segments) - logits(model, ids, positions, segments)).max() > 0.01


# ---- 064: causality -------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10), st.integers(0, 2**31))
def test_064_the_past_does_not_see_the_future(t, seed):
    """Field record 064: other ids after t leave logits at and before t bit-equal."""
    model = _cached_model()
    changed = np.array(IDS)
    changed[t + 1 :] = np.random.default_rng(seed).integers(0, SPEC.vocab_size, len(IDS) - t - 1)
    np.testing.assert_array_equal(logits(model, changed)[0, : t + 1], logits(model, IDS)[0, : t + 1])


def test_064_the_gradient_of_a_logprob_is_zero_at_later_positions(model):
    """logprob[t] is read at t - 1: its gradient by hidden inputs is 0 from t on, and not 0 before."""
    graph, state = nnx.split(model)
    t = 6

    def logprob(inputs):
        flat = [(path, leaf.replace(inputs) if path == ("embedding",) else leaf) for path, leaf in nnx.to_flat_state(state)]
        ids = jnp.arange(12)[None]  # row i of the embedding is the input of position i
        hidden = nnx.merge(graph, nnx.from_flat_state(flat))(ids, ids, jnp.ones_like(ids))
        return jax.nn.log_softmax(hidden[0, t - 1] @ model.embedding[...].T)[IDS[t]]

    gradient = np.asarray(jax.jit(jax.grad(logprob))(model.embedding[...]))
    assert (gradient[t:] == 0).all()
    assert (abs(gradient[:t]).max(axis=1) > 0).all()


# ---- the cached forward pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 1, 6]])
def test_cached_chunks_equal_the_whole_row(model, cuts):
    """Two rows in slots 2 and 0 of three; the second is two tokens shorter, and its missing tokens are dropped."""
    rows = np.array([IDS, IDS[::-1]], np.int32)
    cache, start, hidden = model.empty_cache(3, 16), 0, []
    forward = nnx.jit(lambda model, ids, cache, slots, positions: model.cached(ids, cache, CacheWindow(slots, positions, 14)))
    for size in cuts:
        positions = np.tile(np.arange(start, start + size), (2, 1))
        positions[1] = np.where(positions[1] < 10, positions[1], 16)
        out, cache = forward(model, rows[:, start : start + size], cache, np.array([2, 0]), positions)
        hidden.append(out)
        start += size
    cached = np.asarray(model.logits(jnp.concatenate(hidden, axis=1)))
    np.testing.assert_allclose(cached[0], logits(model, rows[0])[0], atol=1e-5)
    np.testing.assert_allclose(cached[1, :10], logits(model, rows[1])[0, :10], atol=1e-5)
    for array in cache[0]:
        assert not np.asarray(array)[1].any()  # the slot between them
        assert not np.asarray(array)[0, 10:].any()  # dropped tokens
