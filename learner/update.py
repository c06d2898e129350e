"""The training step: rollouts in, better weights and a row of metrics out.

A policy update reads: score → credit → pack → (accumulate micro-batches → apply) for each minibatch. Domains with an
algorithm of their own are scored, credited and packed apart, and make the same optimizer steps (learner/parts.py). Compiled
functions see one shape of micro-batch only, whatever the rollouts.

Dimension key: B rows of a micro-batch, T tokens of a row, S tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.config import RunConfig
from common.record import segments
from common.seeds import derive_seed
from common.types import Status, Trajectory
from learner import credit, objective, optimizer
from learner.canary import Canary
from learner.examples import Live, example, group_of, of_rollout
from learner.gap import Gap
from learner.model import hf
from learner.model.spec import ModelSpec
from learner.pack import Aggregation, Example, Shape, pack, padded
from learner.parts import Accumulator, Load, Part, loads_of, parts_of
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
        self._config, self._shape = config, Shape(config.learner.row_length, config.learner.rows_per_microbatch)
        self._parts = parts = parts_of(config)
        self._numbers = {name: (number, part) for part in parts for number, name in part.domains.items()}
        self._apart = {number: name for part in parts for number, name in part.domains.items()} if len(config.domains) > 1 else {}
        self._network = network = objective.build_network(config.model, config.algorithm, spec)
        if weights is None:
            weights = objective.random_policy(spec, derive_seed(config.seed, "model"))
        self._state = optimizer.initial(config.optimizer, network.initial(weights))
        losses = [objective.policy(network, part.algorithm, part.domains if self._apart else {}) for part in parts]
        self._policy, self._supervised = Accumulator(losses), Accumulator([objective.supervised(network)])
        self._apply = jax.jit(optimizer.make_apply(config.optimizer), donate_argnums=0)
        self._score = Scorer(network, self._shape)
        named = [part.algorithm.kl.reference for part in parts if part.algorithm.kl.where != "none"]
        self._keeps_reference = "initial" in named  # a policy of this run, which a resumed one needs again
        self._reference = self._first_reference(named[0], spec) if named else None
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
        packed = pack(examples, self._shape, Aggregation())
        self._optimize(self._supervised, [Load(0, list(range(len(examples))), packed)], report, lr)
        return self._finish(report)

    def policy_update(self, groups: Sequence[Sequence[Trajectory]], live: Live | None = None, version: int = -1) -> Metrics:
        """One update: epochs x minibatches optimizer steps, each on whole groups.

        `live` masks tokens that are too old; a rollout that it does not name is live. `version` names published
        weights that equal the present parameters: the engine/learner gap is then measured on its tokens, and on those of older
        versions that `published` was told of.

        Raises ValueError for rollouts that have no place in a policy loss, PackError when one does not fit a row, and
        TrainingStopped.
        """
        report = Report()
        batch, credits, examples = self.prepare(groups, live or {}, report)
        everything = [own for group in examples for own in group]
        critical = {number for part in self._parts if part.algorithm.critic != "none" for number in part.domains}
        report.extra |= of_rollouts(batch, credits, bool(self._apart))
        report.extra |= of_values([own for own in everything if own.domain in critical], self._apart)
        for epoch in range(self._config.algorithm.epochs):
            for indices in self._minibatches(len(examples), epoch):
                chosen = [own for index in indices for own in examples[index]]
                first = not report.steps
                loads = self._optimize(self._policy, loads_of(chosen, self._parts, self._shape, self.step), report)
                if first:  # nothing has changed yet: these are the logprobs of the weights that the update began with
                    found = [own for load, logprobs in loads for own in load.packed.read([np.asarray(x) for x in logprobs])]
                    trained = [chosen[index] for load, _ in loads for index in load.indices]
                    report.extra |= self._gap.measure(trained, found, version, everything)
        return self._finish(report)

    def prepare(
        self, groups: Sequence[Sequence[Trajectory]], live: Live, report: Report
    ) -> tuple[list[list[Rollout]], list[list[list[Credit]]], list[list[Example]]]:
        """What an update trains on, under the present weights: the rollouts with their scores, their credit per segment, and the
        examples of each group. Raises as `policy_update`."""
        batch, credits, examples = ([[] for _ in groups] for _ in range(3))
        for part, indices in self._by_part(groups):
            plain = [group_of(groups[index], live, part.algorithm) for index in indices]
            flat = [rollout for group in plain for rollout in group]
            scored, cut = self._score(self._state.params, self._reference, flat, part.algorithm)
            report.cut += cut
            each = iter(scored)
            own = [[next(each) for _ in group] for group in plain]
            for index, group, found in zip(indices, own, credit.of_batch(own, part.algorithm), strict=True):
                batch[index], credits[index] = group, found
                for rollout, parts in zip(group, found, strict=True):
                    number, _ = self._numbers[rollout.trajectory.task.domain]
                    examples[index] += of_rollout(rollout, parts, part.algorithm, number)
        return batch, credits, examples

    def _by_part(self, groups: Sequence[Sequence[Trajectory]]) -> list[tuple[Part, list[int]]]:
        """The indices of each part's groups, of those that have some. Raises ValueError for a domain that the run has not."""
        found: dict[int, tuple[Part, list[int]]] = {}
        for index, group in enumerate(groups):
            name = group[0].task.domain if group else next(iter(self._numbers))
            if name not in self._numbers:
                raise ValueError(f"group {group[0].group_id} is of domain {name!r}; the run has {', '.join(self._numbers)}")
            _, part = self._numbers[name]
            found.setdefault(min(part.domains), (part, []))[1].append(index)
        return list(found.values())

    def token_losses(self, examples: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each example [S]: the policy's loss of its trained tokens, weighted as if all of them made one optimizer step, and
        their logprobs, under the present weights."""
        out: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for load in loads_of(examples, self._parts, self._shape, self.step):
            compiled = jax.jit(objective.token_losses(self._network, self._parts[load.part].algorithm))
            found = jax.device_get([compiled(self._state.params, batch) for batch in load.packed.microbatches])
            both = (load.packed.read([one[which] for one in found]) for which in range(2))
            for index, *own in zip(load.indices, *both, strict=True):
                losses, logprobs = (padded(array, len(examples[index].ids)) for array in own)
                out[index] = losses, logprobs
        return [out[index] for index in range(len(examples))]

    def _minibatches(self, groups: int, epoch: int) -> list[np.ndarray]:
        """Indices of the groups of each optimizer step, in an order that depends on seed, step and epoch alone."""
        order = np.random.default_rng(derive_seed(self._config.seed, "order", self.step, epoch)).permutation(groups)
        return [part for part in np.array_split(order, self._config.algorithm.minibatches) if len(part)]

    def _optimize(
        self, accumulator: Accumulator, loads: Sequence[Load], report: Report, fixed_lr: float = -1.0
    ) -> list[tuple[Load, list[jax.Array]]]:
        """One optimizer step, not taken when there is nothing to train on. Returns the loads that have something, and logprobs
        [B, T] per micro-batch of each."""
        loads = [load for load in loads if load.packed.trained]
        report.trained += sum(load.packed.trained for load in loads)
        if not loads:
            report.empty += 1
            return []
        total, logprobs = accumulator.run(self._state.params, loads)
        self._state, step = self._apply(self._state, total.gradient, jnp.float32(fixed_lr))
        report.steps.append((total.measures, step))
        return list(zip(loads, logprobs, strict=True))

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

    def _first_reference(self, path: str, spec: ModelSpec) -> optimizer.Params:
        """Raises ModelError or ValueError when the named model cannot be the reference."""
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
