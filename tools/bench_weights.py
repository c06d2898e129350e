"""How long it takes from a trainer's new weights until every engine serves them, against a plain copy of the same bytes.

    python tools/bench_weights.py [--rounds 7] [--engines 1] [--small]

The model has the shapes of Qwen3-0.6B and random weights in bfloat16; engines (embedded) and the relay are processes of their
own, and everything is on tmpfs (/dev/shm). A round publishes to engines that read the learner's files, publishes to others
through the relay, and copies the files by shutil.copyfile, in one thread; medians over the rounds are told.

`seconds` goes from the call of Publisher.publish until the last engine confirms the version, `seconds_with_canary` until the
table of engines calls all of them ready; `ratio_file_copy` and `ratio_with_canary` are their shares of `file_copy_seconds`.
`relay_...` and `ratio_relay` are the same through the relay. The trainer waits before that for `snapshot_seconds`, the cast copy
of its float32 masters, of which `learner_canary_seconds` are the learner's side of the canary. Prints a table and writes
runs/bench/weights.json.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import socket
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

from common import cli, keys  # noqa: E402
from common.addresses import Addresses, EngineAddress, RelayAddress  # noqa: E402
from common.types import EngineInfo  # noqa: E402
from learner import objective  # noqa: E402
from learner.canary import Canary, canary_ids  # noqa: E402
from learner.model import hf  # noqa: E402
from learner.model.spec import ModelSpec  # noqa: E402
from learner.proofs import Proofs  # noqa: E402
from learner.publisher import Publisher, PublisherOptions  # noqa: E402
from learner.transport import DiskTransport, RelayTransport, Transport  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402

QWEN3_06B = ModelSpec(151_936, 1024, 3072, 28, 16, 8, 128, 1e6)
SMALL = ModelSpec(32_000, 256, 768, 4, 8, 4, 32, 1e6)
DTYPE = "bfloat16"
START_S = 300.0
UPDATE_S = 120.0
TOKENS = 17  # of the canary: those that an engine scores in one dispatch, and the one that it then decodes


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
def processes(commands: Mapping[str, list[str]], logs: Path) -> Iterator[dict[str, str]]:
    """Programs by name, and where each of them listens; they end with the block."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (logs / f"{name}.log").open("wb") as out:
                running[name] = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stderr=out)
        yield {name: _address(logs / f"{name}.log", process) for name, process in running.items()}
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait(30)


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + START_S
    while not (found := re.search(r"listening (?:on|at) (?:http://)?(\S+:\d+)", log.read_text())):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{log.stem} does not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    return f"http://{found[1]}"


def engine_command(model: Path, key: Path) -> list[str]:
    """Random weights, and room for one canary."""
    sizes = ["--slots", "1", "--cache-slots", "1", "--max-length", str(TOKENS + 1), "--prefill-slots", "1"]
    files = ["--model-path", str(model), "--load-format", "dummy", "--api-key-file", str(key)]
    return ["learner.serving", *files, *sizes, "--prefill-chunk", str(TOKENS - 1), "--port", "0", "--dtype", DTYPE]


@dataclass(frozen=True, eq=False)
class Road:
    """A publisher with engines of its own, and what it says."""

    publisher: Publisher
    events: Events

    def publish(self, update: int, tensors: Mapping[str, np.ndarray], canary: Canary) -> dict[str, float]:
        """Seconds until all engines serve the tensors, and of the parts of it."""
        self.events.seconds.clear()
        begun = time.perf_counter()
        version = self.publisher.publish(update, tensors, canary)
        returned = time.perf_counter()
        self.events.wait(version, UPDATE_S)
        whole = time.perf_counter() - begun
        parts = {f"{name}_seconds": self.events.seconds[name] for name in ("write", "update", "canary")}
        confirmed = whole - self.events.seconds["canary"]
        return {"seconds": confirmed, "seconds_with_canary": whole, "check_seconds": returned - begun} | parts


@contextlib.contextmanager
def road(run: Path, urls: list[str], spec: ModelSpec, transport: Transport) -> Iterator[Road]:
    events = Events()
    rows = [EngineInfo(f"engine-{i}", url, "main", 0, "starting") for i, url in enumerate(urls)]

    def save(tensors: Mapping[str, np.ndarray], folder: Path) -> None:
        hf.write(tensors, spec, folder, 2)

    options = PublisherOptions(run, 1, dtype=DTYPE, transport=transport)
    publisher = Publisher(options, rows, save, events.event, events.engines, Proofs())
    try:
        yield Road(publisher, events)
    finally:
        publisher.close()


@contextlib.contextmanager
def both_roads(root: Path, spec: ModelSpec, count: int) -> Iterator[tuple[Road, Road]]:
    """By disk and by relay, with `count` engines each."""
    for name in ("model", "disk", "relay"):
        (root / name).mkdir()
    hf.write_config(spec, root / "model", DTYPE, 2)
    keys.make(root / "relay")
    key = root / "relay" / keys.NAME
    config = cli.load(ROOT / "configs" / "tiny.toml", ["--weights.transport=relay", f"--weights.folder={root / 'host'}"])
    (root / "relay" / "config.toml").write_text(cli.dump_toml(config))
    names = [f"{kind}-{index}" for kind in ("disk", "relay") for index in range(count)]
    with processes({name: engine_command(root / "model", key) for name in names}, root) as found:
        urls = list(found.values())
        engines = [EngineAddress(name=f"engine-{i}", url=url, pool="main") for i, url in enumerate(urls[count:])]
        with socket.create_server(("127.0.0.1", 0)) as door:
            url = f"http://127.0.0.1:{door.getsockname()[1]}"
        relays = [RelayAddress(name="host", url=url, engines=[engine.name for engine in engines])]
        addresses = Addresses(learner="", engines=engines, envs={}, weights="127.0.0.1:0", relays=relays)
        addresses.write(root / "relay")
        (root / "relay" / "weights").mkdir()
        with (
            processes({"host": ["actors.relay", "--run", str(root / "relay")]}, root),
            road(root / "disk", urls[:count], spec, DiskTransport(keys.read(key))) as disk,
            road(
                root / "relay", urls[count:], spec, RelayTransport(root / "relay" / "weights", addresses, keys.read(key))
            ) as relay,
        ):
            yield disk, relay


def snapshot(masters: nnx.State, graph: nnx.GraphDef, ids: np.ndarray) -> tuple[dict[str, np.ndarray], Canary, dict[str, float]]:
    """What Trainer.snapshot makes, and the seconds it takes."""
    begun = time.perf_counter()
    params = jax.block_until_ready(hf.stored(masters, DTYPE))
    cast = time.perf_counter()
    canary = Canary(ids, *jax.device_get(objective.canary(graph, params, ids)))
    answered = time.perf_counter()
    tensors = hf.named(params)
    seconds = {"snapshot_seconds": time.perf_counter() - begun, "learner_canary_seconds": answered - cast}
    return tensors, canary, seconds


def copied(weights: Path, aside: Path) -> dict[str, float]:
    """Seconds of copying the newest version in `weights`, file by file."""
    folder = max(weights.glob("*/DONE"), key=lambda done: int(done.parent.name)).parent
    files = sorted(folder.glob("*.safetensors"))
    aside.mkdir()
    begun = time.perf_counter()
    for file in files:
        shutil.copyfile(file, aside / file.name)
    seconds = time.perf_counter() - begun
    shutil.rmtree(aside)
    return {"file_copy_seconds": seconds, "bytes": float(sum(file.stat().st_size for file in files))}


def measure(spec: ModelSpec, rounds: int, count: int) -> dict[str, float]:
    masters = jax.device_put(hf.random_state(spec))
    graph, ids = hf.stored_graph(spec, DTYPE), canary_ids(spec.vocab_size, TOKENS, 0)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-weights-") as name:
        root = Path(name)
        with both_roads(root, spec, count) as (disk, relay):
            for update in range(rounds + 1):
                tensors, canary, parts = snapshot(masters, graph, ids)
                parts |= disk.publish(update, tensors, canary)
                parts |= {f"relay_{name}": seconds for name, seconds in relay.publish(update, tensors, canary).items()}
                parts |= copied(root / "disk" / "weights", root / "copy")
                for name, value in parts.items() if update else ():  # the first one compiles, and waits for engines to start
                    found.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    copy = medians["file_copy_seconds"]
    ratios = {"ratio_file_copy": "seconds", "ratio_relay": "relay_seconds", "ratio_with_canary": "seconds_with_canary"}
    return {ratio: medians[part] / copy for ratio, part in ratios.items()} | medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a small model, to see that it runs; writes nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing stays in memory, however it ends
    found = measure(SMALL if args.small else QWEN3_06B, args.rounds, args.engines)
    print(f"| {'small' if args.small else 'Qwen3-0.6B'}, {args.engines} engine(s) | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} |")
    if not args.small:
        write("weights", found, head())


if __name__ == "__main__":
    main()
