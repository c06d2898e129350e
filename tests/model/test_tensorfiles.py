"""Weights on disk: bit-exact through stock safetensors and through the map, aligned, in shards; damage is one clear error."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from learner.model.spec import ModelError
from learner.model.tensorfiles import ALIGNMENT, DTYPES, INDEX, WEIGHTS, mapped, write


def bits(array):
    return array.dtype.name, array.shape, array.tobytes()


def tensor(dtype, shape, seed):
    """Any bits at all, NaN included."""
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(DTYPES[dtype]).reshape(shape)


TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.builds(
        tensor,
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(1, 9) | st.just(64), min_size=1, max_size=3).map(tuple),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.sampled_from([1, 200, 5_000, 10**9]))
def test_what_is_written_is_read_bit_for_bit_by_us_and_by_stock_safetensors(tmp_path_factory, tensors, limit):
    folder = tmp_path_factory.mktemp("w")
    write(tensors, folder, limit)
    wanted = {name: bits(array) for name, array in tensors.items()}
    assert {name: bits(array) for name, array in mapped(folder)} == wanted
    total = sum(array.nbytes for array in tensors.values())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"] == {"total_size": total}
        assert sorted(set(index["weight_map"].values())) == files
        assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        places = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    else:
        assert files == [WEIGHTS]
        places = load_file(folder / WEIGHTS)
    assert {name: bits(array) for name, array in places.items()} == wanted
    for file in files:
        with safe_open(folder / file, "np") as opened:
            names = opened.keys()
            assert opened.metadata() == {"format": "pt"}  # without it, transformers refuses the file
        assert len(names) == 1 or sum(tensors[name].nbytes for name in names) <= limit


@settings(deadline=None, max_examples=30)
@given(TENSORS)
def test_tensors_begin_where_a_cpu_can_compute_on_them(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("w")
    write(tensors, folder)
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    assert (8 + length) % ALIGNMENT == 0
    assert all(header[name]["data_offsets"][0] % ALIGNMENT == 0 for name in tensors if tensors[name].nbytes % ALIGNMENT == 0)


def test_a_model_written_over_another_leaves_nothing_of_it(tmp_path):
    (tmp_path / "other.safetensors").touch()
    a = {f"t{i}": np.full((4, 16), i, np.float32) for i in range(4)}  # 256 bytes each
    b = {"t": np.ones(3, np.float32)}
    for tensors, limit, shards in ((a, 300, 4), (a, 600, 2), (b, 600, 1), (a, 600, 2)):
        write(tensors, tmp_path, limit)
        files = (
            {f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)} | {INDEX} if shards > 1 else {WEIGHTS}
        )
        assert {path.name for path in tmp_path.iterdir()} == files | {"other.safetensors"}
        assert sorted(name for name, _ in mapped(tmp_path)) == sorted(tensors)


def test_the_largest_shard_is_begun_first_and_one_tensor_may_be_larger_than_a_shard(tmp_path):
    write({"a": np.zeros(8, np.float32), "b": np.zeros(800, np.float32), "c": np.zeros(16, np.float32)}, tmp_path, 100)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [name for name, _ in sorted(index.items(), key=lambda item: item[1])] == ["b", "c", "a"]


def _cut(raw):
    return raw[:-1]


def _cut_in_the_header(raw):
    return raw[:40]


def _longer(raw):
    return raw + b"\0"


def _empty(raw):
    return b""


@pytest.mark.parametrize("damage", [_cut, _cut_in_the_header, _longer, _empty])
def test_a_damaged_file_is_refused_before_it_is_read(tmp_path, damage):
    write({"a": np.ones((4, 16), np.float32), "b": np.ones((4, 16), np.float32)}, tmp_path, 300)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is not a safetensors file") as error:
        list(mapped(tmp_path))
    assert "\n" not in str(error.value)


def test_numbers_that_are_no_floats_are_refused(tmp_path):
    save_file({"a": np.ones(3, np.int64)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"tensor a is stored as I64; a model's weights are one of F32, BF16, F16"):
        list(mapped(tmp_path))


def test_what_is_mapped_outlives_its_files(tmp_path):
    tensors = {f"t{i}": tensor("bfloat16", (64, 1024), i) for i in range(4)}
    write(tensors, tmp_path, 2**18)
    found = dict(mapped(tmp_path))
    assert not any(array.flags.writeable or array.flags.owndata for array in found.values())
    shutil.rmtree(tmp_path)
    assert {name: bits(array) for name, array in found.items()} == {name: bits(array) for name, array in tensors.items()}


def test_every_thread_of_a_write_that_fails_is_heard(tmp_path):
    (tmp_path / "model-00002-of-00002.safetensors").mkdir()
    with pytest.raises(OSError, match="model-00002-of-00002"):
        write({"a": np.ones(64, np.float32), "b": np.ones(64, np.float32)}, tmp_path, 256)
    assert not (tmp_path / INDEX).exists()
