"""The standing alarm: how far the engines' log-probabilities are from the learner's, in every batch.

A token's logprob can only be compared under the weights that sampled it. Those of the newest version are the learner's own; older
ones, which most tokens of an asynchronous run come from, are kept on the device for as long as their tokens may be trained on.

Dimension key: S tokens of a segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learner.optimizer import Params
from learner.pack import Aggregation, Example, Microbatch, Shape, pack, padded

Score = Callable[[Params, Microbatch], jax.Array]  # [B, T] logprobs at trained tokens


class Gap:
    """`versions` older policies are kept, in `dtype`; 0: only tokens of the newest are compared."""

    def __init__(self, score: Score, shape: Shape, dtype: str, versions: int) -> None:
        self._score, self._shape, self._versions = score, shape, versions
        self._copy = jax.jit(lambda policy: jax.tree.map(lambda x: jnp.copy(x).astype(dtype), policy))
        self._kept: dict[int, Any] = {}  # version -> policy

    def keep(self, version: int, policy: Any) -> None:
        """`policy` is published as `version`."""
        if self._versions:
            self._kept[version] = self._copy(policy)
            while len(self._kept) > self._versions + 1:  # the newest is the learner's own until it trains on
                del self._kept[min(self._kept)]

    def measure(self, examples: Sequence[Example], logprobs: Sequence[np.ndarray], version: int, batch: Sequence[Example]) -> Any:
        """Metrics over trained tokens. Of `version` (below 0: of any) in `examples`, whose logprobs [S] under the present policy
        are given; and of the most frequent older version that is kept, in as much of `batch` as one micro-batch holds."""
        logs = [
            _behind(example, own, example.mask & ((example.versions == version) | (version < 0)))
            for example, own in zip(examples, logprobs, strict=True)
        ]
        logs += self._older(batch, version)
        return metrics(np.concatenate(logs).astype(np.float64) if logs else np.zeros(0))

    def _older(self, batch: Sequence[Example], version: int) -> list[np.ndarray]:
        counts = Counter(int(v) for example in batch for v in example.versions[example.mask])
        older = [v for v, _ in counts.most_common() if v in self._kept and v != version]
        if not older or version < 0:
            return []
        chosen, room = [], max(self._shape.row_length, self._shape.rows * self._shape.row_length // 2)
        for example in batch:
            mask = example.mask & (example.versions == older[0])
            if mask.any() and len(example.ids) <= room:
                chosen.append(replace(example, mask=mask))
                room -= len(example.ids)
        packed = pack(chosen, self._shape, Aggregation())
        params = {"policy": self._kept[older[0]]}
        found = packed.read([np.asarray(self._score(params, part)) for part in packed.microbatches])
        return [_behind(example, own, example.mask) for example, own in zip(chosen, found, strict=True)]


def _behind(example: Example, own: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Engine's logprob minus the learner's, where `mask`; `own` may lack context at the end."""
    return example.behaviour[mask] - padded(own, len(mask))[mask]


def metrics(logs: np.ndarray) -> dict[str, float]:
    """|Δlogprob|, and the k3 estimator of KL(engine, learner): mean of r - 1 - log r, with r the learner's probability over the
    engine's (J. Schulman, "Approximating KL divergence"). `logs`: engine's logprob minus the learner's, of each token."""
    gap = np.abs(logs)
    if not len(gap):
        return {"gap_tokens": 0.0}
    return {
        "gap_tokens": float(len(gap)),
        "gap_mean": float(gap.mean()),
        "gap_p99": float(np.quantile(gap, 0.99)),
        "gap_max": float(gap.max()),
        "gap_k3": float((np.exp(-logs) - 1 + logs).mean()),
    }
