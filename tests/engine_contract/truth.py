"""What a model says of ids, by the learner's own forward pass in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from learner.model import hf

LENGTH = 512  # one compilation for all: what stands behind a sequence cannot be seen from inside it


class Truth:
    def __init__(self, folder: Path) -> None:
        self._graph, self._state = nnx.split(hf.build(*hf.load(folder)))

    def logprobs(self, ids: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
        """Of `ids[start:]`, each given all that stand before it, under softmax(z / temperature)."""
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(_logits(self._graph, self._state, row), np.float64)[0] / temperature
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.asarray([logprobs[at - 1, ids[at]] for at in range(start, len(ids))])


@partial(jax.jit, static_argnums=0)
def _logits(graph, state, ids):
    model = nnx.merge(graph, state)
    return model.logits(model(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)))
