"""The score pass: what the networks say of an update's rollouts before anything is changed.

Values of a critic, logprobs of the weights that the update begins with, logprobs of a reference policy: what the algorithm
reads, and nothing else. One compiled function on micro-batches of the training step's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from common.config_algorithm import AlgorithmConfig
from learner.credit import last_segment
from learner.examples import example
from learner.objective import Network
from learner.optimizer import Params
from learner.pack import Aggregation, Microbatch, Shape, pack, padded
from learner.rows import Rollout


class Scorer:
    def __init__(self, network: Network, shape: Shape) -> None:
        self._shape = shape
        self.logprobs = jax.jit(network.score_logprobs)

        def score(params: Params, batch: Microbatch, critic: bool, proximal: bool) -> dict[str, Any]:
            out: dict[str, Any] = {}
            if critic:
                out["values"], out["after"] = network.score_values(params, batch)
            if proximal:  # the compiler makes the trunk's pass for a shared critic once
                out["logprobs"] = network.score_logprobs(params, batch)
            return out

        self._score = jax.jit(score, static_argnames=("critic", "proximal"))

    def __call__(
        self, params: Params, reference: Params | None, rollouts: Sequence[Rollout], algorithm: AlgorithmConfig
    ) -> tuple[list[Rollout], int]:
        """The rollouts with the scores that the algorithm reads, and how many tokens of context did not fit a row (zeros stand
        for their values)."""
        critic, proximal = algorithm.critic != "none", algorithm.old_policy == "proximal"
        if not (critic or proximal or algorithm.kl.where != "none"):
            return list(rollouts), 0
        examples = [
            example(r.trajectory.rollout_id, s, s.mask, r.trajectory.sampling.temperature) for r in rollouts for s in r.segments
        ]
        packed = pack(examples, self._shape, Aggregation(), keep_tails=critic)
        found: dict[str, Any] = {}
        if critic or proximal:
            scores = jax.device_get([self._score(params, batch, critic, proximal) for batch in packed.microbatches])
            found = {name: packed.read([score[name] for score in scores]) for name in scores[0]}
        if algorithm.kl.where != "none":
            logprobs = [np.asarray(self.logprobs(reference, batch)) for batch in packed.microbatches]
            found["reference"] = packed.read(logprobs)
        parts = iter(range(len(examples)))
        return [_scored(rollout, [next(parts) for _ in rollout.segments], found) for rollout in rollouts], packed.cut


def _scored(rollout: Rollout, places: Sequence[int], found: dict[str, list[np.ndarray]]) -> Rollout:
    """With what was found at its segments' places."""
    changes: dict[str, Any] = {
        name: [padded(found[name][place], len(s.ids)) for place, s in zip(places, rollout.segments, strict=True)]
        for name in found
        if name != "after"
    }
    if "after" in found:
        changes["after"] = float(found["after"][places[last_segment(rollout.trajectory, rollout.segments)]][-1])
    return replace(rollout, **changes)
