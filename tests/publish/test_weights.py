"""Versions on disk: marks, leftovers of a kill, numbers that never repeat; snapshots of donated JAX buffers."""

import time

import ml_dtypes  # noqa: F401 - gives NumPy the name bfloat16
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weights import CHUNK, WeightFolder, nonfinite
from tests.fakes import FakeEngine
from tests.publish.calls import canary, load, save, weights
from tests.publish.test_publisher import publishing


def put(folder, update):
    version = folder.allocate(update)
    folder.write(version, lambda path: save(weights(update), path))
    return version


def test_a_version_is_whole_before_it_is_marked(tmp_path):
    folder = WeightFolder(tmp_path, 1)
    version = folder.allocate(0)
    seen = []

    def spy(path):
        save(weights(1), path)
        seen.append((path.name, folder.stored(), folder.path(version).exists()))

    folder.write(version, spy)
    assert seen == [(".1.partial", [], False)]
    assert folder.stored() == [1]
    assert folder.path(1).is_absolute()
    line = orjson.loads((tmp_path / "versions.jsonl").read_bytes())
    assert {k: line[k] for k in ("version", "update", "incarnation")} == {"version": 1, "update": 0, "incarnation": 1}
    assert set(line) == {"version", "update", "incarnation", "time"}


def test_leftovers_of_a_kill_are_removed_and_their_numbers_stay_used(tmp_path):
    folder = WeightFolder(tmp_path, 1)
    put(folder, 0)
    put(folder, 1)
    (folder.path(1) / "DONE").unlink()  # killed while it deleted version 1
    (tmp_path / "weights" / ".3.partial").mkdir()  # killed while it wrote version 3
    (tmp_path / "weights" / "9").mkdir()  # killed before DONE, and versions.jsonl is lost
    with open(tmp_path / "versions.jsonl", "ab") as file:
        file.write(b'{"version": 4, "upd')
    again = WeightFolder(tmp_path, 2)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["2"]
    assert again.stored() == [2]
    assert put(again, 5) == 10
    assert again.updates() == {1: 0, 2: 1, 10: 5}


def test_a_save_that_raises_leaves_no_version(tmp_path):
    folder = WeightFolder(tmp_path, 1)

    def broken(path):
        save(weights(0), path)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        folder.write(folder.allocate(0), broken)
    assert folder.stored() == []
    assert put(folder, 1) == 2


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=4))
def test_numbers_never_repeat(tmp_path_factory, incarnations):
    """True: allocated and written. False: allocated, never written (skipped). Then the process is killed."""
    run, seen = tmp_path_factory.mktemp("run"), []
    for incarnation, plan in enumerate(incarnations, 1):
        folder = WeightFolder(run, incarnation)
        for written in plan:
            seen.append(folder.allocate(len(seen)))
            if written:
                folder.write(seen[-1], lambda path: None)
        folder.close()
    assert seen == list(range(1, len(seen) + 1))
    assert WeightFolder(run, 99).updates() == {version: version - 1 for version in seen}


def test_retire_unmarks_at_once_and_delete_removes(tmp_path):
    folder = WeightFolder(tmp_path, 1)
    for update in range(4):
        put(folder, update)
    retired = folder.retire({2, 4})
    assert folder.stored() == [2, 4]
    assert [path.name for path in retired] == ["1", "3"]
    folder.delete(retired)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["2", "4"]


def test_a_version_that_is_just_written_is_not_retired_as_an_old_one(tmp_path):
    """It is whole before the publisher calls it the newest; a clean-up in between would leave engines without it for ever."""
    folder = WeightFolder(tmp_path, 1)
    for _ in range(3):
        folder.write(folder.allocate(0), lambda path: (path / "x").touch())
    assert [path.name for path in folder.retire({2}, below=2)] == ["1"]
    assert folder.stored() == [2, 3]
    folder.close()


def test_094_donated_buffers_do_not_change_what_is_published(tmp_path):
    """Every step donates its parameters while a slow writer still saves; each saved tree equals its own step."""
    jax = pytest.importorskip("jax")
    step = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
    params = {"w": jax.numpy.zeros((256, 64)), "b": jax.numpy.zeros(8)}
    saved = {}

    def slow(tree, path):
        time.sleep(0.02)  # training is some steps further by now
        save(tree, path)
        saved[int(path.name.strip(".").split(".")[0])] = load(path)

    with FakeEngine() as engine, publishing(tmp_path, [engine], save=slow) as publisher:
        for update in range(1, 51):
            params = step(params)
            version = publisher.publish(update, jax.device_get(params), canary())
        publisher.wait_ready(version, 20)
        assert saved[version]["w"].max() == 50
        for version, tree in saved.items():
            assert (tree["w"] == publisher.update_of(version)).all()
            assert (tree["b"] == publisher.update_of(version)).all()


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(st.sampled_from([1.0, -0.0, 3e38, -6e4, 1e-40, np.inf, -np.inf, np.nan, -np.nan]), max_size=20),
    st.sampled_from([0, CHUNK - 3, CHUNK + 5]),
)
def test_values_that_are_not_finite_are_counted(dtype, values, before):
    """Those that a cast makes infinite too, wherever they stand in a long array."""
    with np.errstate(over="ignore"):
        array = np.concatenate([np.ones(before), values]).astype(np.dtype(dtype))
    assert nonfinite(array) == np.count_nonzero(~np.isfinite(array.astype(np.float64)))
    assert nonfinite(np.stack([array, array], axis=1).T) == 2 * nonfinite(array)
