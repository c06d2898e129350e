"""Two real engines under a supervisor, brought to real weights by the real publisher, and ways to harm each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from common import keys
from common.types import EngineInfo
from learner import objective
from learner.canary import Canary, canary_ids
from learner.engine_api import Deadlines, EngineApi
from learner.model import hf, tensorfiles
from learner.model.spec import ModelSpec
from learner.proofs import Verdict
from learner.publisher import Publisher, PublisherOptions
from learner.transport import DiskTransport
from tests.engine_contract.conftest import END, LENGTH, Served, command, end, free_port, spawn
from tests.processes import until
from tests.publish.calls import Log
from tools.certifying.scores import Learner
from tools.launching.shared_memory import shared_files

LOOK_S = 5.0  # between two looks at what a process holds
BACK_S = 280.0  # for SGLang to start again on a machine that does other things too
PATIENT = Deadlines(look_s=20, pause_s=30, update_s=60, canary_s=60)
SHORT = Deadlines(look_s=4, pause_s=4, update_s=8, canary_s=30)
UPDATE = "/update_weights_from_disk"
STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT


Damage = Callable[[Path], None]


class Kept:
    """An engine that is started again, on the same port, whenever it ends."""

    def __init__(self, kind: str, name: str, model: Path, run: Path) -> None:
        self.name, self.port, self.starts = name, free_port(), 0
        self.url = f"http://127.0.0.1:{self.port}"
        quick = ["--widths", str(LENGTH)] if kind == "embedded" else []  # one program of each kind to compile
        self._argv, self._log = [*command(kind, model, run / keys.NAME, self.port), *quick], run / f"{name}.log"
        self._changes, self._closing = threading.Lock(), False
        self._start()
        self.served = Served(kind, self.url, self._process, run / keys.NAME, self._log)
        self._thread = threading.Thread(target=self._keep, name=name)
        self._thread.start()

    def _start(self) -> None:
        self._process, self._files = spawn(self._argv, self._log), []
        self.starts += 1

    def _keep(self) -> None:
        while True:
            try:
                self._process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                self._files = shared_files(self._process.pid) or self._files  # one that dies by itself cannot be asked any more
                continue
            with self._changes:
                if self._closing:
                    return
                end(self._process, grace_s=0)
                for file in self._files:
                    file.unlink(missing_ok=True)
                self._start()

    def send(self, number: int) -> None:
        """To all of its processes."""
        with self._changes:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        with self._changes:
            end(self._process, grace_s=0)

    def close(self) -> None:
        self.served.threads.shutdown(wait=False, cancel_futures=True)
        with self._changes:
            self._closing = True
            end(self._process)
        self._thread.join()


@dataclass(frozen=True, eq=False)
class Weights:
    """What the learner publishes."""

    spec: ModelSpec
    tensors: Mapping[str, np.ndarray]
    canary: Canary
    truth: Learner

    @staticmethod
    def of(folder: Path) -> Weights:
        spec, state = hf.load(folder)
        ids = canary_ids(spec.vocab_size, 256, 0)
        logprobs, last = jax.device_get(objective.canary(nnx.graphdef(hf.build(spec, state)), state, ids))
        return Weights(spec, hf.snapshot(state, "float32"), Canary(ids, logprobs, last), Learner(folder, "float32"))

    def write(self, folder: Path) -> None:
        """In shards."""
        tensorfiles.write(self.tensors, folder, 100_000)
        hf.write_config(self.spec, folder, "float32", END)


def flip(folder: Path, tensor: str, values: int) -> None:
    """Of the first `values` numbers of a float32 tensor the lowest bit of the exponent: they are twice or half of what they were,
    and the file is whole."""
    file = next(path for path in folder.glob("*.safetensors") if tensor in header(path))
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little") + header(file)[tensor]["data_offsets"][0]
    data = bytearray(file.read_bytes())
    for byte in range(start + 2, start + 4 * values, 4):
        data[byte] ^= 0x80
    file.write_bytes(data)


def header(file: Path) -> dict[str, Any]:
    """Of a safetensors file: eight bytes with its length, then JSON."""
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


class Meddling(DiskTransport):
    """`before[engine, path]` is called with the body of the engine's next such call, before it is sent."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.before: dict[tuple[str, str], Callable[[dict[str, Any]], None]] = {}

    def connect(self, engine: EngineInfo, deadlines: Deadlines) -> EngineApi:
        return _Meddled(self.before, engine, deadlines, self._key)


class _Meddled(EngineApi):
    def __init__(self, before: dict, engine: EngineInfo, deadlines: Deadlines, key: str) -> None:
        super().__init__(engine.url, deadlines, key)
        self._before, self._name = before, engine.name

    def call(self, method: str, path: str, timeout: float, body: dict[str, Any] | None = None) -> Any:
        self._before.pop((self._name, path), lambda body: None)(body or {})
        return super().call(method, path, timeout, body)


class Fleet:
    """Both engines. Each publisher is a new life of one run's learner: versions go on."""

    def __init__(self, kind: str, model: Path, run: Path) -> None:
        keys.make(run)
        self.kind, self.run, self.key = kind, run, keys.read(run / keys.NAME)
        self.engines = [Kept(kind, f"engine-{n}", model, run) for n in range(2)]
        self._lives = 0

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    @contextmanager
    def published(
        self, weights: Weights, engines: Sequence[int], deadlines: Deadlines = PATIENT, temperature: float = 1.0
    ) -> Iterator[Life]:
        """`weights` are served by these engines, as the newest version."""
        self._lives += 1
        rows = [EngineInfo(self.engines[n].name, self.engines[n].url, "main", 0, "starting") for n in engines]
        with living(Life(self.run, self.key, rows, self._lives, deadlines, temperature)) as life:
            life.publish(weights)
            life.all_serve()
            yield life


class Life:
    """A publisher, from its start to its end."""

    def __init__(
        self, run: Path, key: str, engines: Sequence[EngineInfo], incarnation: int, deadlines: Deadlines, temperature: float
    ) -> None:
        self.transport, self.log, self.version = Meddling(key), Log(), 0
        self.truths: dict[str, Learner] = {}  # by version
        self._next: tuple[Weights, Damage] | None = None
        options = PublisherOptions(
            run, incarnation, deadlines, 0.1, backoff_s=0.2, backoff_max_s=1.0, transport=self.transport, temperature=temperature
        )
        self.publisher = Publisher(options, engines, self._save, self.log.event)

    def _save(self, params: object, folder: Path) -> None:
        assert self._next
        weights, damage = self._next
        weights.write(folder)
        damage(folder)

    def publish(self, weights: Weights, damage: Damage = lambda folder: None) -> int:
        """`damage` is done to the files, once they are written."""
        self._next = weights, damage
        self.version = self.publisher.publish(self.version, weights.tensors, weights.canary)
        self.truths[str(self.version)] = weights.truth
        return self.version

    def row(self, engine: str) -> EngineInfo:
        return next(row for row in self.publisher.engines() if row.name == engine)

    def serves(self, engine: str, version: int = 0) -> bool:
        self.publisher.check()
        row = self.row(engine)
        return (row.state, row.version) == ("ready", version or self.version)

    def all_serve(self) -> None:
        for row in self.publisher.engines():
            until(lambda name=row.name: self.serves(name), f"{row.name} to serve version {self.version}", BACK_S)

    def verdict(self, engine: str, version: int, since: float | None = None) -> Verdict:
        """Of a rollout that is handed out now, or was `since`."""
        return self.publisher.proofs.judge([(engine, version)], time.monotonic() if since is None else since)[0]

    def was(self, engine: str, state: str, words: str) -> bool:
        """For such a reason; an engine may be back at its next look."""
        rows = [fields for kind, fields in self.log.events if kind == "engine" and fields["name"] == engine]
        return any(row["state"] == state and words in row["reason"] for row in rows)


@contextmanager
def living(life: Life) -> Iterator[Life]:
    try:
        yield life
    finally:
        life.publisher.close()
