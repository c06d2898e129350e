"""What a run's folder says when its learner does not."""

import json
import os
import subprocess
import sys
import time

import pytest

from tools.launching import remains


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by /proc")
def test_processes_events_and_logs(tmp_path):
    """Of each process its newest start counts; a number that another program has got is not that process."""
    now = time.time()
    alive = subprocess.Popen(["sleep", "600"], cwd=tmp_path)  # its command line does not name the run
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)])
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        write(
            tmp_path / "launch_events.jsonl",
            {"time": now - 50, "kind": "started", "process": "learner", "pid": 1},
            {"time": now - 40, "kind": "ended", "process": "learner", "reason": "was killed by SIGKILL"},
            {"time": now - 39, "kind": "started", "process": "learner", "pid": ours.pid},
            {"time": now - 30, "kind": "started", "process": "actor-0", "pid": alive.pid},
            {"time": now - 30, "kind": "started", "process": "actor-1", "pid": gone.pid},
            {"time": now - 30, "kind": "started", "process": "engine-0", "pid": 7},
            {"time": now - 20, "kind": "ended", "process": "engine-0", "reason": "exited with status 3"},
        )
        stall = ["root cause: engine-0 has been silent for 9 s", "learner waits", "more", "too much"]
        write(
            tmp_path / "events.jsonl",
            {"time": now - 25, "kind": "wait_past_deadline", "incarnation": 1, "stall": stall},
            {"time": now - 5, "kind": "phase", "incarnation": 1, "phase": "rl", "cancelled": 0},
        )
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "learner.log").write_text("x")
        os.utime(tmp_path / "logs" / "learner.log", (now - 12, now - 12))
        assert remains.lines(tmp_path, now) == [
            f"learner (process {ours.pid}) is alive; its log is 12 s old.",
            f"actor-0 (process {alive.pid}) is gone.",
            f"actor-1 (process {gone.pid}) is gone.",
            "engine-0 exited with status 3 20 s ago.",
            "The learner's newest event, 5 s ago: phase: phase rl, cancelled 0",
            "Past its deadline 25 s ago:",
            "  root cause: engine-0 has been silent for 9 s",
            "  learner waits",
            "  more",
        ]
    finally:
        for process in (alive, ours):
            process.kill()
            process.wait()


def test_a_folder_without_anything_and_one_with_a_damaged_line(tmp_path):
    assert remains.lines(tmp_path) == []
    (tmp_path / "events.jsonl").write_text("{broken\n")
    assert "events.jsonl line 1 is not JSON" in remains.lines(tmp_path)[0]
