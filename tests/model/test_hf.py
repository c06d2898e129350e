"""Model directories: round trips, stock readers, and one clear error for everything that does not fit."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from common.config import ModelConfig
from learner.model import hf, tensorfiles
from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelError, ModelSpec, eos_ids, read_config, spec_from_config

SPEC = ModelSpec(31, 16, 24, 2, 4, 2, 8, 5_000.0, max_positions=77)
UNTIED = ModelSpec(31, 16, 24, 2, 4, 2, 8, 5_000.0, tie_embeddings=False)
ARGS = (np.arange(12, dtype=np.int32)[None], np.arange(12, dtype=np.int32)[None], np.ones((1, 12), np.int32))


def make_model(spec):
    return hf.build(spec, hf.random_state(spec, seed=3))


@partial(jax.jit, static_argnums=0)
def _forward(graph, state):
    model = nnx.merge(graph, state)
    return model.logits(model(*ARGS))


def forward(model):
    return np.asarray(_forward(nnx.graphdef(model), nnx.state(model)))


@pytest.mark.parametrize("spec", [SPEC, UNTIED])
def test_a_saved_and_loaded_model_is_bit_equal(tmp_path, spec):
    model = make_model(spec)
    hf.save(model, spec, tmp_path, eos_id=2)
    again, state = hf.load(tmp_path)
    assert again == spec
    assert eos_ids(read_config(tmp_path)) == (2,)
    np.testing.assert_array_equal(forward(hf.build(again, state)), forward(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]  # nothing left aside


def test_names_and_orientation_are_hugging_faces(tmp_path):
    model = make_model(UNTIED)
    hf.save(nnx.state(model, nnx.Param), UNTIED, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 2 * 11
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (16, 16)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (16, 24)  # [out, in]
    np.testing.assert_array_equal(tensors["lm_head.weight"], np.asarray(model.head.kernel[...]).T)
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.q_norm.weight"], model.blocks[1].attention.q_norm.scale[...])


def test_bfloat16_rounds_once(tmp_path):
    state = nnx.state(make_model(SPEC), nnx.Param)
    hf.save(state, SPEC, tmp_path, dtype="bfloat16")
    _, loaded = hf.load(tmp_path)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        assert after.dtype == np.float32
        np.testing.assert_array_equal(after, np.asarray(before).astype(ml_dtypes.bfloat16).astype(np.float32))


def sharded(folder, state, dtype):
    """A model directory of five or more files."""
    tensors = hf.snapshot(state, dtype)
    hf.write_config(UNTIED if "lm_head.weight" in tensors else SPEC, folder, dtype, 2)
    tensorfiles.write(tensors, folder, 3_000)
    assert len(list(folder.glob("*.safetensors"))) >= 5


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("spec", [SPEC, UNTIED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_an_engine_maps_is_what_the_trainer_had(tmp_path, spec, dtype, shards):
    """Bit for bit in the published dtype, after the trainer's buffers are gone; and the same model computes with them."""
    state = jax.tree.map(jnp.array, nnx.state(make_model(spec), nnx.Param))
    wanted = {hf.hf_name(p): np.array(v[...], hf.DTYPES[dtype]) for p, v in nnx.to_flat_state(state)}
    if shards:
        sharded(tmp_path, state, dtype)
    else:
        hf.write(tensors := hf.snapshot(state, dtype), spec, tmp_path, 2)
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(state)
        assert {name: array.tobytes() for name, array in tensors.items()} == {n: a.tobytes() for n, a in load_all(tmp_path)}
    read_spec, places = hf.read(tmp_path)
    params = hf.on_device(places, dtype)
    assert (read_spec, read_config(tmp_path)["torch_dtype"]) == (spec, dtype)
    for place, param in nnx.to_flat_state(params):
        stored = np.asarray(param[...])
        turned = stored.T if place[-1] == "kernel" else stored
        assert (turned.dtype.name, turned.tobytes()) == (dtype, wanted[hf.hf_name(place)].tobytes())
        if stored.nbytes % tensorfiles.ALIGNMENT == 0:
            assert param[...].unsafe_buffer_pointer() == places[place].ctypes.data  # not copied
    close = 1e-5 if dtype == "float32" else 0.05
    ours = hf.build(*hf.load(tmp_path), dtype=dtype)
    np.testing.assert_allclose(forward(hf.build_stored(spec, params, dtype)), forward(ours), rtol=close, atol=close)


def test_a_snapshot_shares_no_buffer_with_the_trainer():
    """A shared one could not be donated to the next step, which would copy it."""
    state = jax.tree.map(jnp.array, nnx.state(make_model(SPEC), nnx.Param))
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    assert own.isdisjoint(array.ctypes.data for array in hf.snapshot(state, "float32").values())


def test_an_engine_of_another_dtype_casts(tmp_path):
    state = nnx.state(make_model(UNTIED), nnx.Param)
    hf.save(state, UNTIED, tmp_path)
    params = hf.on_device(hf.read(tmp_path)[1], "bfloat16")
    for cast, direct in zip(jax.tree.leaves(params), jax.tree.leaves(hf.stored(state, "bfloat16")), strict=True):
        assert cast.dtype == direct.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(cast), np.asarray(direct))


def test_the_trainers_weights_are_copies(tmp_path):
    """Loaded once, and then the directory may change under it."""
    hf.save(make_model(SPEC), SPEC, tmp_path)
    for leaf in jax.tree.leaves(hf.load(tmp_path)[1]):
        assert (leaf.flags.writeable, leaf.flags.c_contiguous, leaf.dtype) == (True, True, np.float32)


def load_all(folder):
    return [pair for path in folder.glob("*.safetensors") for pair in load_file(path).items()]


def test_sharded_files_are_read(tmp_path):
    model = make_model(SPEC)
    hf.save(model, SPEC, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(forward(hf.build(*hf.load(tmp_path))), forward(model))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        hf.load(tmp_path)
    for broken in ("{", "[]", '{"weight_map": null}', "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(ModelError, match=r"index\.json has no weight_map of files"):
            hf.load(tmp_path)


def _without_weights(folder, tensors):
    (folder / "model.safetensors").unlink()


def _missing(folder, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def _extra(folder, tensors):
    save_file(tensors | {"model.layers.2.mlp.up_proj.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")


def _wrong_shape(folder, tensors):
    save_file(tensors | {"model.norm.weight": np.ones(15, np.float32)}, folder / "model.safetensors")


def _untied_head(folder, tensors):
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")


def _cut_short(folder, tensors):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder, tensors):
    (folder / "model.safetensors").write_bytes(b"not a file of tensors")


def _no_config(folder, tensors):
    (folder / "config.json").unlink()


def _bad_config(folder, tensors):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_weights, "has no weights: model.safetensors is missing"),
        (_missing, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (_extra, "unknown tensor model.layers.2.mlp.up_proj.weight (1 in all)"),
        (_wrong_shape, "tensor model.norm.weight gives shape (15,), config.json wants (16,)"),
        (_untied_head, "unknown tensor lm_head.weight"),
        (_cut_short, "is not a safetensors file"),
        (_garbage, "is not a safetensors file"),
        (_no_config, "no readable config.json"),
        (_bad_config, "is not JSON"),
    ],
)
def test_a_damaged_directory_is_one_clear_error(tmp_path, damage, message):
    hf.save(make_model(SPEC), SPEC, tmp_path)
    damage(tmp_path, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError) as error:
        hf.load(tmp_path)
    assert message in str(error.value)
    with pytest.raises(ModelError):
        hf.read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tied_head_that_is_stored_twice_is_accepted(tmp_path):
    hf.save(make_model(SPEC), SPEC, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, tmp_path / "model.safetensors")
    assert hf.load(tmp_path)[0] == SPEC


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "a size is no number"),
        ({"hidden_size": None}, "a size is no number"),
        ({"rope_theta": "x", "rope_parameters": {}}, "a size is no number"),
    ],
)
def test_configurations_that_the_forward_pass_cannot_serve(change, message):
    with pytest.raises(ModelError) as error:
        ModelSpec.from_hf(SPEC.to_hf(2, "float32") | change)
    assert message in str(error.value)


def test_a_missing_key_is_named():
    config = SPEC.to_hf(2, "float32")
    del config["num_hidden_layers"]
    with pytest.raises(ModelError, match="no 'num_hidden_layers'"):
        ModelSpec.from_hf(config)


def test_older_and_newer_rope_keys_are_both_read():
    config = SPEC.to_hf(2, "float32")
    for key in ("rope_theta", "rope_parameters"):
        assert ModelSpec.from_hf({k: v for k, v in config.items() if k != key}).rope_theta == 5_000.0


def test_transformers_reads_our_config():
    from transformers import Qwen3Config

    config = Qwen3Config(**SPEC.to_hf(2, "float32"))
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings, config.eos_token_id) == (8, 2, True, 2)
    assert config.rope_parameters["rope_theta"] == 5_000.0
    assert ModelSpec.from_hf(config.to_dict()) == SPEC


def test_spec_from_a_runs_configuration():
    spec = spec_from_config(ModelConfig(), vocab_size=2000)
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.rope_theta) == (2000, 96, 3, 10_000.0)
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(hf.abstract_state(spec))) == 496_944


def test_random_states_need_no_compilation_and_have_the_models_shapes():
    state = hf.random_state(UNTIED)
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, nnx.state(Qwen3(UNTIED, rngs=nnx.Rngs(0)), nnx.Param))
    assert np.isfinite(forward(hf.build(UNTIED, state))).all()
