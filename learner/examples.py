"""From trajectories to what packing and losses work on.

Dimension key: S tokens of a segment, A action tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from common.config_algorithm import AlgorithmConfig
from common.record import Segment, segments
from common.types import ContextKind, Source, Status, Trajectory
from learner.pack import Example
from learner.rows import Credit, Rollout
from learner.shaping import leaves_the_loss

Live = Mapping[str, Sequence[np.ndarray]]  # rollout id -> per step [A] bool: young enough for the loss


def group_of(trajectories: Sequence[Trajectory], live: Live, algorithm: AlgorithmConfig) -> list[Rollout]:
    """The rollouts of one group; what the algorithm leaves out of its loss is masked, and stays.

    Raises ValueError if one has no place in a policy loss.
    """
    out = []
    for trajectory, leaves in zip(trajectories, leaves_the_loss(trajectories, algorithm), strict=True):
        own = rollout(trajectory, live)
        out.append(replace(own, masks=[np.zeros_like(mask) for mask in own.masks]) if leaves else own)
    return out


def rollout(trajectory: Trajectory, live: Live) -> Rollout:
    """Without scores. Raises ValueError if the trajectory has no place in a policy loss."""
    name, sampling = trajectory.rollout_id, trajectory.sampling
    if trajectory.source != Source.POLICY or trajectory.status == Status.FAILED:
        kind = "FAILED" if trajectory.status == Status.FAILED else trajectory.source.name
        raise ValueError(f"rollout {name} is {kind}: policy and value losses take what the policy sampled and the task scored")
    if not sampling.temperature > 0:
        raise ValueError(f"rollout {name} was sampled at temperature {sampling.temperature}; training needs one above 0")
    parts = segments(trajectory)
    masks = [segment.mask.copy() for segment in parts]
    for segment, mask in zip(parts, masks, strict=True):
        for step in segment.steps if name in live else ():
            mask[segment.step_of == step] &= live[name][step]
    return Rollout(trajectory, parts, masks)


def example(rollout: str, segment: Segment, mask: np.ndarray, temperature: float) -> Example:
    """Without credit and without targets from the environment."""
    nothing = np.zeros(len(segment.ids), np.float32)
    return Example(
        rollout=rollout,
        ids=segment.ids,
        mask=mask,
        behaviour=segment.logprobs,
        old_logprobs=segment.logprobs,
        reference=nothing,
        advantages=nothing,
        returns=nothing,
        old_values=nothing,
        temperature=temperature,
        versions=segment.versions,
        observed=np.zeros(len(segment.ids), bool),
        answers=0,
    )


def of_rollout(rollout: Rollout, credits: Sequence[Credit], algorithm: AlgorithmConfig, domain: int = 0) -> list[Example]:
    """Its segments, ready for the policy's loss; `domain` is the number of the rollout's. A rollout that left the loss teaches
    nothing of its observations either: what a wrong simulated user said is none of the environment."""
    out, trained = [], any(mask.any() for mask in rollout.masks)
    proximal = rollout.logprobs if algorithm.old_policy == "proximal" else [segment.logprobs for segment in rollout.segments]
    for index, (segment, mask, part) in enumerate(zip(rollout.segments, rollout.masks, credits, strict=True)):
        plain = example(rollout.trajectory.rollout_id, segment, mask, rollout.trajectory.sampling.temperature)
        changes = {
            "old_logprobs": proximal[index],
            "advantages": part.advantages * part.weights,
            "returns": part.returns,
            "old_values": part.old_values,
            "domain": domain,
        }
        if rollout.reference:
            changes["reference"] = rollout.reference[index]
        if algorithm.observation.loss != "none" and trained:
            changes |= observations(segment)
        out.append(replace(plain, **changes))
    return out


def observations(segment: Segment) -> dict[str, np.ndarray | int]:
    """The targets of a loss on observations: what the environment said, without notices of the agent loop, which count in the
    denominator. What is shown again, or was seen before in another segment, is none; nor is a token with nothing before it."""
    observed = segment.kinds == ContextKind.OBSERVATION
    observed[:1] = False
    return {"observed": observed, "answers": int((observed | (segment.kinds == ContextKind.NOTICE)).sum())}
