"""Real engines on real ports: the embedded one, and SGLang where POLYTURN_SGLANG names the Python of its environment
(`make test-sglang`). One process of each serves all tests; every test begins with weights A and an empty cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from common import keys
from learner.engine_api import EngineApi, EngineError
from learner.model import hf, tensorfiles
from learner.model.spec import ModelSpec
from tests.processes import until
from tools.certifying.scores import Learner
from tools.launching.engines import CPU_FLAGS
from tools.launching.shared_memory import shared_files
from tools.launching.supervisor import child_environment

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tokenizers" / "tiny"
SPEC = ModelSpec(1024, 64, 128, 2, 4, 2, 16, 10_000.0)
END = 1017
LENGTH = 512
RANDOM = ("--load-format", "dummy")  # as the launcher starts them: what they serve comes from the learner
SGLANG = os.environ.get("POLYTURN_SGLANG", "")
MORE_FLAGS = (  # than those that tools/launch.py starts it with where there is no GPU
    *("--dtype", "float32", "--skip-tokenizer-init", "--log-level", "warning"),
    *("--max-total-tokens", "16384", "--max-running-requests", "32"),
)


def make_model(folder: Path, seed: int, shard_bytes: int = tensorfiles.SHARD_BYTES, spec: ModelSpec = SPEC) -> Path:
    """Random weights, larger than a fresh model's: its distributions are far from uniform."""
    state = jax.tree.map(lambda x: 5 * x if x.ndim == 2 else x, hf.random_state(spec, seed))
    hf.save(state, spec, folder, "float32", END)
    tensorfiles.write(hf.snapshot(state, "float32"), folder, shard_bytes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


@dataclass(frozen=True)
class Models:
    """Two directories of one architecture, the second in shards; their versions are 1 and 2."""

    a: Path
    b: Path
    truth: dict[str, Learner] = field(default_factory=dict)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    a, b = make_model(root / "a", 0), make_model(root / "b", 1, 100_000)
    return Models(a, b, {"1": Learner(a, "float32"), "2": Learner(b, "float32")})


class Served:
    """An engine's process, spoken to as actors and publisher do."""

    def __init__(self, name: str, url: str, process: subprocess.Popen, key_file: Path, log: Path) -> None:
        self.name, self.url, self.process, self.log = name, url, process, log
        self.key = keys.read(key_file)
        self.api = EngineApi(url, key=self.key)
        self.threads = ThreadPoolExecutor(64)

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> tuple[int, Any]:
        """Status and answer, as JSON where it is."""
        import http.client

        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **keys.bearer(self.key)})
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(raw)
        except ValueError:
            return answer.status, raw.decode()

    def generate(
        self, ids: list[int], new: int = 8, temperature: float = 1.0, rid: str = "", start: int = -1, **sampling: Any
    ) -> dict[str, Any]:
        """A successful answer, with the logprobs of the prompt behind `start` (-1: none)."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": new, "temperature": temperature, "stop_token_ids": [END], **sampling},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        status, answer = self.call("/generate", body | ({"rid": rid} if rid else {}))
        assert status == 200, answer
        return answer

    def start(self, *arguments: Any, **named: Any) -> Future[dict[str, Any]]:
        return self.threads.submit(self.generate, *arguments, **named)

    def running(self) -> int:
        status, answer = self.call("/v1/loads", method="GET")
        assert status == 200, answer
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])


def ids_of(answer: dict[str, Any]) -> list[int]:
    return [pair[1] for pair in answer["meta_info"]["output_token_logprobs"]]


def logprobs_of(answer: dict[str, Any]) -> np.ndarray:
    return np.asarray([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]])


def spawn(argv: list[str], log: Path, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """In a process group of its own; what it says is added to `log`."""
    with log.open("ab") as out:
        more = {**os.environ, **ENVIRONMENT, **environment}
        return subprocess.Popen(argv, cwd=REPOSITORY, stdout=out, stderr=out, start_new_session=True, env=more)


def _started(name: str, argv: list[str], folder: Path, port: int, environment: Mapping[str, str]) -> Served:
    log = folder / "log"
    process = spawn(argv, log, environment)
    if not port:
        until(lambda: process.poll() is not None or re.search(r"listening on \S+", log.read_text()), name, 120)
        found = re.search(r"listening on \S+:(\d+)", log.read_text())
        assert found, log.read_text()
        port = int(found[1])
    served = Served(name, f"http://127.0.0.1:{port}", process, folder / keys.NAME, log)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            served.api.health()
        except EngineError:
            return False
        return True

    until(ready, f"{name} to be ready", 300)
    return served


def end(process: subprocess.Popen[bytes], grace_s: float = 30.0) -> None:
    """With all that it started, and what that holds in shared memory."""
    left = shared_files(process.pid)
    with contextlib.suppress(ProcessLookupError):
        if grace_s:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for file in left:
        file.unlink(missing_ok=True)


ENVIRONMENT = child_environment({"OMP_NUM_THREADS": "1"}, accelerator=False)


def free_port() -> int:
    """One that nobody listens on at the moment: SGLang does not choose its own."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def command(name: str, model: Path, key_file: Path, port: int) -> list[str]:
    """With a key, as where others could call it."""
    if name == "embedded":
        shape = [*RANDOM, "--slots", "16", "--cache-slots", "32", "--max-length", str(LENGTH), "--widths", "128,512"]
        own = ["--model-path", str(model), "--api-key-file", str(key_file), "--port", str(port)]
        return [sys.executable, "-m", "learner.serving", *own, *shape]
    serve = str(REPOSITORY / "tools" / "sglang_cpu" / "serve.py")
    own = ["--model-path", str(model), *RANDOM, "--context-length", str(LENGTH), "--host", "127.0.0.1", "--port", str(port)]
    return [SGLANG, serve, "--config", str(key_file), *own, *CPU_FLAGS, *MORE_FLAGS]


def skip_without(name: str) -> None:
    if name == "sglang" and not SGLANG:
        pytest.skip("make test-sglang runs this against a real SGLang server")


@contextlib.contextmanager
def served_by(name: str, model: Path, folder: Path, *arguments: str, environment: Mapping[str, str] = {}) -> Iterator[Served]:
    """An engine of this kind, until the end of the block."""
    skip_without(name)
    keys.make(folder)
    port = free_port() if name == "sglang" else 0
    argv = [*command(name, model, folder / keys.NAME, port), *arguments]
    served = _started(name, argv, folder, port, environment)
    try:
        yield served
    finally:
        served.threads.shutdown(wait=False, cancel_futures=True)
        end(served.process)


@pytest.fixture(scope="session", params=["embedded", "sglang"])
def process(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by(request.param, models.a, tmp_path_factory.mktemp("engine")) as served:
        yield served


@pytest.fixture
def engine(process: Served, models: Models) -> Served:
    """Weights A as version 1, nothing cached, nothing running."""
    process.api.resume()
    process.api.abort_all()
    until(lambda: process.running() == 0, "an idle engine", 30)
    process.api.update_weights(models.a, 1)
    return process
