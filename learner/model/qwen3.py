"""Qwen3 in Flax NNX: RMSNorm, grouped-query attention with normed queries and keys, rotary positions, SwiGLU.

Parameters are float32 and are cast to the compute dtype where they are used; norms, rotations, softmax and logits are
float32. One definition of a block serves training (whole rows) and the engine (new tokens against a cache).

Dimension key: B rows, T tokens of a row, S keys that a token may attend to, D hidden, F intermediate, N query heads,
K key-value heads, G query heads per key-value head, H head size, V vocabulary, L slots of a cache, M positions of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from learner.model.spec import ModelSpec

MASKED = -1e30  # finite: a row without any key to attend to stays finite too
QUERY_BLOCK = 64  # queries that go through causal attention together


class LayerCache(NamedTuple):
    """Keys (after rotation) and values of one layer."""

    keys: jax.Array  # [L, M, K, H]
    values: jax.Array  # [L, M, K, H]


Cache = tuple[LayerCache, ...]  # one per layer


class CacheWindow(NamedTuple):
    """Which part of a cache a forward pass writes and reads."""

    slots: jax.Array  # [B] int32: the slot of each row
    positions: jax.Array  # [B, T] int32: where each token's key goes; M or more drops it
    width: int  # positions 0..width-1 of a slot are read


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...].astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel` without bias; kernel [in, out], in the dtype of x. Starts normal with variance scale²/in.

    `transposed`: kernel is [out, in], as model files have it; engines then compute on a file as it is.
    """

    def __init__(self, size_in: int, size_out: int, rngs: nnx.Rngs, scale: float = 1.0) -> None:
        deviation = scale * size_in**-0.5
        self.kernel = nnx.Param(deviation * jax.random.normal(rngs.params(), (size_in, size_out), jnp.float32))
        self.transposed = False

    def __call__(self, x: jax.Array, wide: bool = False) -> jax.Array:
        """`wide`: the result is float32, whatever x is."""
        kernel = self.kernel[...].astype(x.dtype)
        if self.transposed:
            found = by_rows(x, kernel)
            return found if wide else found.astype(x.dtype)
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32 if wide else None)


def by_rows(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [..., in] times each row of matrix [out, in], both of one dtype -> [..., out] float32.

    XLA on a CPU has a fast bfloat16 product for this order, two rows of x or more, and a float32 result only. (Measured: 27
    instead of 254 ms for 16 rows and the head of Qwen3-0.6B.) For everything else it first makes a float32 copy of the matrix.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.matmul(x, matrix.T, preferred_element_type=jnp.float32)
    if x.size == x.shape[-1]:
        return by_rows(jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))), matrix)[0].reshape(*x.shape[:-1], -1)
    contract_inner = (((1,), (x.ndim - 1,)), ((), ()))
    turned = jax.lax.dot_general(matrix, x, contract_inner, preferred_element_type=jnp.float32)  # [out, ...]
    return jnp.moveaxis(turned, 0, -1)


class Attention(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = Linear(spec.hidden_size, queries, rngs)
        self.k = Linear(spec.hidden_size, keys, rngs)
        self.v = Linear(spec.hidden_size, keys, rngs)
        self.o = Linear(queries, spec.hidden_size, rngs, scale=(2 * spec.num_layers) ** -0.5)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps)
        self.head_dim = spec.head_dim

    def __call__(
        self, x: jax.Array, rotation: jax.Array, mask: jax.Array, cache: LayerCache | None, window: CacheWindow | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [B, T, D], rotation [B, T, 2, H/2], mask [B, T, S] -> [B, T, D] and the cache with this row's keys in it."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q(x).reshape(heads)), rotation)
        k = rotate(self.k_norm(self.k(x).reshape(heads)), rotation)
        v = self.v(x).reshape(heads)
        if cache is not None and window is not None:
            cache = write(cache, k, v, window)
            k, v = cache.keys[window.slots, : window.width], cache.values[window.slots, : window.width]
        return self.o(attend(q, k, v, mask, causal=cache is None)), cache


class Mlp(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.gate = Linear(spec.hidden_size, spec.intermediate_size, rngs)
        self.up = Linear(spec.hidden_size, spec.intermediate_size, rngs)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, rngs, scale=(2 * spec.num_layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.attention = Attention(spec, rngs)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.mlp = Mlp(spec, rngs)

    def __call__(
        self,
        x: jax.Array,
        rotation: jax.Array,
        mask: jax.Array,
        cache: LayerCache | None = None,
        window: CacheWindow | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        mixed, cache = self.attention(self.attention_norm(x), rotation, mask, cache, window)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Qwen3(nnx.Module):
    """The network. `dtype` is that of activations; parameters are float32 whatever it is."""

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs, dtype: jnp.dtype | type = jnp.float32, remat: bool = False) -> None:
        shape = (spec.vocab_size, spec.hidden_size)
        # Blocks add vectors of about unit size to the residual stream; a token that starts much smaller is drowned there.
        # (Measured: held at the unconditional loss for 60 supervised steps with 0.02, for 30 with 1.) A tied embedding
        # is the head too, where unit size would mean logits of size sqrt(D).
        deviation = 0.02 if spec.tie_embeddings else 1.0
        self.embedding = nnx.Param(deviation * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.blocks = nnx.List([Block(spec, rngs) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps)
        self.head = None if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size, rngs, scale=0.2)
        self.spec, self.dtype, self.remat = spec, jnp.dtype(dtype), remat

    def __call__(self, ids: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Hidden states after the final norm, [B, T, D], of rows that hold one or more packed sequences.

        Each argument is [B, T] int32. A token attends to itself and to earlier tokens of its row with its segment id.
        Segment id 0 is padding: it may stand anywhere, and no token outside it sees it. `positions` count from 0 in
        each sequence, whatever stands before it in the row.
        """
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = same & jnp.tril(jnp.ones(same.shape[1:], bool))
        rotation = self._rotation(positions)
        x = self._embed(ids)
        block_forward = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for block in self.blocks:
            x, _ = block_forward(block, x, rotation, mask)
        return self.norm(x)

    def cached(self, ids: jax.Array, cache: Cache, window: CacheWindow) -> tuple[jax.Array, Cache]:
        """Hidden states [B, T, D] of new tokens `ids` [B, T] that follow what their slots hold, and the grown cache.

        A token at position p attends to positions 0..p of its slot; they must be below `window.width`.
        """
        mask = jnp.arange(window.width) <= window.positions[:, :, None]
        rotation = self._rotation(window.positions)
        x = self._embed(ids)
        grown = []
        for block, layer in zip(self.blocks, cache, strict=True):
            x, layer = block(x, rotation, mask, layer, window)
            grown.append(layer)
        return self.norm(x), tuple(grown)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] float32."""
        if self.head is not None:
            return self.head(hidden, wide=True)
        return by_rows(hidden, self.embedding[...].astype(hidden.dtype))

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Zeros for `slots` sequences of up to `length` tokens."""
        shape = (slots, length, self.spec.num_kv_heads, self.spec.head_dim)
        return tuple(LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.blocks)

    def _embed(self, ids: jax.Array) -> jax.Array:
        table = self.embedding[...]
        if table.dtype != jnp.bfloat16:
            return table[ids].astype(self.dtype)
        # An engine's. As bits, since XLA on a CPU looks bfloat16 up in a float32 copy of the whole table.
        bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[ids]
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(self.dtype)

    def _rotation(self, positions: jax.Array) -> jax.Array:
        """cos and sin of each token's rotary angles, [B, T, 2, H/2] float32; angle i is position · theta^(−2i/H)."""
        size = self.spec.head_dim
        frequencies = self.spec.rope_theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2)


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotary embedding of x [B, T, heads, H]: component i pairs with i + H/2, as Hugging Face stores it."""
    cos, sin = rotation[:, :, None, 0], rotation[:, :, None, 1]  # [B, T, 1, H/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, causal: bool) -> jax.Array:
    """Softmax attention; q [B, T, N, H], k and v [B, S, K, H], mask [B, T, S] -> [B, T, N·H].

    `causal` says that S is T and that the mask lets no token see a later one. Queries then go in blocks, and the keys
    after a block are never touched: on a CPU that makes attention over rows of 192 tokens three times cheaper, gradient
    included, than one masked square.
    """
    rows, length, heads, size = q.shape
    group = heads // k.shape[2]
    q = q.transpose(0, 2, 1, 3) * jnp.asarray(size**-0.5, q.dtype)  # [B, N, T, H]
    k = jnp.repeat(k, group, axis=2).transpose(0, 2, 3, 1)  # [B, N, H, S]
    v = jnp.repeat(v, group, axis=2).transpose(0, 2, 1, 3)  # [B, N, S, H]
    bias = jnp.where(mask, 0.0, MASKED)[:, None]  # [B, 1, T, S]
    blocks = []
    step = QUERY_BLOCK if causal else length
    for start in range(0, length, step):
        keys = min(start + step, length) if causal else k.shape[3]
        scores = jnp.matmul(q[:, :, start : start + step], k[..., :keys], preferred_element_type=jnp.float32)
        scores += bias[:, :, start : start + step, :keys]
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        total = weights.sum(axis=-1, keepdims=True)
        mixed = jnp.matmul(weights.astype(v.dtype), v[:, :, :keys], preferred_element_type=jnp.float32)
        blocks.append((mixed / total).astype(v.dtype))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def write(cache: LayerCache, k: jax.Array, v: jax.Array, window: CacheWindow) -> LayerCache:
    """Put k and v [B, T, K, H] at their slots and positions; positions outside the cache are dropped."""
    at = (window.slots[:, None], window.positions)
    return LayerCache(cache.keys.at[at].set(k, mode="drop"), cache.values.at[at].set(v, mode="drop"))
