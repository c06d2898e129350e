"""Checkpoints: committed or absent, one at every instant, and never in the way of training."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.checkpoints import COMMIT_MARK, CheckpointError, Checkpoints, committed_steps

ROOT = Path(__file__).parents[2]


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"params/a": np.full((64, 64), step, np.float32), "count": np.int32(step)}


def save_all(checkpoints: Checkpoints, steps: list[int]) -> None:
    for step in steps:
        checkpoints.save(step, arrays(step), {"step": step, "ledger": {"g1": [step, None, "x"]}})
    checkpoints.wait()


def test_a_checkpoint_comes_back_whole_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    save_all(checkpoints, [5, 10, 15])
    assert committed_steps(tmp_path) == [10, 15]
    step, tree, state = checkpoints.restore()
    assert (step, state) == (15, {"step": 15, "ledger": {"g1": [15, None, "x"]}})
    assert tree.keys() == {"params/a", "count"}
    assert all(np.array_equal(tree[name], value) and tree[name].dtype == value.dtype for name, value in arrays(15).items())
    checkpoints.close()


def test_092_saves_after_a_rollback_take_place(tmp_path):
    first = Checkpoints(tmp_path, keep=4)
    save_all(first, [10, 15, 20, 25])
    first.close()
    second = Checkpoints(tmp_path, keep=4)
    assert second.restore(15)[0] == 15
    second.save(20, {"x": np.float32(2)}, {"timeline": 2})
    second.wait()
    assert committed_steps(tmp_path) == [10, 15, 20]
    second.save(25, {"x": np.float32(3)}, {"timeline": 2})
    second.close()
    reader = Checkpoints(tmp_path, keep=4)
    assert reader.restore(20)[2] == {"timeline": 2}
    assert reader.restore()[::2] == (25, {"timeline": 2})


def test_the_last_step_may_be_saved_twice_but_time_does_not_run_backwards(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save_all(checkpoints, [5])
    checkpoints.save(5, arrays(6), {"other": True})
    assert checkpoints.restore()[2]["step"] == 5
    with pytest.raises(CheckpointError, match="step 4 comes after step 5"):
        checkpoints.save(4, arrays(4), {})
    assert committed_steps(tmp_path) == [5]


def test_092_an_unmarked_step_is_absent(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save_all(checkpoints, [5, 10])
    checkpoints.close()
    (tmp_path / "10" / COMMIT_MARK).unlink()
    again = Checkpoints(tmp_path, keep=3)
    assert again.latest() == 5
    assert again.restore()[2]["step"] == 5
    with pytest.raises(CheckpointError, match=r"no committed checkpoint 10 .* it has \[5\]"):
        again.restore(10)
    save_all(again, [10])
    assert committed_steps(tmp_path) == [5, 10]


def test_a_damaged_step_gives_way_to_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save_all(checkpoints, [5, 10])
    checkpoints.close()
    for path in (tmp_path / "10" / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    again = Checkpoints(tmp_path, keep=3)
    assert (again.latest(), again.restore()[0]) == (10, 5)
    with pytest.raises(CheckpointError, match="10 cannot be read"):
        again.restore(10)
    save_all(again, [10])  # from step 5 on, time goes on
    assert again.restore()[2]["step"] == 10
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != COMMIT_MARK:
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read: 10 cannot .*; 5 cannot"):
        Checkpoints(tmp_path, keep=3).restore()


def test_nothing_to_restore_is_said_clearly(tmp_path):
    assert committed_steps(tmp_path / "absent") == []
    with pytest.raises(CheckpointError, match="no committed checkpoint in"):
        Checkpoints(tmp_path).restore()


def test_092_a_failed_save_is_told_and_the_next_one_works(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save_all(checkpoints, [5])

    def save_two() -> None:  # told by this save, or at the latest by the next one
        checkpoints.save(10, arrays(10), {"cannot": object()})
        checkpoints.save(15, arrays(15), {})

    with pytest.raises(CheckpointError, match="10"):
        save_two()
    assert committed_steps(tmp_path) == [5]
    save_all(checkpoints, [20])
    assert committed_steps(tmp_path) == [5, 20]


def test_093_a_sick_state_is_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save_all(checkpoints, [5])
    for bad in (np.nan, np.inf):
        with pytest.raises(CheckpointError, match="step 10 is not saved: params/a is not finite"):
            checkpoints.save(10, {"params/a": np.array([1, bad], np.float32)}, {})
    assert committed_steps(tmp_path) == [5]


def test_094_what_happens_after_a_save_does_not_change_it(tmp_path):
    """The arrays are donated to the next step, or overwritten, while the save is still writing."""
    checkpoints = Checkpoints(tmp_path, keep=20)
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, y = jnp.zeros((256, 256)), np.zeros((1024, 1024), np.float32)
    for step in range(1, 9):
        x, y[:] = advance(x), step
        checkpoints.save(step, {"x": x, "y": y}, {})
    y[:] = -1
    checkpoints.wait()
    for step in range(1, 9):
        tree = checkpoints.restore(step)[1]
        assert (tree["x"] == step).all()
        assert (tree["y"] == step).all()


CHILD = """
import sys, numpy as np
from learner.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
start = 0 if checkpoints.latest() is None else checkpoints.restore()[0]
for step in range(start + 1, start + 10_000):
    arrays = {f"a/{i}": np.full((128, 128), step, np.float32) for i in range(12)}
    checkpoints.save(step, arrays, {"step": step})
    print(step, flush=True)
"""


def test_092_kill_during_saves_always_leaves_a_whole_step(tmp_path):
    draw = random.Random(7)
    seen = 0
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdout is not None
        for _ in range(draw.randint(3, 8)):
            child.stdout.readline()
            assert seen == 0 or committed_steps(tmp_path)  # one is there at every instant
            seen = 1 if committed_steps(tmp_path) else seen
        time.sleep(draw.random() * 0.03)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        reader = Checkpoints(tmp_path, keep=2)
        step, tree, state = reader.restore()
        assert state == {"step": step}
        assert len(tree) == 12
        assert all((array == step).all() for array in tree.values())
        reader.close()
