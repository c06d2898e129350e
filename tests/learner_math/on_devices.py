"""Run by test_devices.py in a process with four devices: one micro-batch on one of them, and its rows over all."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from learner import objective
from learner.objective import build_network, contribution, random_policy
from learner.pack import Aggregation, Shape, pack
from learner.reducers import results
from tests.learner_math.build import SPEC, config
from tests.learner_math.test_objective import examples


def main() -> None:
    run = config(algorithm={"advantage": "gae", "critic": "shared", "entropy": 0.01, "kl": {"where": "loss"}})
    network = build_network(run.model, run.algorithm, SPEC)
    params = network.initial(random_policy(SPEC, 1))
    own = [replace(example, domain=index % 2) for index, example in enumerate(examples(count=8))]
    (batch,) = pack(own, Shape(12, 8), Aggregation("seq_mean_token_mean")).microbatches
    assert (batch.mask.any(axis=1)).sum() >= 4, "every device has something to do"
    compiled = jax.jit(contribution(objective.policy(network, run.algorithm, {0: "a", 1: "b"})))
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    whole = NamedSharding(rows.mesh, PartitionSpec())
    assert len(jax.devices()) == 4
    alone, _ = compiled(params, batch)
    spread, _ = compiled(jax.device_put(params, whole), jax.device_put(batch, rows))
    for a, b in zip(jax.tree.leaves(alone.gradient), jax.tree.leaves(spread.gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert max(float(abs(x).max()) for x in jax.tree.leaves(alone.gradient)) > 1e-2
    one, four = results([alone.measures]), results([spread.measures])
    assert one.keys() == four.keys()
    assert {"entropy", "entropy/a", "entropy/b"} <= one.keys()
    for name in one:
        np.testing.assert_allclose(one[name], four[name], rtol=1e-5, atol=1e-6, err_msg=name)
    print("equal")


if __name__ == "__main__":
    main()
