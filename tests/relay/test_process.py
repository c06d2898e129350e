"""A relay as a process: killed in the middle, ended, started wrongly."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common import keys
from common.addresses import Addresses, EngineAddress, RelayAddress
from common.cli import dump_toml, load
from learner.engine_api import EngineApi, EngineError, EngineGone
from learner.transport import RelayApi
from tests.processes import until
from tests.relay.conftest import PART
from tests.relays import DEADLINES, put, sums_of

REPOSITORY = Path(__file__).parents[2]


class Process:
    """`python -m actors.relay` of a run in `folder`; memory is a folder there."""

    def __init__(self, folder, engine, port):
        self.run, self.memory, self.url = folder / "run", folder / "memory", f"http://127.0.0.1:{port}"
        self.run.mkdir()
        options = ["--weights.transport=relay", f"--weights.folder={self.memory}"]
        (self.run / "config.toml").write_text(dump_toml(load(REPOSITORY / "configs" / "tiny.toml", options)))
        keys.make(self.run)
        engines = [EngineAddress(name="engine-0", url=engine.url, pool="main")]
        relays = [RelayAddress(name="relay-0", url=self.url, engines=["engine-0"])]
        Addresses(learner="", engines=engines, envs={}, weights="127.0.0.1:0", relays=relays).write(self.run)
        self.engine_url = engine.url
        engine.key = keys.read(self.run / keys.NAME)

    def start(self, *arguments):
        command = [sys.executable, "-m", "actors.relay", "--run", str(self.run), *arguments]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        return self

    def wait(self):
        until(self._up, "the relay to listen")
        return self

    def _up(self):
        assert self.process.poll() is None
        with contextlib.suppress(EngineError):
            EngineApi(self.url).health()
            return True

    def api(self, source):
        direct = EngineApi(self.engine_url, DEADLINES, keys.read(self.run / keys.NAME))
        return RelayApi(f"{self.url}/engine-0", source, direct, None)

    def end(self, number):
        self.process.send_signal(number)
        _, told = self.process.communicate(timeout=30)
        return self.process.returncode, told


@pytest.fixture
def started(tmp_path, engine):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    made = Process(tmp_path, engine, port)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


def test_killed_in_the_middle_it_goes_on_with_what_it_has(started, wire, source):
    sums = put(source.weights, 1, {"model.safetensors": 40 * PART, "config.json": 2})
    wire.hold_at = 20 * PART
    started.start().wait()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(started.api(wire.url).prepare, "", 1)
        until(lambda: not wire.held.is_set(), "half of the bytes")
        started.end(signal.SIGKILL)
        with pytest.raises(EngineGone):
            asked.result()
    wire.held.set()
    started.start().wait()
    before = wire.bytes
    path = started.api(wire.url).prepare("", 1)
    assert sums_of(path) == sums
    assert wire.bytes - before < 35 * PART  # all that were whole, and those were at least ten
    code, told = started.end(signal.SIGTERM)
    assert (code, list(started.memory.iterdir())) == (0, []), told


def test_it_gives_the_memory_back_in_the_middle_of_a_fetch_too(started, wire, source):
    put(source.weights, 1, {"model.safetensors": 10 * PART})
    wire.held.clear()
    started.start().wait()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(started.api(wire.url).prepare, "", 1)
        until(lambda: wire._sockets, "a connection to the weight server")
        code, told = started.end(signal.SIGTERM)
        assert (code, list(started.memory.iterdir())) == (0, []), told
        with pytest.raises(EngineError):
            asked.result()


def test_the_key_is_nobody_elses_business(started):
    started.start().wait()
    path = started.run / keys.NAME
    key = keys.read(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) == 64
    assert key not in " ".join(started.process.args)
    code, told = started.end(signal.SIGTERM)
    assert (code, key in told) == (0, False)
    keys.make(started.run)
    assert keys.read(path) == key  # a resumed run keeps its key


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / keys.NAME).unlink(), "engine_key.yaml: No such file or directory; start the run with"),
        (lambda run: (run / keys.NAME).write_text("abc"), "engine_key.yaml: not a line such as"),
        (lambda run: (run.parent / "memory").write_text(""), "set weights.folder to one that can be written"),
        (lambda run: (run / "config.toml").write_text("x = 1"), "unknown key x"),
    ],
    ids=["no key", "a file that is no key", "a folder that cannot be made", "another configuration"],
)
def test_wrong_input_is_one_line(started, spoil, says):
    spoil(started.run)
    started.start()
    _, told = started.process.communicate(timeout=30)
    assert started.process.returncode == 2
    assert told.splitlines()[-1].startswith("polyturn: error: ")
    assert says in told.splitlines()[-1]


def test_an_index_that_there_is_not(started):
    started.start("--index", "1")
    _, told = started.process.communicate(timeout=30)
    assert (started.process.returncode, told.splitlines()[-1]) == (
        2,
        'polyturn: error: relay 1: addresses.json has 1, counted from 0; is weights.transport "relay"?',
    )


def test_a_port_that_is_taken(started):
    host, port = started.url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):
        started.start()
        _, told = started.process.communicate(timeout=30)
    assert (started.process.returncode, "cannot listen on" in told.splitlines()[-1]) == (2, True)
    assert os.listdir(started.run.parent) == ["run"]
