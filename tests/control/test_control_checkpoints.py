"""What a checkpoint of the control plane holds, and what a resume makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.control.scripted import (
    Clock,
    EventLog,
    engine,
    hand_in,
    lease,
    make_control,
    publish,
    started,
    trajectory,
)
from tests.processes import open_files


def test_resume_keeps_waiting_rollouts_and_issues_again_what_was_leased(tmp_path):
    control, _, _ = started(tmp_path)
    assigned = lease(control)
    for i, a in enumerate(assigned[:5]):
        hand_in(control, trajectory(a, reward=float(i)))
    saved = json.loads(json.dumps(control.state()))
    control.committed(saved)
    hand_in(control, trajectory(assigned[5]))  # after the checkpoint: of the lost timeline

    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert events.of("restored") == [{"update": 0, "waiting": 5, "rollouts": control.counts()}]
    assert hand_in(again, trajectory(assigned[6]), incarnation=1) == "SUPERSEDED"
    again.start_rl()
    again.set_engines([engine(1, "updating")])
    assert lease(again) == []  # 096: nothing starts before the restored weights serve
    publish(again, 2, 0)
    again.set_engines([engine(2)])
    reissued = lease(again)
    assert [(a.rollout_id, a.sampling.seed) for a in reissued] == [(a.rollout_id, a.sampling.seed) for a in assigned[5:]]
    for a in reissued:
        assert hand_in(again, trajectory(a, version=2)) == "STORED"
    batch = again.take(0)
    assert [t.total_reward for t in batch.trajectories] == [0.0, 1.0, 2.0, 3.0]
    again.commit(batch)
    batch = again.take(0)
    again.commit(batch)
    assert again.counts()["trained"] == 8 == again.counts()["dispatched"]
    publish(again, 3, 2)
    again.set_engines([engine(3)])
    assert {a.rollout_id.split("-")[0] for a in lease(again)} == {"2"}


def test_a_rollout_whose_spooled_bytes_are_gone_is_issued_again(tmp_path):
    control, _, _ = started(tmp_path)
    for a in lease(control, 2):
        hand_in(control, trajectory(a))
    saved = control.state()
    for path in (tmp_path / "inbox").glob("*.spool"):
        path.unlink()
    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert len(events.of("spool_lost")) == 2
    again.start_rl()
    publish(again, 2, 0)
    again.set_engines([engine(2)])
    assert [a.rollout_id for a in lease(again, 2)] == ["1-g000000-0", "1-g000000-1"]


def test_spool_files_go_once_a_committed_checkpoint_does_not_need_them(tmp_path):
    control, _, _ = started(tmp_path, checkpoint={"keep": 1})
    spool = tmp_path / "inbox"

    def files():
        return sorted(path.name for path in spool.glob("*.spool"))

    for a in lease(control, 4):
        hand_in(control, trajectory(a))
    first = control.state()
    control.committed(first)
    assert files() == ["0001-000000.spool"]
    batch = control.take(0)
    control.commit(batch)
    control.committed(first)
    assert files() == ["0001-000000.spool"]  # finished, but the only checkpoint would read it
    publish(control, 2, 1)
    control.set_engines([engine(2)])
    for a in lease(control, 2):
        hand_in(control, trajectory(a, version=2))
    second = control.state()
    assert second["spool"] == ["0001-000001.spool"]
    assert len(files()) == 2  # saved, but not committed
    control.committed(first)
    assert len(files()) == 2  # the newer file holds rollouts that still wait
    control.committed(second)
    assert files() == ["0001-000001.spool"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files, which Linux alone shows")
def test_a_state_is_told_when_the_disk_has_what_it_names(tmp_path):
    """A spool file is closed behind its fsync."""
    control, _, _ = started(tmp_path)
    hand_in(control, trajectory(lease(control, 1)[0]))
    assert open_files(tmp_path / "inbox") == 1
    control.state()
    assert open_files(tmp_path / "inbox") == 0


def test_090_changed_tasks_are_an_event(tmp_path):
    control, _, _ = started(tmp_path)
    saved = control.state()
    saved["sampler"]["domains"]["toy"]["fingerprint"] = "other"
    events = EventLog()
    again = make_control(tmp_path, Clock(), events, incarnation=2)
    again.restore(saved)
    assert [event["domain"] for event in events.of("tasks_changed")] == ["toy"]


def test_a_long_run_holds_only_what_is_open(tmp_path):
    control, _, _ = started(tmp_path, learner={"updates": 40}, checkpoint={"keep": 1})
    for update in range(40):
        for a in lease(control):
            hand_in(control, trajectory(a, version=update + 1))
        batch = control.take(0)
        control.commit(batch)
        publish(control, update + 2, update + 1)
        control.set_engines([engine(update + 2)])
        control.committed(control.state())
        assert len(control.delivered.trajectories) <= 8
        assert len(list((tmp_path / "inbox").iterdir())) <= 3
    assert control.counts() | {"open": 0} == control.counts()
    assert control.counts()["trained"] == 160
