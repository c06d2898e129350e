"""Run by test_devices.py in a process with four devices and float64: the loss of a step, however its tokens are spread.

The network is a table, so that nothing but the loss is measured (the product's is float32 inside, whatever it is given).
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from learner import objective
from learner.objective import Contribution, Network, add, build_network, contribution
from learner.pack import Aggregation, Example, Packed, Shape, pack
from tests.learner_math.build import SPEC, config
from tests.learner_math.test_objective import examples

BOUND = 1e-12
ALGORITHMS = {
    "ppo": {
        **{"advantage": "gae", "critic": "shared", "entropy": 0.01, "value_clip": 0.2},
        **{"kl": {"where": "loss"}, "observation": {"loss": "cross_entropy"}},
    },
    "gspo": {"policy_loss": "gspo"},
    "cispo": {"policy_loss": "cispo"},
    "double_sided": {"policy_loss": "double_sided"},
}
AGGREGATIONS = (
    Aggregation("token_mean"),
    Aggregation("seq_mean_token_mean", observations=0.5),
    Aggregation("seq_mean_token_sum"),
    Aggregation("constant", divisor=8.0),
)


class Table(Network):
    """A policy whose logits come from the token before and its place in its segment: rows of tables."""

    def _trunk(self, state, batch):
        policy = SimpleNamespace(logits=lambda hidden: hidden @ state["out"])
        return policy, state["tokens"][batch.ids] + state["places"][batch.positions]


def tables() -> dict:
    rng = np.random.default_rng(7)
    size, words = SPEC.hidden_size, SPEC.vocab_size
    policy = {
        "tokens": rng.normal(size=(words, size)),
        "places": rng.normal(size=(64, size)),
        "out": rng.normal(0, 0.1, (size, words)),
    }
    return {"policy": policy, "value_head": {"kernel": rng.normal(size=size), "bias": np.zeros(())}}


def wide(batch):
    return jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch)


def spreads(own: list[Example], aggregation: Aggregation) -> dict[str, Packed]:
    """The same examples in other rows, orders, micro-batches and paddings."""
    return {
        "one micro-batch": pack(own, Shape(12, 8), aggregation),
        "another order": pack(own[3:] + own[:3], Shape(12, 8), aggregation),
        "several of a row": pack(own[::-1], Shape(20, 2), aggregation),
        "padding": pack(own, Shape(64, 12), aggregation),
    }


def examples_with_targets() -> list[Example]:
    """Whatever is not sampled is observed, but for the first token, which nothing predicts."""
    out = []
    for own in examples(count=8):
        observed = ~own.mask
        observed[0] = False
        out.append(replace(own, observed=observed, answers=int(observed.sum())))
    return out


def check(algorithm: dict) -> None:
    run = config(algorithm=algorithm)
    built = build_network(run.model, run.algorithm, SPEC)
    network = Table(built.graph, built.spec, built.critic)
    compiled, params = jax.jit(contribution(objective.policy(network, run.algorithm))), tables()
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows, whole = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
    for aggregation in AGGREGATIONS:
        found = {}
        for name, packed in spreads(examples_with_targets(), aggregation).items():
            parts = [compiled(params, wide(batch))[0] for batch in packed.microbatches]
            found[name] = reduce(add, parts)
            if name == "one micro-batch":
                (batch,) = packed.microbatches
                found["four devices"], _ = compiled(jax.device_put(params, whole), jax.device_put(wide(batch), rows))
        same(found, f"{algorithm}, {aggregation.name}")


def same(found: dict[str, Contribution], where: str) -> None:
    first = found["one micro-batch"]
    loss = first.measures["loss"].total
    assert loss.dtype == np.float64
    assert max(float(abs(x).max()) for x in jax.tree.leaves(first.gradient)) > 1e-3, where
    for name, other in found.items():
        parts = (jax.tree.leaves((each.measures["loss"], each.gradient)) for each in (other, first))
        for a, b in zip(*parts, strict=True):
            np.testing.assert_allclose(a, b, atol=BOUND, rtol=0, err_msg=f"{where}: {name}")


def main() -> None:
    assert len(jax.devices()) == 4
    for algorithm in ALGORITHMS.values():
        check(algorithm)
    print("equal")


if __name__ == "__main__":
    main()
