"""Model directories as Hugging Face lays them out: config.json and safetensors with Qwen3's tensor names.

Stock transformers and SGLang read what `save` writes; `load` reads what they publish, sharded files included. Files
are written aside and renamed, so that a reader sees a whole file or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelError, ModelSpec, read_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

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


def hf_name(path: tuple[Any, ...]) -> str:
    """The Hugging Face name of the parameter at `path` of the NNX state."""
    if path[0] == "blocks":
        return f"model.layers.{path[1]}.{LAYER_NAMES[tuple(map(str, path[2:]))]}"
    return TOP_NAMES[tuple(map(str, path))]


def save(
    params: Qwen3 | nnx.State,
    spec: ModelSpec,
    directory: str | Path,
    dtype: str = "float32",
    eos_id: int | list[int] | None = None,
) -> None:
    """Write config.json and model.safetensors into `directory`, which may exist and hold other files.

    `params` is a model, or its nnx.Param state; tensors are stored as `dtype`, a key of DTYPES.
    """
    state = nnx.state(params, nnx.Param) if isinstance(params, Qwen3) else params
    values = jax.device_get({path: variable[...] for path, variable in nnx.to_flat_state(state)})
    tensors = {}
    for path, value in values.items():
        value = value.T if path[-1] == "kernel" else value  # Hugging Face stores [out, in]
        tensors[hf_name(path)] = np.ascontiguousarray(value.astype(DTYPES[dtype]))
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    aside = target / f".{WEIGHTS}.{os.getpid()}"
    save_file(tensors, aside, metadata={"format": "pt"})
    os.replace(aside, target / WEIGHTS)
    write_config(spec, target, dtype, eos_id)


def write_config(spec: ModelSpec, directory: str | Path, dtype: str, eos_id: int | list[int] | None) -> None:
    """Write config.json aside and rename it."""
    aside = Path(directory) / f".config.json.{os.getpid()}"
    aside.write_text(json.dumps(spec.to_hf(eos_id, dtype), indent=2) + "\n")
    os.replace(aside, Path(directory) / "config.json")


def load(directory: str | Path) -> tuple[ModelSpec, nnx.State]:
    """The spec and the float32 parameters (NumPy) of a model directory; `build` or nnx.update puts them into a model.

    Raises ModelError for a directory without weights and for tensors that are missing, extra or of another shape.
    """
    spec = ModelSpec.from_hf(read_config(directory))
    tensors = dict(_tensors(Path(directory)))
    flat = []
    for path, variable in nnx.to_flat_state(abstract_state(spec)):
        name = hf_name(path)
        if name not in tensors:
            raise ModelError(f"{directory}: tensor {name} is missing; the weights do not belong to its config.json")
        value = tensors.pop(name).astype(np.float32)
        value = value.T if path[-1] == "kernel" else value
        if value.shape != variable.shape:
            raise ModelError(
                f"{directory}: tensor {name} gives shape {value.shape}, config.json wants {variable.shape} (as [in, out]);"
                " the weights do not belong to its config.json"
            )
        flat.append((path, nnx.Param(np.ascontiguousarray(value))))
        if path == ("embedding",) and spec.tie_embeddings and np.array_equal(tensors.get("lm_head.weight", ()), value):
            del tensors["lm_head.weight"]  # some exporters store the tied head a second time
    if tensors:
        raise ModelError(
            f"{directory}: unknown tensor {min(tensors)} ({len(tensors)} in all); config.json describes no such part"
        )
    return spec, nnx.from_flat_state(flat)


def build(spec: ModelSpec, state: nnx.State, dtype: str = "float32", remat: bool = False) -> Qwen3:
    """A model around parameters from `load`, without drawing random ones first."""
    model = nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0), dtype=DTYPES[dtype], remat=remat))
    nnx.update(model, jax.tree.map(jax.numpy.asarray, state))
    return model


def abstract_state(spec: ModelSpec) -> nnx.State:
    """Shapes and dtypes of the parameters."""
    return nnx.state(nnx.eval_shape(lambda: Qwen3(spec, rngs=nnx.Rngs(0))), nnx.Param)


def random_state(spec: ModelSpec, seed: int = 0) -> nnx.State:
    """Random parameters (NumPy), for a model that gets its weights later; nothing is compiled to make them."""
    generator = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.ones(leaf.shape, np.float32)
        return generator.normal(0, 0.02, leaf.shape).astype(np.float32)

    return jax.tree.map(draw, abstract_state(spec))


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model directory. Raises ModelError when there are none, or one of the index is gone."""
    folder = Path(directory)
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} has no weight_map of files ({error!r}); copy it again") from error
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{directory} has no weights: {name} is missing; copy it there, or start from random weights")
    return [folder / name for name in names]


def _tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in weight_files(directory):
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is not a safetensors file: {error}; write it again") from error
