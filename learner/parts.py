"""Domains that share an algorithm, and how several of them make one optimizer step.

The step's loss is Σ share · loss of a part. A part's loss is what its rollouts would have alone, with denominators of their own;
its share is that of the step's trained rollouts. So a part with few rollouts is no louder than they are, whatever its
aggregation, and domains with equal algorithms, which are one part, are as one domain. A micro-batch holds rollouts of one part,
since each has its own compiled objective; gradients and measures of all add up in one total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from common.config import RunConfig
from common.config_algorithm import AlgorithmConfig
from learner import objective, reducers
from learner.objective import Contribution, Objective
from learner.pack import Aggregation, Example, Microbatch, Packed, Shape, pack


@dataclass(frozen=True)
class Part:
    algorithm: AlgorithmConfig
    domains: Mapping[int, str]  # number in the run -> name

    def aggregation(self, share: float, step: int) -> Aggregation:
        """As the schedules have it at an optimizer step."""
        own, observation = self.algorithm, self.algorithm.observation
        fading = max(0.0, 1 - step / observation.decay_steps) if observation.decay_steps else 1.0
        return Aggregation(
            own.aggregation,
            own.constant_divisor,
            share=share,
            policy=0.0 if step < own.critic_warmup else 1.0,
            observations=observation.coefficient * fading if observation.loss != "none" else 0.0,
        )


def parts_of(config: RunConfig) -> list[Part]:
    """In the order of the domains."""
    found: dict[AlgorithmConfig, dict[int, str]] = {}
    for number, (name, algorithm) in enumerate(config.algorithms.items()):
        found.setdefault(algorithm.model_copy(update={"preset": ""}), {})[number] = name
    return [Part(algorithm, domains) for algorithm, domains in found.items()]


@dataclass(frozen=True, eq=False)
class Load:
    """What one part brings to an optimizer step."""

    part: int
    indices: list[int]  # of its examples
    packed: Packed


def loads_of(examples: Sequence[Example], parts: Sequence[Part], shape: Shape, step: int) -> list[Load]:
    """The examples of an optimizer step by part, packed and weighted; parts without any are left out."""
    part_of = {number: index for index, part in enumerate(parts) for number in part.domains}
    indices: dict[int, list[int]] = {}
    for index, example in enumerate(examples):
        indices.setdefault(part_of[example.domain], []).append(index)
    trained = {part: len({examples[i].rollout for i in own if examples[i].mask.any()}) for part, own in indices.items()}
    return [
        Load(part, own, pack([examples[i] for i in own], shape, parts[part].aggregation(share, step)))
        for part, own in sorted(indices.items())
        for share in (trained[part] / max(1, sum(trained.values())),)
    ]


class Accumulator:
    """Adds the contributions of micro-batches on the device, in place: those of several parts, each with its own loss."""

    def __init__(self, losses: Sequence[Objective]) -> None:
        contributions = [objective.contribution(loss) for loss in losses]

        def accumulate(contribute: Any, params: Any, total: Contribution, batch: Microbatch) -> Any:
            own, logprobs = contribute(params, batch)
            return objective.add(total, own), logprobs

        def nothing(params: Any, batch: Microbatch) -> Contribution:
            shapes = [jax.eval_shape(contribute, params, batch)[0] for contribute in contributions]
            measures = {name: measure for own in shapes for name, measure in reducers.start(own.measures).items()}
            return Contribution(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0].gradient), measures)

        self._accumulate = [jax.jit(partial(accumulate, own), donate_argnums=1) for own in contributions]
        self._nothing = jax.jit(nothing)

    def run(self, params: Any, loads: Sequence[Load]) -> tuple[Contribution, list[list[jax.Array]]]:
        """The whole step's, and logprobs [B, T] of each micro-batch of each load; there is at least one."""
        total, found = self._nothing(params, loads[0].packed.microbatches[0]), []
        for load in loads:
            found.append([])
            for batch in load.packed.microbatches:
                total, logprobs = self._accumulate[load.part](params, total, batch)
                found[-1].append(logprobs)
        return total, found
