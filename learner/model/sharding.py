"""How parameters and batches lie on a mesh: one table from logical axis to mesh axis.

The mesh has two axes: `fsdp` splits the batch and one axis of every matrix, `tensor` splits heads, the MLP and the
vocabulary. A parameter axis that a mesh axis does not divide is an error of the configuration, and JAX says so.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("fsdp", "tensor")

RULES: dict[str, str | None] = {
    "batch": "fsdp",
    "time": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
}

PARAMETER_AXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("embedding",): ("vocab", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("q", "kernel"): ("embed", "heads"),
    ("k", "kernel"): ("embed", "kv_heads"),
    ("v", "kernel"): ("embed", "kv_heads"),
    ("o", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
}


def make_mesh(fsdp: int, tensor: int = 1) -> Mesh:
    """The first fsdp · tensor devices. Raises ValueError when there are fewer."""
    devices = jax.devices()
    if len(devices) < fsdp * tensor:
        raise ValueError(f"a mesh of {fsdp} x {tensor} needs {fsdp * tensor} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[: fsdp * tensor]).reshape(fsdp, tensor), MESH_AXES)


def partition(*axes: str) -> PartitionSpec:
    """The mesh axes of an array whose axes have these logical names."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def parameter_axes(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Logical axes of the parameter at `path` of the NNX state; everything not in the table is a norm's scale."""
    return PARAMETER_AXES.get(tuple(map(str, path[-2:])), ("norm",))


def shard_parameters(state: nnx.State, mesh: Mesh) -> nnx.State:
    """The same values, laid out over the mesh."""

    flat = []
    for path, variable in nnx.to_flat_state(state):
        layout = NamedSharding(mesh, partition(*parameter_axes(path)))
        flat.append((path, variable.replace(jax.device_put(variable[...], layout))))
    return nnx.from_flat_state(flat)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The layout of [B, T] arrays: rows over fsdp."""
    return NamedSharding(mesh, partition("batch", "time"))
