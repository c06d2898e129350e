"""How long it takes from a trainer's new weights until every engine serves them, against a plain copy of the same bytes.

    python tools/bench_weights.py [--rounds 7] [--engines 1] [--small]

The model has the shapes of Qwen3-0.6B and random weights in bfloat16; embedded engines are processes of their own, and everything
is on tmpfs (/dev/shm). A round takes a snapshot of float32 masters, hands it to the publisher, and waits until the table of
engines says that all of them are ready at that version; then the files that it wrote are copied by shutil.copyfile, in one
thread. Rounds of both alternate, medians are told. `seconds` goes from the call of Publisher.publish to the last engine's word;
`snapshot` comes before it, while the trainer waits. `canary` is the last part of an update: a forward pass of the engine, whose
length is the processor's affair; `ratio_file_copy` is of `transport`, the seconds without it. Prints a table and writes
runs/bench/weights.json.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from common.config import AlgorithmConfig, ModelConfig  # noqa: E402
from common.types import EngineInfo  # noqa: E402
from learner import objective  # noqa: E402
from learner.canary import Canary, canary_ids  # noqa: E402
from learner.model import hf  # noqa: E402
from learner.model.spec import ModelSpec  # noqa: E402
from learner.proofs import Proofs  # noqa: E402
from learner.publisher import Publisher, PublisherOptions  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402

QWEN3_06B = ModelSpec(151_936, 1024, 3072, 28, 16, 8, 128, 1e6)
SMALL = ModelSpec(32_000, 256, 768, 4, 8, 4, 32, 1e6)
DTYPE = "bfloat16"
START_S = 300.0
UPDATE_S = 120.0
ROOM = 16  # tokens of a sequence: a short canary


@dataclass
class Events:
    """What the publisher says of its parts, and the newest table of engines."""

    seconds: dict[str, float] = field(default_factory=dict)  # part of this round -> how long it took the slowest engine
    table: list[EngineInfo] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        parts = {"write": fields["seconds"]} if kind == "weights_written" else fields.get("stages", {})
        for name, seconds in parts.items():
            self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))

    def engines(self, table: list[EngineInfo]) -> None:
        with self.changed:
            self.table = table
            self.changed.notify_all()

    def wait(self, version: int, seconds: float) -> None:
        """Until all engines serve `version`. Raises TimeoutError."""

        def ready() -> bool:
            return bool(self.table) and all(e.state == "ready" and e.version == version for e in self.table)

        with self.changed:
            if not self.changed.wait_for(ready, seconds):
                raise TimeoutError(f"version {version} is not served after {seconds:g} s: {self.table}")


@contextlib.contextmanager
def engines(model: Path, count: int) -> Iterator[list[str]]:
    """URLs of embedded engines on this machine, with random weights and room for one short request."""
    sizes = ["--slots", "1", "--cache-slots", "1", "--max-length", str(ROOM), "--prefill-slots", "1", "--prefill-chunk", "8"]
    command = [sys.executable, "-m", "learner.serving", "--model-path", str(model), "--load-format", "dummy"]
    logs = [model.parent / f"engine-{index}.log" for index in range(count)]
    processes = []
    try:
        for log in logs:
            with log.open("wb") as out:
                processes.append(subprocess.Popen([*command, "--port", "0", "--dtype", DTYPE, *sizes], cwd=ROOT, stderr=out))
        yield [_url(log, process) for log, process in zip(logs, processes, strict=True)]
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _url(log: Path, process: subprocess.Popen) -> str:
    until = time.monotonic() + START_S
    while not (found := re.search(r"listening on (\S+:\d+)", log.read_text())):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the engine does not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    return f"http://{found[1]}"


@contextlib.contextmanager
def through_files(run: Path, urls: list[str], spec: ModelSpec, events: Events) -> Iterator[Publisher]:
    """Engines read what the publisher writes."""
    rows = [EngineInfo(f"engine-{i}", url, "main", 0, "starting") for i, url in enumerate(urls)]

    def save(tensors: Mapping[str, np.ndarray], folder: Path) -> None:
        hf.write(tensors, spec, folder, 2)

    publisher = Publisher(PublisherOptions(run, 1, dtype=DTYPE), rows, save, events.event, events.engines, Proofs())
    try:
        yield publisher
    finally:
        publisher.close()


def canary_of(spec: ModelSpec, masters: nnx.State) -> Canary:
    network = objective.build_network(ModelConfig(dtype=DTYPE), AlgorithmConfig(), spec)
    ids = canary_ids(spec.vocab_size, ROOM - 2, 0)
    return Canary(ids, *jax.device_get(jax.jit(network.canary)({"policy": masters}, ids)))


def one_round(publisher: Publisher, events: Events, masters: nnx.State, canary: Canary, update: int) -> dict[str, float]:
    """Seconds of publishing once, and of its parts."""
    events.seconds.clear()
    begun = time.perf_counter()
    tensors = hf.snapshot(masters, DTYPE)
    taken = time.perf_counter()
    version = publisher.publish(update, tensors, canary)
    returned = time.perf_counter()
    events.wait(version, UPDATE_S)
    seconds = time.perf_counter() - taken
    parts = {name: events.seconds[name] for name in ("write", "update", "canary")}
    whole = {"seconds": seconds, "transport": seconds - parts["canary"]}
    return whole | {"snapshot": taken - begun, "check": returned - taken} | parts


def copied(folder: Path, aside: Path) -> float:
    """Seconds of copying the weights in `folder`, file by file."""
    aside.mkdir()
    files = sorted(folder.glob("*.safetensors"))
    begun = time.perf_counter()
    for file in files:
        shutil.copyfile(file, aside / file.name)
    seconds = time.perf_counter() - begun
    shutil.rmtree(aside)
    return seconds


def measure(spec: ModelSpec, rounds: int, count: int) -> dict[str, float]:
    masters = jax.device_put(hf.random_state(spec))
    canary = canary_of(spec, masters)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-weights-") as name:
        root, events = Path(name), Events()
        (root / "model").mkdir()
        hf.write_config(spec, root / "model", DTYPE, 2)
        with engines(root / "model", count) as urls, through_files(root, urls, spec, events) as publisher:
            one_round(publisher, events, masters, canary, 0)  # compiles the snapshot, and waits until the engines have started
            for update in range(1, rounds + 1):
                parts = one_round(publisher, events, masters, canary, update)
                folder = next(
                    path for path in sorted((root / "weights").glob("*/DONE"), key=lambda p: -int(p.parent.name))
                ).parent
                size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
                for key, value in (parts | {"file_copy_seconds": copied(folder, root / "copy"), "bytes": float(size)}).items():
                    found.setdefault(key, []).append(value)
    medians = {key: statistics.median(values) for key, values in found.items()}
    copy = medians["file_copy_seconds"]
    ratios = {"ratio_file_copy": medians["transport"] / copy, "ratio_with_canary": medians["seconds"] / copy}
    return ratios | medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a small model, to see that it runs; writes nothing")
    args = parser.parse_args()
    found = measure(SMALL if args.small else QWEN3_06B, args.rounds, args.engines)
    print(f"| {'small' if args.small else 'Qwen3-0.6B'}, {args.engines} engine(s) | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} |")
    if not args.small:
        write("weights", found, head())


if __name__ == "__main__":
    main()
