"""A run that stands still says who keeps it waiting, over all its processes."""

import os
import re
import signal
import subprocess
import sys

from learner.runfolder import read_events
from tests.e2e.launched import REPOSITORY

ENV = "env-frozenlake-0"
SILENT = re.compile(
    r"learner waits for \d groups? of frozenlake: rollout \d-g\d+-\d on actor-0 waits for env-frozenlake-0 \(env\.(open|step)"
    r".*\), silent for \d+ s"
)


def test_a_frozen_env_server_is_named_until_it_goes_on(launched):
    launched.start("local", "--learner.updates=100000", "--learner.stall_s=8", "--eval.init=false")
    launched.until(lambda: launched.update() >= 1, "the first update")
    frozen = launched.pids(ENV)[-1]
    os.kill(frozen, signal.SIGSTOP)
    cause = f"root cause: {ENV} has been silent for "
    launched.until(lambda: launched.status().get("stall", [""])[0].startswith(cause), "the root cause to be named")
    launched.until(lambda: read_events(launched.run, "wait_past_deadline"), "the event")
    command = [sys.executable, str(REPOSITORY / "tools" / "launch.py"), "status", "tiny", "--runs", str(launched.runs)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith(cause)
    assert SILENT.fullmatch(said[1])
    assert any(re.fullmatch(rf"\d+ rollouts on actor-0 wait for {ENV} \(.*\), silent for \d+ s", line) for line in said[2:])
    event = read_events(launched.run, "wait_past_deadline")[0]
    assert (event["late"][0]["owner"], event["late"][0]["name"]) == ("learner", "take")
    assert event["stall"][0].startswith(cause)
    os.kill(frozen, signal.SIGCONT)
    before = launched.update()
    launched.until(lambda: launched.update() > before, "updates after it")
    launched.launchers[-1].send_signal(signal.SIGTERM)
    code, out = launched.finish()
    assert (code, launched.alive()) == (143, []), out
