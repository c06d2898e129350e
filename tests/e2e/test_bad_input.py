"""An engine that serves weights but refuses every request: the run ends with the reason, within bounded attempts."""

import json
import shutil
from collections import Counter

from learner.runfolder import read_events
from tests.e2e.launched import REPOSITORY

ENGINE = """
import argparse, signal, threading

import numpy as np
from aiohttp import web

from tests.fakes import Answer, FakeEngine


class Engine(FakeEngine):  # passes its canary, as the file says, and serves nothing else
    async def _generate(self, body):
        if body.get("logprob_start_len") != 0:
            return await super()._generate(body)
        with np.load(self.model_path + "/canary.npz") as canary:
            logprobs, logits = canary["logprobs"].tolist(), canary["last_logits"].astype(float)
        meta = {
            "input_token_logprobs": [[None, 0, None], *([logprob, 0, None] for logprob in logprobs[1:])],
            "output_token_logprobs": [[float(logits[0] - np.logaddexp.reduce(logits)), 0, None]],
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": 1}],
        }
        return web.json_response({"meta_info": meta})


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
engine = (FakeEngine if REFUSES == "/generate" else Engine)(vocabulary=1)  # no prompt fits it
if REFUSES:
    engine.script(REFUSES, *[Answer(400, {"message": "not here"})] * 1000)
engine.port = parser.parse_known_args()[0].port
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with engine:
    stop.wait()
"""


def test_an_engine_that_refuses_every_prompt(launched):
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


def test_an_engine_that_refuses_its_canary(launched):
    launched.root = root_with_engine(launched.folder / "root", "/generate")
    code, out = launched.launch("local")
    assert (code, launched.alive()) == (2, []), out
    assert "polyturn: error: no engine takes version 1: engine-0 at http://127.0.0.1:" in out.splitlines()[-1]
    assert "failed at canary: /generate answered 400: not here" in out.splitlines()[-1]


def test_an_engine_that_refuses_the_first_weights(launched):
    launched.root = root_with_engine(launched.folder / "root", "/update_weights_from_disk")
    code, out = launched.launch("local")
    assert (code, launched.alive()) == (2, []), out
    last = out.splitlines()[-1]
    assert last.startswith("polyturn: error: no engine takes version 1: engine-0 at http://127.0.0.1:")
    assert "answered 400: not here" in last


def test_more_evaluation_tasks_than_there_are(launched):
    """Only the env server can count them: a file may hold fewer than domains.heldout_tasks, and admission may refuse some."""
    lines = [{"split": "train", "id": f"t{n}", "payload": {"size": 4, "holes": [f"b{n}"]}} for n in (1, 2, 3)]
    lines += [{"split": "heldout", "id": f"h{n}", "payload": {"size": 4, "holes": [f"c{n}"]}} for n in (1, 2, 3)]
    (launched.folder / "lakes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out = launched.launch("local", '--domains.0.options={tasks_file = "lakes.jsonl"}')
    assert (code, launched.alive()) == (2, []), out
    assert "polyturn: error: eval.tasks 16 exceeds the 3 held-out tasks of domain 'frozenlake'" in out.splitlines()[-1]


def test_a_summary_whose_question_has_no_room(launched):
    """Only the actors can count it: it is text, and they have the tokenizer."""
    context = [f"--domains.0.context.{option}" for option in ("name=summary", "tokens=140", "summary_tokens=12")]
    code, out = launched.launch("local", *context)
    assert (code, launched.alive()) == (2, []), out
    assert "polyturn: error: domains.frozenlake: context.tokens 140 comes too late for a summary" in out.splitlines()[-1]


def root_with_engine(root, refuses=""):
    """The repository's packages, with another engine in the place of learner/serving."""
    (root / "learner").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "tools", root / "tools")  # programs are those beside the launcher's real path
    for package in ("common", "actors", "envserver", "tests", "configs"):
        (root / package).symlink_to(REPOSITORY / package)
    for path in (REPOSITORY / "learner").iterdir():
        if path.name != "serving":
            (root / "learner" / path.name).symlink_to(path)
    (root / "learner" / "serving").mkdir()
    (root / "learner" / "serving" / "__main__.py").write_text(ENGINE.replace("REFUSES", repr(refuses)))
    return root
