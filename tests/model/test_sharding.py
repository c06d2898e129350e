"""The sharding table on four fake CPU devices, in a process of its own: devices are counted when JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flax import nnx

from learner.model import hf
from learner.model.sharding import PARAMETER_AXES, RULES, parameter_axes
from learner.model.spec import ModelSpec

ROOT = Path(__file__).parents[2]
SPEC = ModelSpec(32, 16, 24, 2, 4, 2, 8, 10_000.0, tie_embeddings=False)

SCRIPT = """
import jax, numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from learner.model import hf
from learner.model.sharding import batch_sharding, make_mesh, shard_parameters
from tests.model.test_sharding import SPEC

model = hf.build(SPEC, hf.random_state(SPEC))
graph, state = nnx.split(model)
ids = np.arange(48, dtype=np.int32).reshape(4, 12) % 32
arguments = (ids, np.tile(np.arange(12, dtype=np.int32), (4, 1)), np.ones((4, 12), np.int32))

@jax.jit
def forward(state, *arguments):
    model = nnx.merge(graph, state)
    return model.logits(model(*arguments))

want = np.asarray(forward(state, *arguments))
for fsdp, tensor in ((4, 1), (2, 2)):
    mesh = make_mesh(fsdp, tensor)
    placed = shard_parameters(state, mesh)
    flat = dict(nnx.to_flat_state(placed))
    q, down = flat[("blocks", 0, "attention", "q", "kernel")][...], flat[("blocks", 1, "mlp", "down", "kernel")][...]
    assert q.sharding.spec == P("fsdp", "tensor") and down.sharding.spec == P("tensor", "fsdp")
    assert q.addressable_shards[0].data.shape == (16 // fsdp, 32 // tensor)
    assert flat[("norm", "scale")][...].sharding.spec == P(None)
    rows = [jax.device_put(a, batch_sharding(mesh)) for a in arguments]
    assert rows[0].addressable_shards[0].data.shape == (4 // fsdp, 12)
    np.testing.assert_allclose(forward(placed, *rows), want, atol=1e-5)
try:
    make_mesh(4, 2)
except ValueError as error:
    assert "needs 8 devices, there are 4" in str(error)
else:
    raise AssertionError("a mesh larger than the machine")
print("sharded forward passes agree")
"""


def test_sharded_forward_passes_agree():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert "agree" in result.stdout


def test_every_parameter_is_in_the_table_or_a_norm():
    for path, leaf in nnx.to_flat_state(hf.abstract_state(SPEC)):
        axes = parameter_axes(path)
        assert len(axes) == len(leaf.shape)
        assert all(axis in RULES for axis in axes)
        assert (axes == ("norm",)) == (path[-1] == "scale")


def test_no_parameter_uses_a_mesh_axis_twice():
    for axes in PARAMETER_AXES.values():
        assert len({RULES[axis] for axis in axes}) == len(axes)
