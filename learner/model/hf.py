"""Model directories as Hugging Face lays them out: config.json and safetensors with Qwen3's tensor names.

Stock transformers and SGLang read what `save` and `write` leave behind; `load` and `read` read what they publish, sharded
files included. The trainer keeps a matrix as [in, out]; files and the embedded engine keep it as [out, in] ("stored"), so
that it is turned once, on the trainer's device, for every version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from learner.model import tensorfiles
from learner.model.qwen3 import Linear, Qwen3
from learner.model.spec import ModelError, ModelSpec, read_config
from learner.model.tensorfiles import DTYPES

Place = tuple[Any, ...]  # of a parameter in the NNX state

LAYER_NAMES = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("attention", "q", "kernel"): "self_attn.q_proj.weight",
    ("attention", "k", "kernel"): "self_attn.k_proj.weight",
    ("attention", "v", "kernel"): "self_attn.v_proj.weight",
    ("attention", "o", "kernel"): "self_attn.o_proj.weight",
    ("attention", "q_norm", "scale"): "self_attn.q_norm.weight",
    ("attention", "k_norm", "scale"): "self_attn.k_norm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
    ("mlp", "up", "kernel"): "mlp.up_proj.weight",
    ("mlp", "down", "kernel"): "mlp.down_proj.weight",
}
TOP_NAMES = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}


def hf_name(place: Place) -> str:
    """The Hugging Face name of the parameter at `place`."""
    if place[0] == "blocks":
        return f"model.layers.{place[1]}.{LAYER_NAMES[tuple(map(str, place[2:]))]}"
    return TOP_NAMES[tuple(map(str, place))]


@partial(jax.jit, static_argnames="dtype")
def stored(state: nnx.State, dtype: str) -> nnx.State:
    """Parameters as files and engines keep them: in `dtype`, matrices as [out, in]. Every buffer is a new one, since
    it comes out of a compiled function: the caller may donate `state` to its next step."""
    flat = []
    for place, variable in nnx.to_flat_state(state):
        value = variable[...].T if place[-1] == "kernel" else variable[...]
        flat.append((place, nnx.Param(jnp.asarray(value, DTYPES[dtype]))))
    return nnx.from_flat_state(flat)


def snapshot(state: nnx.State, dtype: str) -> dict[str, np.ndarray]:
    """Parameters (float32, of the trainer) as they are published: Hugging Face's names and layout, `dtype`, in host memory."""
    return named(stored(state, dtype))


def named(params: nnx.State) -> dict[str, np.ndarray]:
    """Stored parameters in host memory, by Hugging Face's names."""
    return jax.device_get({hf_name(place): variable[...] for place, variable in nnx.to_flat_state(params)})


def save(
    params: Qwen3 | nnx.State,
    spec: ModelSpec,
    directory: str | Path,
    dtype: str = "float32",
    eos_id: int | list[int] | None = None,
) -> None:
    """Write config.json and the weights into `directory`, which may exist and hold other files.

    `params` is a model, or its nnx.Param state; tensors are stored as `dtype`, a key of DTYPES.
    """
    state = nnx.state(params, nnx.Param) if isinstance(params, Qwen3) else params
    write(snapshot(state, dtype), spec, directory, eos_id)


def write(tensors: Mapping[str, np.ndarray], spec: ModelSpec, directory: str | Path, eos_id: int | list[int] | None) -> None:
    """`save`, of a snapshot."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensorfiles.write(tensors, target)
    write_config(spec, target, tensors[TOP_NAMES["embedding",]].dtype.name, eos_id)


def write_config(spec: ModelSpec, directory: str | Path, dtype: str, eos_id: int | list[int] | None) -> None:
    """Write config.json aside and rename it."""
    aside = Path(directory) / f".config.json.{os.getpid()}"
    aside.write_text(json.dumps(spec.to_hf(eos_id, dtype), indent=2) + "\n")
    os.replace(aside, Path(directory) / "config.json")


def read(directory: str | Path) -> tuple[ModelSpec, dict[Place, np.ndarray]]:
    """The spec and the stored parameters of a model directory, mapped and not copied: as long as they are used, its files
    may be deleted, but not changed.

    Raises ModelError for a directory without weights and for tensors that are missing, extra or of another shape.
    """
    spec = ModelSpec.from_hf(read_config(directory))
    tensors = dict(tensorfiles.mapped(directory))
    found = {}
    for place, variable in nnx.to_flat_state(abstract_state(spec)):
        name = hf_name(place)
        if name not in tensors:
            raise ModelError(f"{directory}: tensor {name} is missing; the weights do not belong to its config.json")
        wanted = variable.shape[::-1] if place[-1] == "kernel" else variable.shape
        found[place] = value = tensors.pop(name)
        if value.shape != wanted:
            raise ModelError(
                f"{directory}: tensor {name} gives shape {value.shape}, config.json wants {wanted};"
                " the weights do not belong to its config.json"
            )
        if place == ("embedding",) and spec.tie_embeddings and np.array_equal(tensors.get("lm_head.weight", ()), value):
            del tensors["lm_head.weight"]  # some exporters store the tied head a second time
    if tensors:
        raise ModelError(
            f"{directory}: unknown tensor {min(tensors)} ({len(tensors)} in all); config.json describes no such part"
        )
    return spec, found


def load(directory: str | Path) -> tuple[ModelSpec, nnx.State]:
    """The spec and the trainer's float32 parameters (NumPy, copies); `build` or nnx.update puts them into a model.

    Raises ModelError as `read` does.
    """
    spec, tensors = read(directory)
    flat = [
        (place, nnx.Param(np.array(value.T if place[-1] == "kernel" else value, np.float32, order="C")))
        for place, value in tensors.items()
    ]
    return spec, nnx.from_flat_state(flat)


def on_device(tensors: Mapping[Place, np.ndarray], dtype: str) -> nnx.State:
    """Stored parameters of `read` as an engine computes with them. On a CPU those that have `dtype` stay in the mapped file."""
    values = jax.device_put([np.asarray(value, DTYPES[dtype]) for value in tensors.values()])
    jax.block_until_ready(values)
    return nnx.from_flat_state([(place, nnx.Param(value)) for place, value in zip(tensors, values, strict=True)])


def stored_graph(spec: ModelSpec, dtype: str) -> nnx.GraphDef[Qwen3]:
    """A model of stored parameters, without them."""
    model = nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0), dtype=DTYPES[dtype]))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.transposed = True
    return nnx.graphdef(model)


def build_stored(spec: ModelSpec, params: nnx.State, dtype: str) -> Qwen3:
    """A model for engines, around stored parameters."""
    return nnx.merge(stored_graph(spec, dtype), params)


def build(spec: ModelSpec, state: nnx.State, dtype: str = "float32", remat: bool = False) -> Qwen3:
    """A model around parameters from `load`, without drawing random ones first."""
    model = nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0), dtype=DTYPES[dtype], remat=remat))
    nnx.update(model, jax.tree.map(jax.numpy.asarray, state))
    return model


@lru_cache(maxsize=4)
def abstract_state(spec: ModelSpec) -> nnx.State:
    """Shapes and dtypes of the parameters. Kept: making it takes a second for a real model, in every weight update."""
    return nnx.state(nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0))), nnx.Param)


def random_state(spec: ModelSpec, seed: int = 0) -> nnx.State:
    """Random parameters (NumPy), for a model that gets its weights later; nothing is compiled to make them."""
    generator = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.ones(leaf.shape, np.float32)
        return generator.normal(0, 0.02, leaf.shape).astype(np.float32)

    return jax.tree.map(draw, abstract_state(spec))
