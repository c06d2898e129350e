"""The training step: rollouts in, better weights and a row of metrics out.

A policy update reads: score → credit → pack → (accumulate micro-batches → apply) for each minibatch. Compiled
functions see one shape of micro-batch only, whatever the rollouts.

Dimension key: B rows of a micro-batch, T tokens of a row, S tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import RunConfig
from common.record import segments
from common.seeds import derive_seed
from common.types import Status, Trajectory
from learner import credit, objective, optimizer, reducers
from learner.canary import Canary
from learner.examples import Live, example, group_of, of_rollout
from learner.gap import Gap
from learner.model import hf
from learner.model.spec import ModelSpec
from learner.pack import Aggregation, Example, Microbatch, Packed, Shape, pack, padded
from learner.report import Metrics, Report, of_rollouts, of_values
from learner.rows import Credit, Rollout
from learner.score import Scorer


class TrainingStopped(RuntimeError):
    """Too many updates in a row had gradients that were not finite."""


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
        self._score = Scorer(network, self._shape, algorithm)
        self._reference = self._first_reference(spec) if algorithm.kl.where != "none" else None
        self._stored = hf.stored_graph(spec, config.model.dtype)
        kept = config.learner.max_lag if config.learner.gap == "every" else 0
        self._gap = Gap(self._score.logprobs, self._shape, config.model.dtype, kept)
        self._bad_updates = 0

    # ---- updates -------------------------------------------------------------------------------------------

    def supervised(self, rollouts: Sequence[Trajectory], lr: float) -> Metrics:
        """One optimizer step of cross-entropy on the action tokens of rollouts of any source, at learning rate `lr`.

        Every token weighs the same, and the model is taken at temperature 1.
        """
        examples = [
            example(t.rollout_id, segment, segment.action, 1.0)
            for t in rollouts
            for segment in segments(t)
            if t.status != Status.FAILED
        ]
        report = Report()
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
        report, algorithm = Report(), self._config.algorithm
        batch, credits, examples = self.prepare(groups, live or {}, report)
        report.extra |= of_rollouts(batch, credits)
        if algorithm.critic != "none":
            report.extra |= of_values([own for group in examples for own in group])
        for epoch in range(algorithm.epochs):
            for part in self._minibatches(len(examples), epoch):
                chosen = [own for index in part for own in examples[index]]
                packed = pack(chosen, self._shape, self._scaled())
                first = not report.steps
                logprobs = self._optimize(self._policy, packed, report)
                if first:  # nothing has changed yet: these are the logprobs of the weights that the update began with
                    own = packed.read([np.asarray(x) for x in logprobs])
                    report.extra |= self._gap.measure(chosen, own, version, [e for group in examples for e in group])
        return self._finish(report)

    def prepare(
        self, groups: Sequence[Sequence[Trajectory]], live: Live, report: Report
    ) -> tuple[list[list[Rollout]], list[list[list[Credit]]], list[list[Example]]]:
        """What an update trains on, under the present weights: the rollouts with their scores, their credit per segment, and the
        examples of each group. Raises as `policy_update`."""
        algorithm = self._config.algorithm
        plain = [group_of(group, live, algorithm) for group in groups]
        scored, cut = self._score(self._state.params, self._reference, [rollout for group in plain for rollout in group])
        report.cut += cut
        each = iter(scored)
        batch = [[next(each) for _ in group] for group in plain]
        credits = credit.of_batch(batch, algorithm)
        pairs = [zip(group, scored, strict=True) for group, scored in zip(batch, credits, strict=True)]
        return batch, credits, [[own for pair in group for own in of_rollout(*pair, algorithm)] for group in pairs]

    def token_losses(self, examples: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each example [S]: the policy's loss of its trained tokens, weighted as if all of them made one optimizer step, and
        their logprobs, under the present weights."""
        packed = pack(examples, self._shape, self._scaled())
        compiled = jax.jit(objective.token_losses(self._network, self._config.algorithm))
        found = jax.device_get([compiled(self._state.params, batch) for batch in packed.microbatches])
        both = zip(packed.read([losses for losses, _ in found]), packed.read([logprobs for _, logprobs in found]), strict=True)
        return [
            (padded(losses, len(own.ids)), padded(logprobs, len(own.ids)))
            for own, (losses, logprobs) in zip(examples, both, strict=True)
        ]

    def _scaled(self) -> Aggregation:
        """As the schedules have it at the present step."""
        algorithm, step = self._config.algorithm, self.step
        own, observations = algorithm.observation, 0.0
        if own.loss != "none":
            observations = own.coefficient * (max(0.0, 1 - step / own.decay_steps) if own.decay_steps else 1.0)
        warm = 0.0 if step < algorithm.critic_warmup else 1.0
        return replace(self._aggregation, policy=warm, observations=observations)

    def _minibatches(self, groups: int, epoch: int) -> list[np.ndarray]:
        """Indices of the groups of each optimizer step, in an order that depends on seed, step and epoch alone."""
        order = np.random.default_rng(derive_seed(self._config.seed, "order", self.step, epoch)).permutation(groups)
        return [part for part in np.array_split(order, self._config.algorithm.minibatches) if len(part)]

    def _optimize(self, accumulator: _Accumulator, packed: Packed, report: Report, fixed_lr: float = -1.0) -> list[jax.Array]:
        """One optimizer step, not taken when there is nothing to train on. Returns logprobs [B, T] per micro-batch."""
        report.trained += packed.trained
        if not packed.trained:
            report.empty += 1
            return [jnp.zeros(batch.ids.shape) for batch in packed.microbatches]
        total, logprobs = accumulator.run(self._state.params, packed.microbatches)
        self._state, step = self._apply(self._state, total.gradient, jnp.float32(fixed_lr))
        report.steps.append((total.measures, step))
        return logprobs

    def _finish(self, report: Report) -> Metrics:
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
        """RL begins: Adam starts anew. Gradients of the warm start are ten times those of the policy loss; their second moments
        would hold policy updates back for hundreds of steps. A learning-rate warm-up covers the first steps without moments.

        A separate critic, which the warm start does not train, starts from the trunk that it has made, and the policy is now the
        reference of a KL penalty to the initial one."""
        params = self._state.params
        if "critic" in params:
            params = params | {"critic": jax.tree.map(jnp.copy, params["policy"])}
        self._state = self._state._replace(params=params, adam=optimizer.initial(self._config.optimizer, params).adam)
        if self._keeps_reference:
            self._reference = {"policy": jax.tree.map(jnp.copy, params["policy"])}

    @property
    def _keeps_reference(self) -> bool:
        """Whether the reference is a policy of this run, which a resumed one needs again."""
        kl = self._config.algorithm.kl
        return kl.where != "none" and kl.reference == "initial"

    def _first_reference(self, spec: ModelSpec) -> optimizer.Params:
        """Raises ModelError or ValueError when the named model cannot be the reference."""
        path = self._config.algorithm.kl.reference
        if path == "initial":
            return {"policy": jax.tree.map(jnp.copy, self._state.params["policy"])}
        found, policy = hf.load(path)
        if found != spec:
            raise ValueError(
                f"algorithm.kl.reference {path!r} has other sizes than the policy: name a model of the same architecture"
            )
        return {"policy": jax.tree.map(lambda x: jnp.array(x, jnp.float32), policy)}

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
            example(t.rollout_id, segment, segment.action, t.sampling.temperature or 1.0)
            for t, own in zip(rollouts, parts, strict=True)
            for segment in own
        ]
        packed = pack(examples, self._shape, Aggregation())
        found = iter(packed.read([np.asarray(self._score.logprobs(self._state.params, b)) for b in packed.microbatches]))
        return [[padded(next(found), len(segment.ids)) for segment in own] for own in parts]

    def state_tree(self) -> dict[str, np.ndarray]:
        """Parameters, moments and counts by name, and a reference of this run's own, in host memory: a copy, so training may go
        on."""
        leaves = jax.tree_util.tree_leaves_with_path(_snapshot(self._saved()))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    def _saved(self) -> dict[str, Any]:
        return self._state._asdict() | ({"reference": self._reference} if self._keeps_reference else {})

    def restore_tree(self, tree: Mapping[str, np.ndarray]) -> None:
        """Take up what `state_tree` gave. Raises ValueError if it belongs to another model or algorithm."""
        paths, structure = jax.tree_util.tree_flatten_with_path(self._saved())
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        different = sorted(set(names) ^ set(tree))
        different += [n for n, (_, leaf) in zip(names, paths, strict=True) if n in tree and leaf.shape != tree[n].shape]
        if different:
            raise ValueError(
                f"the checkpoint does not fit this configuration: {different[0]} differs ({len(different)} arrays in all)"
            )
        # Through a compiled copy: buffers that JAX made itself can be donated, borrowed ones cannot.
        found = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(structure.unflatten([jnp.asarray(tree[n]) for n in names]))
        self._reference = found.pop("reference", self._reference)
        self._state = optimizer.TrainState(**found)


def _snapshot(tree: Any) -> Any:
    """A copy in host memory. (`jax.device_get` may borrow the buffer instead, which the next step could then not reuse.)"""
    return jax.tree.map(np.array, tree)


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
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.gradient)
            return objective.Contribution(zeros, reducers.start(shapes.measures))

        self._accumulate: Callable = jax.jit(accumulate, donate_argnums=1)
        self._nothing: Callable = jax.jit(nothing)

    def run(self, params: Any, batches: Sequence[Microbatch]) -> tuple[objective.Contribution, list[jax.Array]]:
        total, found = self._nothing(params, batches[0]), []
        for batch in batches:
            total, logprobs = self._accumulate(params, total, batch)
            found.append(logprobs)
        return total, found
