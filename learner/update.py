"""The training step: rollouts in, better weights and a row of metrics out.

A policy update reads: pack → score → credit → pack → (accumulate micro-batches → apply) for each minibatch. Compiled
functions see one shape of micro-batch only, whatever the rollouts.

Dimension key: B rows of a micro-batch, T tokens of a row, S tokens of a segment, A action tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import RunConfig
from common.record import Segment, segments
from common.seeds import derive_seed
from common.types import Source, Status, Trajectory
from learner import credit, objective, optimizer
from learner.advantages import whiten
from learner.canary import Canary
from learner.gap import Gap
from learner.model import hf
from learner.model.spec import ModelSpec
from learner.pack import Aggregation, Example, Microbatch, Packed, Shape, pack, padded

Metrics = dict[str, float]
Live = Mapping[str, Sequence[np.ndarray]]  # rollout id -> per step [A] bool: young enough for the loss


class TrainingStopped(RuntimeError):
    """Too many updates in a row had gradients that were not finite."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A trajectory as the learner works on it."""

    trajectory: Trajectory
    segments: list[Segment]
    masks: list[np.ndarray]  # [S] bool of each segment: trained on


class Trainer:
    """Owns parameters and optimizer. Not thread-safe: one thread trains and takes snapshots.

    `weights` are a policy's parameters (of learner.model.hf.load); without them the policy starts at random from the
    run's seed. Nothing else here is random except the order of groups, which is a function of seed and step.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, weights: nnx.State | None = None) -> None:
        algorithm = config.algorithm
        self._config, self._shape = config, Shape(config.learner.row_length, config.learner.rows_per_microbatch)
        self._aggregation = Aggregation(algorithm.aggregation, algorithm.constant_divisor)
        self._network = network = objective.build_network(config.model, algorithm, spec)
        if weights is None:
            weights = objective.random_policy(spec, derive_seed(config.seed, "model"))
        self._state = optimizer.initial(config.optimizer, network.initial(weights))
        self._policy = _Accumulator(objective.policy(network, algorithm))
        self._supervised = _Accumulator(objective.supervised(network))
        self._apply = jax.jit(optimizer.make_apply(config.optimizer), donate_argnums=0)
        self._score_values = jax.jit(network.score_values)
        self._score_logprobs = jax.jit(network.score_logprobs)
        self._stored = hf.stored_graph(spec, config.model.dtype)
        kept = config.learner.max_lag if config.learner.gap == "every" else 0
        self._gap = Gap(self._score_logprobs, self._shape, config.model.dtype, kept)
        self._bad_updates = 0

    # ---- updates -------------------------------------------------------------------------------------------

    def supervised(self, rollouts: Sequence[Trajectory], lr: float) -> Metrics:
        """One optimizer step of cross-entropy on the action tokens of rollouts of any source, at learning rate `lr`.

        Every token weighs the same, and the model is taken at temperature 1.
        """
        examples = [
            _example(t.rollout_id, segment, segment.action, 1.0)
            for t in rollouts
            for segment in segments(t)
            if t.status != Status.FAILED
        ]
        report = _Report()
        self._optimize(self._supervised, pack(examples, self._shape, Aggregation()), report, lr)
        return self._finish(report)

    def policy_update(self, groups: Sequence[Sequence[Trajectory]], live: Live | None = None, version: int = -1) -> Metrics:
        """One update: epochs x minibatches optimizer steps, each on whole groups.

        `live` masks tokens that are too old; a rollout that it does not name is live. `version` names published
        weights that equal the present parameters: the engine/learner gap is then measured on its tokens, and on those of older
        versions that `published` was told of.

        Raises ValueError for rollouts that have no place in a policy loss, PackError when one does not fit a row, and
        TrainingStopped.
        """
        algorithm = self._config.algorithm
        batch = [[_rollout(trajectory, live or {}) for trajectory in group] for group in groups]
        report = _Report()
        credits = self._credit(batch, report)
        examples = [_examples(group, parts) for group, parts in zip(batch, credits, strict=True)]
        if algorithm.name == "grpo":  # a rollout with nothing to compare with leaves the loss and its denominator
            examples = [_untrained(group) if len(batch[i]) < 2 else group for i, group in enumerate(examples)]
        if algorithm.name == "ppo":
            report.extra |= _explained_variance([example for group in examples for example in group])
        for epoch in range(algorithm.epochs):
            for part in self._minibatches(len(examples), epoch):
                chosen = [example for index in part for example in examples[index]]
                packed = pack(chosen, self._shape, self._aggregation)
                first = not report.steps
                logprobs = self._optimize(self._policy, packed, report)
                if first:  # nothing has changed yet: these are the logprobs of the weights that the update began with
                    own = packed.read([np.asarray(x) for x in logprobs])
                    report.extra |= self._gap.measure(chosen, own, version, [e for group in examples for e in group])
        return self._finish(report)

    def _credit(self, batch: Sequence[Sequence[Rollout]], report: _Report) -> list[list[list[credit.Credit]]]:
        """Per group, rollout and segment."""
        algorithm = self._config.algorithm
        if algorithm.name == "grpo":
            credits = [
                credit.of_group([r.trajectory for r in group], [r.segments for r in group], algorithm.std_ddof) for group in batch
            ]
        else:
            scored = iter(self._values([rollout for group in batch for rollout in group], report))
            discount = credit.Discount(algorithm.gamma, algorithm.gae_lambda, algorithm.bootstrap_truncated)
            credits = [[credit.of_rollout(r.trajectory, r.segments, *next(scored), discount) for r in group] for group in batch]
        flat = [part for group in credits for parts in group for part in parts]
        masks = [mask for group in batch for rollout in group for mask in rollout.masks]
        if algorithm.normalize_advantages and flat:
            gains = np.concatenate([part.advantages[mask] for part, mask in zip(flat, masks, strict=True)])
            white = np.asarray(whiten(jnp.asarray(gains), jnp.ones(len(gains), bool)))
            for part, mask in zip(flat, masks, strict=True):
                part.advantages[mask], white = white[: mask.sum()], white[mask.sum() :]
        if algorithm.zero_advantages:
            for part in flat:
                part.advantages[:] = 0
        return credits

    def _values(self, rollouts: Sequence[Rollout], report: _Report) -> Iterator[tuple[list[np.ndarray], float]]:
        """For each rollout: [S] values of the state before each token of its segments, and of the state at its end."""
        examples = [_example(r.trajectory.rollout_id, s, s.mask, 1.0) for r in rollouts for s in r.segments]
        packed = pack(examples, self._shape, Aggregation(), keep_tails=True)
        report.cut += packed.cut
        scores = [self._score_values(self._state.params, batch) for batch in packed.microbatches]
        before = iter(packed.read([np.asarray(values) for values, _ in scores]))
        after = iter(packed.read([np.asarray(values) for _, values in scores]))
        for rollout in rollouts:
            ends = [next(after)[-1] for _ in rollout.segments]
            values = [padded(next(before), len(segment.ids)) for segment in rollout.segments]
            yield values, float(ends[credit.last_segment(rollout.trajectory, rollout.segments)])

    def _minibatches(self, groups: int, epoch: int) -> list[np.ndarray]:
        """Indices of the groups of each optimizer step, in an order that depends on seed, step and epoch alone."""
        order = np.random.default_rng(derive_seed(self._config.seed, "order", self.step, epoch)).permutation(groups)
        return [part for part in np.array_split(order, self._config.algorithm.minibatches) if len(part)]

    def _optimize(self, accumulator: _Accumulator, packed: Packed, report: _Report, fixed_lr: float = -1.0) -> list[jax.Array]:
        """One optimizer step, not taken when there is nothing to train on. Returns logprobs [B, T] per micro-batch."""
        report.trained += packed.trained
        if not packed.trained:
            report.empty += 1
            return [jnp.zeros(batch.ids.shape) for batch in packed.microbatches]
        total, logprobs = accumulator.run(self._state.params, packed.microbatches)
        self._state, step = self._apply(self._state, total.gradient, jnp.float32(fixed_lr))
        report.steps.append((total.sums, total.maxima, step))
        return logprobs

    def _finish(self, report: _Report) -> Metrics:
        metrics = report.metrics()
        if metrics["skipped_nonfinite"]:
            self._bad_updates = self._bad_updates + 1 if metrics["optimizer_steps"] == 0 else 0
            if self._bad_updates >= self._config.optimizer.max_skips:
                raise TrainingStopped(
                    f"{self._bad_updates} updates in a row had gradients that are not finite; the parameters are as before them:"
                    " lower optimizer.lr, or look for huge values in the last batch"
                )
        elif metrics["optimizer_steps"]:
            self._bad_updates = 0
        return metrics

    def forget_moments(self) -> None:
        """Adam starts anew. Gradients of the warm start are ten times those of the policy loss; their second moments would
        hold policy updates back for hundreds of steps. A learning-rate warm-up covers the first steps without moments.

        A separate critic, which the warm start does not train, starts from the trunk that it has made."""
        params = self._state.params
        if "critic" in params:
            params = params | {"critic": jax.tree.map(jnp.copy, params["policy"])}
        self._state = self._state._replace(params=params, adam=optimizer.initial(self._config.optimizer, params).adam)

    # ---- what others read ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps of policy updates so far."""
        return int(self._state.step)

    def snapshot(self, ids: np.ndarray) -> tuple[dict[str, np.ndarray], Canary]:
        """The policy as it is published: Hugging Face's names and layout, `model.dtype`, in host memory. A copy, so training
        may go on. And what an engine that serves it must answer to ids [N], made from these very values."""
        params = hf.stored(self._state.params["policy"], self._config.model.dtype)
        logprobs, last = jax.device_get(objective.canary(self._stored, params, ids))
        return hf.named(params), Canary(ids, logprobs, last)

    def published(self, version: int) -> None:
        """The present policy is `version`."""
        self._gap.keep(version, self._state.params["policy"])

    def logprobs(self, rollouts: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Per rollout and segment: [S] logprobs of the action tokens under the present policy, 0 elsewhere.

        Taken at the rollout's temperature; a greedy one's, as in engines, at 1.
        """
        parts = [segments(trajectory) for trajectory in rollouts]
        examples = [
            _example(t.rollout_id, segment, segment.action, t.sampling.temperature or 1.0)
            for t, own in zip(rollouts, parts, strict=True)
            for segment in own
        ]
        packed = pack(examples, self._shape, Aggregation())
        found = iter(packed.read([np.asarray(self._score_logprobs(self._state.params, b)) for b in packed.microbatches]))
        return [[padded(next(found), len(segment.ids)) for segment in own] for own in parts]

    def state_tree(self) -> dict[str, np.ndarray]:
        """Parameters, moments and counts by name, in host memory: a copy, so training may go on."""
        leaves = jax.tree_util.tree_leaves_with_path(_snapshot(self._state))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    def restore_tree(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take up what `state_tree` gave. Raises ValueError if it belongs to another model or algorithm."""
        paths, structure = jax.tree_util.tree_flatten_with_path(self._state)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        different = sorted(set(names) ^ set(tree))
        different += [n for n, (_, leaf) in zip(names, paths, strict=True) if n in tree and leaf.shape != tree[n].shape]
        if different:
            raise ValueError(
                f"the checkpoint does not fit this configuration: {different[0]} differs ({len(different)} arrays in all)"
            )
        # Through a compiled copy: buffers that JAX made itself can be donated, borrowed ones cannot.
        self._state = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(structure.unflatten([jnp.asarray(tree[n]) for n in names]))


def _snapshot(tree: Any) -> Any:
    """A copy in host memory. (`jax.device_get` may borrow the buffer instead, which the next step could then not reuse.)"""
    return jax.tree.map(np.array, tree)


# ---- from rollouts to examples -----------------------------------------------------------------------------


def _rollout(trajectory: Trajectory, live: Live) -> Rollout:
    """Raises ValueError if the trajectory has no place in a policy loss."""
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


def _example(rollout: str, segment: Segment, mask: np.ndarray, temperature: float) -> Example:
    """Without credit."""
    nothing = np.zeros(len(segment.ids), np.float32)
    return Example(rollout, segment.ids, mask, segment.logprobs, nothing, nothing, nothing, temperature, segment.versions)


def _examples(group: Sequence[Rollout], credits: Sequence[Sequence[credit.Credit]]) -> list[Example]:
    return [
        replace(
            _example(rollout.trajectory.rollout_id, segment, mask, rollout.trajectory.sampling.temperature),
            advantages=part.advantages,
            returns=part.returns,
            old_values=part.old_values,
        )
        for rollout, parts in zip(group, credits, strict=True)
        for segment, mask, part in zip(rollout.segments, rollout.masks, parts, strict=True)
    ]


def _untrained(examples: Sequence[Example]) -> list[Example]:
    return [replace(example, mask=np.zeros_like(example.mask)) for example in examples]


# ---- adding up ---------------------------------------------------------------------------------------------


class _Accumulator:
    """Adds the contributions of micro-batches on the device, in place."""

    def __init__(self, loss: objective.Objective) -> None:
        contribute = objective.contribution(loss)

        def accumulate(params: Any, total: objective.Contribution, batch: Microbatch) -> Any:
            own, logprobs = contribute(params, batch)
            return objective.add(total, own), logprobs

        def nothing(params: Any, batch: Microbatch) -> objective.Contribution:
            shapes, _ = jax.eval_shape(contribute, params, batch)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        self._accumulate: Callable = jax.jit(accumulate, donate_argnums=1)
        self._nothing: Callable = jax.jit(nothing)

    def run(self, params: Any, batches: Sequence[Microbatch]) -> tuple[objective.Contribution, list[jax.Array]]:
        total, found = self._nothing(params, batches[0]), []
        for batch in batches:
            total, logprobs = self._accumulate(params, total, batch)
            found.append(logprobs)
        return total, found


class _Report:
    """What the optimizer steps of one update did."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, jax.Array], dict[str, jax.Array], optimizer.StepReport]] = []
        self.extra: Metrics = {}
        self.trained = self.cut = self.empty = 0

    def metrics(self) -> Metrics:
        """Means over trained tokens (losses and norms: over optimizer steps); what was not measured is left out."""
        steps = jax.device_get(self.steps)
        finite = [(sums, maxima, step) for sums, maxima, step in steps if step.finite]
        out: Metrics = {
            "trained_tokens": float(self.trained),
            "cut_tokens": float(self.cut),
            "optimizer_steps": float(sum(step.taken for *_, step in steps)),
            "skipped_nonfinite": float(len(steps) - len(finite)),
            "skipped_zero": float(sum(not step.taken for *_, step in finite)),
            "skipped_empty": float(self.empty),
        }
        if finite:
            tokens = sum(float(sums["tokens"]) for sums, *_ in finite)
            for name in finite[0][0].keys() - {"tokens"}:
                total = sum(float(sums[name]) for sums, *_ in finite)
                out[name] = total / (len(finite) if name.endswith("loss") else tokens)
            for name in finite[0][1]:
                out[name] = max(float(maxima[name]) for _, maxima, _ in finite)
            for name in ("lr", "grad_norm", "update_norm"):
                out[name] = sum(float(getattr(step, name)) for *_, step in finite) / len(finite)
        return out | self.extra


def _explained_variance(examples: Sequence[Example]) -> Metrics:
    """1 - Var(return - value) / Var(return) over trained tokens."""
    returns = np.concatenate([example.returns[example.mask] for example in examples]) if examples else np.zeros(0)
    if not len(returns):
        return {}
    values = np.concatenate([example.old_values[example.mask] for example in examples])
    variance = float(np.var(returns, dtype=np.float64))
    left = float(np.var(returns - values, dtype=np.float64))
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": 1 - left / variance if variance > 0 else 0.0,
    }
