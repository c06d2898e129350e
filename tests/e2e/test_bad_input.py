"""An engine that serves weights but refuses every request: the run ends with the reason, within bounded attempts."""

import shutil
from collections import Counter

from learner.runfolder import read_events
from tests.e2e.launched import REPOSITORY

ENGINE = """
import argparse, signal, threading

from tests.fakes import FakeEngine

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
engine = FakeEngine(vocabulary=1)  # no prompt fits it
engine.port = parser.parse_known_args()[0].port
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with engine:
    stop.wait()
"""


def test_an_engine_that_refuses_every_prompt(launched, compiled):
    launched.environment = compiled
    launched.root = root_with_engine(launched.folder / "root")
    code, out = launched.launch("local", "--warm.updates=0", "--eval.init=false", "--learner.max_attempts=2")
    assert (code, launched.alive()) == (2, []), out
    reason = "EngineRefused: engine-0 answered HTTP 400: input_ids"
    assert out.splitlines()[-1].startswith("polyturn: error: the last ")
    assert f"rollouts all failed, the newest with: {reason}" in out.splitlines()[-1]
    failed = read_events(launched.run, "rollout_failed")
    assert all(event["reason"].startswith(reason) for event in failed)
    attempts = Counter(event["rollout"] for event in failed)
    assert max(attempts.values()) == 2
    assert {event["attempt"] for event in failed if event["again"]} == {1}


def root_with_engine(root):
    """The repository's packages, with another engine in the place of learner/serving."""
    (root / "learner").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "tools", root / "tools")  # programs are those beside the launcher's real path
    for package in ("common", "actors", "envserver", "tests", "configs"):
        (root / package).symlink_to(REPOSITORY / package)
    for path in (REPOSITORY / "learner").iterdir():
        if path.name != "serving":
            (root / "learner" / path.name).symlink_to(path)
    (root / "learner" / "serving").mkdir()
    (root / "learner" / "serving" / "__main__.py").write_text(ENGINE)
    return root
