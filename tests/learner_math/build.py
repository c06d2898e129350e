"""Small records for the tests of the learner's mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.config import RunConfig
from common.record import segments
from common.types import Finish, Sampling, Source, Status, Step, Trajectory
from learner.model.spec import ModelSpec
from learner.pack import Example
from tests import records

SPEC = ModelSpec(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10_000.0,
)


def turn(
    context: Sequence[int],
    action: Sequence[int],
    reward: float = 0.0,
    parent: int = -1,
    prefix_len: int = 0,
    finish: Finish = Finish.STOP,
    logprob: float = -1.0,
) -> Step:
    logprobs = np.full(len(action), logprob, np.float32)
    return records.step(context, action, parent, prefix_len, reward=reward, finish=finish, action_logprobs=logprobs)


def rollout(
    steps: Sequence[Step], name: str = "r", status: Status = Status.TERMINATED, tail: Sequence[int] = (), temperature: float = 1.0
) -> Trajectory:
    sampling = Sampling(temperature, 16)
    return records.trajectory(*steps, tail=tail, rollout_id=name, group_id="g", status=status, sampling=sampling)


def chain(turns: Sequence[tuple[Sequence[int], Sequence[int], float]], logprob: float = -1.0) -> list[Step]:
    """Append-only steps from (context, action, reward)."""
    steps: list[Step] = []
    length = 0
    for index, (context, action, reward) in enumerate(turns):
        steps.append(turn(context, action, reward, index - 1, length, logprob=logprob))
        length += len(context) + len(action)
    return steps


def as_reference(trajectory: Trajectory) -> Trajectory:
    """The same tokens from somebody else: no logprobs, no versions."""
    nothing = np.zeros(0, np.float32)
    steps = tuple(replace(step, action_logprobs=nothing, versions=()) for step in trajectory.steps)
    return replace(trajectory, source=Source.REFERENCE, steps=steps)


def random_rollout(rng: np.random.Generator, name: str, turns: int = 2, vocab: int = 16) -> Trajectory:
    """A few turns of random tokens with a random outcome reward of 0 or 1."""
    parts = [(rng.integers(0, vocab, rng.integers(2, 6)), rng.integers(0, vocab, rng.integers(1, 4)), 0.0) for _ in range(turns)]
    parts[-1] = (*parts[-1][:2], float(rng.integers(0, 2)))
    return rollout(chain(parts, -float(np.log(vocab))), name)


def of_domain(groups: Sequence[Sequence[Trajectory]], domain: str) -> list[list[Trajectory]]:
    """The same rollouts, of another domain's tasks."""
    return [[replace(t, task=replace(t.task, domain=domain), rollout_id=f"{domain}-{t.rollout_id}") for t in g] for g in groups]


def domains(**algorithms: dict[str, Any]) -> list[dict[str, Any]]:
    """`[[domains]]` of these names, each with keys of its own algorithm."""
    return [{"name": name, "limits": {"max_tokens": 32}, "algorithm": own} for name, own in algorithms.items()]


def config(**tables) -> RunConfig:
    """A configuration with small micro-batches; tables as keyword arguments."""
    learner = {"row_length": 32, "rows_per_microbatch": 4} | tables.pop("learner", {})
    return RunConfig.model_validate({"domains": domains(frozenlake={}), "learner": learner, "engine": {}, **tables})


def example(rollout: str, ids: Sequence[int], mask: Sequence[bool], temperature: float = 0.7, **arrays) -> Example:
    """A segment; arrays that are not given are 0."""
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, bool)
    names = ("behaviour", "old_logprobs", "reference", "advantages", "returns", "old_values")
    found = {name: np.zeros(len(ids), np.float32) for name in names} | {"observed": np.zeros(len(ids), bool), "answers": 0}
    return Example(rollout=rollout, ids=ids, mask=mask, temperature=temperature, versions=np.where(mask, 1, -1), **found | arrays)


def batch(seed=0, groups=4, size=3):
    rng = np.random.default_rng(seed)
    return [[random_rollout(rng, f"g{g}-{i}") for i in range(size)] for g in range(groups)]


def with_behaviour(trainer, groups, offset=0.0):
    """The same rollouts, as if the trainer's own policy had sampled them."""
    return [[recorded(t, *trainer.logprobs([t]), offset) for t in group] for group in groups]


def recorded(trajectory, rows, offset):
    steps = list(trajectory.steps)
    for segment, row in zip(segments(trajectory), rows, strict=True):
        for step in segment.steps:
            own = row[segment.step_of == step] + np.float32(offset)
            steps[step] = replace(steps[step], action_logprobs=own.astype(np.float32))
    return replace(trajectory, steps=tuple(steps))


def same(a, b):
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
