"""The run's folder: incarnations, events, metrics, trajectories, TensorBoard, summary; after kills and rollbacks."""

import threading

import jax
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.convert import trajectory_bytes, trajectory_parse
from common.record import segments
from common.types import Source, Task, VersionRun
from learner.inbox import Inbox
from learner.jsonlines import JsonLines, read_lines
from learner.metrics import live, read_metrics
from learner.pack import Aggregation, Shape, pack
from learner.runfolder import RunFolder, read_events, read_trajectories
from tests import records
from tests.learner_math.build import example


@pytest.fixture
def opened(tmp_path):
    """Opens the folder as often as a test starts the learner anew."""
    folders = []

    def open_folder():
        folders.append(RunFolder(tmp_path))
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


def rollout(name, source=Source.POLICY):
    """Two turns; the first was cut in two by new weights."""
    both = (VersionRun(0, 3, "engine-0", "main"), VersionRun(1, 4, "engine-0", "main"))
    first = records.step([1, 2], [7, 8], reward=0.25, versions=both)
    second = records.step([1, 2], [9], 0, 4, reward=0.5, versions=(VersionRun(0, 4, "engine-0", "main"),))
    return records.trajectory(
        first, second,
        rollout_id=name, attempt=2, group_id="g1", task=Task("frozenlake", "t5", 5, {"size": 4}), source=source,
        flags=("USER_ERROR",), metrics={"success": 1.0},
    )  # fmt: skip


def test_incarnations_count_starts(opened, tmp_path):
    assert [opened().incarnation for _ in range(3)] == [1, 2, 3]
    with open(tmp_path / "incarnations.jsonl", "ab") as file:
        file.write(b'{"incarnation": 4, "ti')  # killed while it wrote: nobody ever saw number 4
    assert opened().incarnation == 4
    assert opened().incarnation == 5


def test_014_large_ids_survive_every_file_and_the_device(opened, tmp_path):
    """Field bug 014, in replay files and on the device."""
    ids = [0, 65535, 65536, 151643, 151645]
    made = records.trajectory(records.step(ids, ids), rollout_id="a")
    inbox = Inbox(tmp_path / "inbox", 1)
    stored = trajectory_parse(inbox.read(inbox.append(trajectory_bytes(made))))
    opened().trajectories(1, [stored], [0])
    ((_, read),) = read_trajectories(tmp_path / "trajectories" / "1.parquet")
    mask = np.array([False] * 5 + [True] * 5)
    packed = pack([example("a", segments(read)[0].ids, mask)], Shape(16, 1), Aggregation())
    assert np.asarray(jax.device_put(packed.microbatches[0].ids))[0].tolist() == ids + ids + [0] * 6


def test_events_are_whole_lines_with_time_and_kind(opened, tmp_path):
    folder = opened()
    folder.event("engine", {"state": "ready", "loss": float("nan"), "n": np.int64(3), "kind": "ignored"})
    threads = [threading.Thread(target=lambda: [folder.event("tick", {"text": "x" * 500}) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"time": 1')
    assert len(read_events(tmp_path)) == 201  # the torn line is not there
    opened().event("after")
    event, *_, last = read_events(tmp_path)
    assert list(event)[:3] == ["time", "kind", "incarnation"]
    assert {k: v for k, v in event.items() if k != "time"} == {
        "kind": "engine",
        "incarnation": 1,
        "state": "ready",
        "loss": None,
        "n": 3,
    }
    assert (last["kind"], last["incarnation"]) == ("after", 2)
    assert len(read_events(tmp_path, "tick")) == 200


@settings(deadline=None, max_examples=50)
@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    lines = JsonLines(path)
    for index in range(10):
        lines.append({"index": index, "é": "ü"})
    lines.close()
    whole = path.read_bytes()
    data = whole[:cut]
    path.write_bytes(data)
    kept = data.count(b"\n")
    assert [line["index"] for line in read_lines(path)] == list(range(kept))
    again = JsonLines(path)
    again.append({"index": 99})
    again.close()
    assert [line["index"] for line in read_lines(path)] == [*range(kept), 99]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\nnot json\n')
    with pytest.raises(ValueError, match=r"x\.jsonl line 2 is not JSON"):
        read_lines(tmp_path / "x.jsonl")


def test_metrics_are_flushed_and_non_finite_values_are_null_with_an_event(opened, tmp_path):
    folder = opened()
    with pytest.raises(RuntimeError, match="begin"):
        folder.metrics(1, {"loss": 0.5})
    folder.begin(0)
    folder.metrics(1, {"loss": 0.5, "phase": "rl", "norm": np.float32(np.nan), "kl": float("inf"), "tokens": np.int64(7)})
    (line,) = read_metrics(tmp_path)
    assert {k: v for k, v in line.items() if k != "time"} == {
        "update": 1,
        "incarnation": 1,
        "loss": 0.5,
        "phase": "rl",
        "norm": None,
        "kl": None,
        "tokens": 7,
    }
    (event,) = read_events(tmp_path, "metrics_not_finite")
    assert (event["update"], event["names"], event["values"]) == (1, ["norm", "kl"], ["nan", "inf"])


def test_a_resume_supersedes_later_updates_and_deletes_nothing(opened, tmp_path):
    first = opened()
    first.begin(0)
    for update in range(1, 6):
        first.metrics(update, {"loss": float(update)})
        first.trajectories(update, [rollout(f"1-g{update}")], [0])
    second = opened()
    second.begin(3)  # the checkpoint's update; 4 and 5 are made again
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    second.metrics(4, {"loss": 40.0})
    second.trajectories(4, [rollout("2-g4")], [0])
    third = opened()  # killed before it trained: takes nothing back
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1, 2, 3, 40]
    third.begin(4)
    third.metrics(5, {"loss": 50.0})
    assert [(line["update"], line["incarnation"]) for line in read_metrics(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3)]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 7
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == ["1.parquet", "2.parquet", "3.parquet", "4.parquet", "4.superseded-2.parquet", "5.superseded-2.parquet"]
    assert read_trajectories(tmp_path / "trajectories" / "4.parquet")[0][0]["rollout_id"] == "2-g4"
    assert read_trajectories(tmp_path / "trajectories" / "4.superseded-2.parquet")[0][0]["incarnation"] == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5))
def test_live_lines_are_those_of_replaying_the_run(starts):
    """Slow definition: play the incarnations in order; each goes back to a reached update and overwrites what follows."""
    timeline, begins, lines = [], {}, []
    for incarnation, (wanted, count) in enumerate(starts, 1):
        begin = min(wanted, len(timeline))
        begins[incarnation] = begin
        del timeline[begin:]
        for update in range(begin + 1, begin + count + 1):
            timeline.append({"update": update, "incarnation": incarnation})
            lines.append(timeline[-1])
    assert live(lines, begins) == timeline


def test_trajectories_round_trip(opened, tmp_path):
    folder = opened()
    written = [rollout("a"), rollout("b", Source.REFERENCE)]
    path = folder.trajectories(3, written, [2, 0])
    assert path == tmp_path / "trajectories" / "3.parquet"
    (row, record), (other, _) = read_trajectories(path)
    assert row == {
        "rollout_id": "a",
        "attempt": 2,
        "group_id": "g1",
        "domain": "frozenlake",
        "task_id": "t5",
        "incarnation": 1,
        "update": 3,
        "status": "terminated",
        "reward": 0.25 + 0.5,
        "flags": ["USER_ERROR"],
        "source": "policy",
        "turns": 2,
        "sampled_tokens": 2 + 1,
        "lag_max": 2,
        "versions": [3, 4],
    }
    assert (other["source"], other["sampled_tokens"]) == ("reference", 0)
    assert trajectory_bytes(record) == trajectory_bytes(written[0])
    assert [p.name for p in (tmp_path / "trajectories").iterdir()] == ["3.parquet"]
    with pytest.raises(ValueError, match="zip"):
        folder.trajectories(4, written, [1])
    assert read_trajectories(folder.trajectories(5, [], [])) == []


def test_a_half_written_file_of_trajectories_is_cleared_at_the_next_start(opened, tmp_path):
    opened()
    (tmp_path / "trajectories" / ".7.parquet").write_bytes(b"half")
    opened()
    assert list((tmp_path / "trajectories").iterdir()) == []


def test_tensorboard_shows_the_live_points(opened, tmp_path):
    first = opened()
    first.begin(0)
    for update in (1, 2, 3):
        first.metrics(update, {"train/loss": update / 10, "bad": float("nan"), "phase": "rl"})
    board = EventAccumulator(str(tmp_path))
    board.Reload()  # readable while the run goes on
    assert board.Tags()["scalars"] == ["train/loss"]
    second = opened()
    second.begin(2)
    second.metrics(3, {"train/loss": 0.9})
    board.Reload()
    assert [(e.step, round(e.value, 6)) for e in board.Scalars("train/loss")] == [(1, 0.1), (2, 0.2), (3, 0.9)]


SUMMARY = {
    "config": {"name": "smoke"},
    "seed": 1,
    "updates": 2,
    "wall_seconds": 12.5,
    "rollouts": {"dispatched": 15, "trained": 5, "filtered": 4, "stale": 3, "failed": 2, "cancelled": 1},
    "domains": {},
    "evals": [
        {
            "phase": "init",
            "version": 1,
            "split": "heldout",
            "mode": "greedy",
            "domain": "frozenlake",
            "success": 0.5,
            "n": 8,
            "tasks": 4,
            "ci95": [0.15, 0.85],
            "pass_k": [
                {
                    "k": 2,
                    "tasks": 4,
                    "pass_at": 0.75,
                    "pass_at_ci95": [0.3, 0.95],
                    "pass_all": 0.25,
                    "pass_all_ci95": [0.05, 0.7],
                }
            ],
        }
    ],
    "tokens": {"sampled": 100, "trained": 90},
    "lag": {"mean": 0.5, "max": 2},
    "stale_pool": {"share": 0.25, "lag": {"mean": 3.5, "max": 6}},
    "recompilations_after_warmup": 0,
}


def test_summary_is_written_whole_with_exactly_its_keys(opened, tmp_path):
    path = opened().summary(SUMMARY)
    assert path == tmp_path / "summary.json"
    assert orjson.loads(path.read_bytes()) == SUMMARY
    assert not list(tmp_path.glob(".summary*"))
    absent = {"recompilations_after_warmup": None, "stale_pool": None}  # SGLang does not count, and one pool
    assert orjson.loads(opened().summary(SUMMARY | absent).read_bytes()) == SUMMARY | absent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollouts": {**SUMMARY["rollouts"], "trained": 6}}, r"15 dispatched, but 6 trained .* = 16"),
        ({"rollouts": {**SUMMARY["rollouts"], "cancelled": -1}}, "rollouts.cancelled"),
        ({"lag": {"mean": float("inf"), "max": 0}}, "lag.mean"),
        ({"stale_pool": {"share": 1.5, "lag": {"mean": 0, "max": 0}}}, "stale_pool.share"),
        ({"evals": [{**SUMMARY["evals"][0], "phase": "end"}]}, "evals.0.phase"),
        ({"extra": 1}, "extra"),
        ({"seed": None}, "seed"),
    ],
)
def test_a_wrong_summary_is_refused_and_the_old_one_stays(opened, tmp_path, change, words):
    folder = opened()
    folder.summary(SUMMARY)
    with pytest.raises(ValidationError, match=words):
        folder.summary({**SUMMARY, **change})
    assert orjson.loads((tmp_path / "summary.json").read_bytes()) == SUMMARY
