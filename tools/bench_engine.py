"""The embedded engine and a stock SGLang server on the same load: rollouts that go on turn by turn, and what a weight update in
the middle of them costs.

    python tools/bench_engine.py [--rounds 5] [--rollouts 16] [--turns 8]

Both engines are started as the launcher starts them, on the CPU, with the model of configs/smoke.toml (random weights, float32)
and room for as many requests as there are rollouts. They take turns, round by round; the one that rests is stopped, so that it
takes nothing from the other. Each turn of a rollout samples 32 tokens, and appends them and 32 to 64 tokens of an observation to
its prompt; the calls are made by the actors' own client. Numbers are medians over rounds. An update (pause with retract, the same
weights from disk as the next version, continue) comes when a third of the time is over that the same requests took without one;
retract_seconds is how much longer they take with it, the fastest of all rounds against the fastest.
Builds SGLang's environment as `make sglang` does when it is not there. Prints a table and writes runs/bench/engine.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from actors.engines import Engines, Generation, Request  # noqa: E402
from actors.places import PlaceRules  # noqa: E402
from common.cli import load  # noqa: E402
from common.config import RunConfig  # noqa: E402
from common.types import EngineInfo, ids_array  # noqa: E402
from common.validate import Vocabulary  # noqa: E402
from learner.engine_api import EngineApi, EngineError  # noqa: E402
from learner.model import hf  # noqa: E402
from learner.model.spec import ModelSpec  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402
from tools.launching import engines as launching  # noqa: E402
from tools.launching.shared_memory import shared_files  # noqa: E402
from tools.launching.supervisor import LEASH, child_environment, tail  # noqa: E402

CONFIGS = {"embedded": "smoke", "sglang": "smoke_sglang"}
WIDTHS = [128, 256, 384, 512, 768, 1024]  # attended by the embedded engine; the last is the length of a sequence, for both
VOCABULARY = 1024
SHARED, OWN = 96, 32  # tokens of the first prompt: the same for all rollouts, and not
SAMPLED, OBSERVED = 32, (32, 64)  # tokens of a turn
LONG_PROMPT, LONG_OUTPUT = 384, 160  # of the requests that an update meets
UPDATES = 3  # in a round
UPDATE_AT = 1 / 3  # of the time that they take without it
FASTEST = ("through_seconds", "updated_seconds")  # their difference is small: a median is lost in what else the machine does
PLACES = 64  # requests at an engine: never fewer than are made
START_S, END_S, TIDY_S, CALL_S = 300.0, 15.0, 3.0, 120.0


class Failed(Exception):
    """The benchmark cannot be made; the message is one line."""


@dataclass(frozen=True)
class Turn:
    seconds: float
    prompt: int  # tokens
    answer: Generation


@dataclass(frozen=True)
class Size:
    rollouts: int
    turns: int


class Server:
    """An engine's process, with all that it starts."""

    def __init__(self, name: str, config: RunConfig, run: Path) -> None:
        url = f"http://127.0.0.1:{_free_port()}"
        self.name, self.folder = name, run / "model"
        self.info = EngineInfo(name, url, "main", 1, "ready")
        self.api = EngineApi(url)
        self.version = 0
        self._log = run / f"{name}.log"
        argv = launching.command(config, run, url, accelerator=False)
        if sys.platform == "linux":
            argv = (sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=child_environment(dict(os.environ), False), stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it serves."""
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(EngineError):
                return self.api.health()
            if self._process.poll() is not None or time.monotonic() > until:
                raise Failed(f"{self.name} does not start: {' | '.join(tail(self._log, 0, 3))}")
            time.sleep(0.2)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It runs inside, and rests outside."""
        os.killpg(self._process.pid, signal.SIGCONT)
        yield
        os.killpg(self._process.pid, signal.SIGSTOP)

    def update(self) -> float:
        """Pause with retract, load the weights as the next version, continue. Seconds."""
        begun = time.monotonic()
        self.version += 1
        self.api.pause()
        self.api.update_weights(self.folder, self.version)
        self.api.resume()
        return time.monotonic() - begun

    def end(self) -> None:
        left = shared_files(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGCONT, signal.SIGTERM):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            until = time.monotonic() + TIDY_S
            while time.monotonic() < until:  # for its children to tidy up
                os.killpg(self._process.pid, 0)
                time.sleep(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in left:
            file.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


async def rollout(client: Engines, server: Server, seed: tuple[int, int], turns: int) -> list[Turn]:
    random = np.random.default_rng(seed)
    shared = np.random.default_rng(seed[0]).integers(0, VOCABULARY, SHARED)
    prompt, done = np.concatenate([shared, random.integers(0, VOCABULARY, OWN)]), []
    for turn in range(turns):
        rid = f"{seed[0]}.{seed[1]}.{turn}"
        done.append(await timed(client, server, rid, prompt, SAMPLED))
        observation = random.integers(0, VOCABULARY, random.integers(OBSERVED[0], OBSERVED[1] + 1))
        prompt = np.concatenate([prompt, done[-1].answer.ids, observation])
    return done


async def timed(client: Engines, server: Server, rid: str, prompt: np.ndarray, new: int) -> Turn:
    begun = time.monotonic()
    answer = await client.generate(server.info, Request(rid, ids_array(prompt), new, 1.0, (), 0))
    return Turn(time.monotonic() - begun, len(prompt), answer)


def rollouts(server: Server, size: Size, seed: int) -> dict[str, float]:
    """One round of turns, from an empty cache."""

    async def play() -> tuple[float, list[list[Turn]]]:
        client = Engines(Vocabulary(VOCABULARY, VOCABULARY), CALL_S, PlaceRules(PLACES))
        try:
            begun = time.monotonic()
            played = await asyncio.gather(*(rollout(client, server, (seed, n), size.turns) for n in range(size.rollouts)))
            return time.monotonic() - begun, played
        finally:
            await client.close()

    server.api.flush_cache()
    seconds, played = asyncio.run(play())
    turns = [turn for each in played for turn in each]
    return {
        "tokens_per_s": sum(len(turn.answer.ids) for turn in turns) / seconds,
        "turn_s": median(turn.seconds for turn in turns),
        "cached_share": sum(turn.answer.cached for turn in turns) / sum(turn.prompt for turn in turns),
    }


def update_cost(server: Server, count: int, seed: int) -> dict[str, float]:
    """The same requests from an empty cache twice: let through, and with an update in the middle."""
    prompts = np.random.default_rng(seed).integers(0, VOCABULARY, (count, LONG_PROMPT))

    async def play(update_after_s: float) -> tuple[float, float, list[Turn]]:
        client = Engines(Vocabulary(VOCABULARY, VOCABULARY), CALL_S, PlaceRules(PLACES))
        try:
            begun, paused = time.monotonic(), 0.0
            asked = [asyncio.create_task(timed(client, server, str(n), p, LONG_OUTPUT)) for n, p in enumerate(prompts)]
            if update_after_s:
                await asyncio.sleep(update_after_s)
                paused = await asyncio.to_thread(server.update)
            done = await asyncio.gather(*asked)
            return time.monotonic() - begun, paused, done
        finally:
            await client.close()

    server.api.flush_cache()
    through, _, _ = asyncio.run(play(0.0))
    server.api.flush_cache()
    seconds, paused, turns = asyncio.run(play(UPDATE_AT * through))
    # A retracted request comes back with all that it had: its prompt, and what it had sampled until then.
    again = [turn.prompt + turn.answer.versions[1].start for turn in turns if len(turn.answer.versions) > 1]
    return {
        "through_seconds": through,
        "updated_seconds": seconds,
        "paused_seconds": paused,
        "reprefilled_tokens": fmean(again) if again else 0.0,
        "retracted_requests": len(again),
    }


def measure(servers: Sequence[Server], size: Size, rounds: int) -> dict[str, float]:
    """Over all rounds, `<name>_<engine>` each. Which engine is first changes from round to round."""
    found: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        for server in servers[:: 1 if number % 2 else -1]:
            with server.awake():
                seen = [rollouts(server, size, number + 1)]
                seen += [update_cost(server, size.rollouts, number + 1) for _ in range(UPDATES)]
            if number >= 0:  # the first round warms up
                for name, value in (item for each in seen for item in each.items()):
                    found.setdefault(f"{name}_{server.name}", []).append(value)
    taken = {name: (min if name.startswith(FASTEST) else median)(values) for name, values in found.items()}
    for server in servers:
        taken[f"retract_seconds_{server.name}"] = (
            taken[f"updated_seconds_{server.name}"] - taken[f"through_seconds_{server.name}"]
        )
    return {f"ratio_sglang_{size.rollouts}": taken["tokens_per_s_embedded"] / taken["tokens_per_s_sglang"], **taken}


def sglang_python() -> str:
    """Of the environment that `make sglang` builds, if it has to."""
    done = subprocess.run(["make", "sglang"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    words = [line.removeprefix("engine.python: ") for line in done.stdout.splitlines() if line.startswith("engine.python: ")]
    if done.returncode or not words:
        raise Failed("`make sglang` has built no environment for SGLang; its words are above")
    return words[-1]


def started(size: Size, run: Path, stack: contextlib.ExitStack) -> list[Server]:
    """Both engines with version 1, resting."""
    sizes = [f"--engine.slots={size.rollouts}", f"--engine.max_length={WIDTHS[-1]}"]
    more = {"embedded": [f"--engine.widths={WIDTHS}"], "sglang": [f"--engine.python={sglang_python()}"]}
    servers = []
    for name, file in CONFIGS.items():
        config = load(ROOT / "configs" / f"{file}.toml", [*sizes, *more[name]])
        if not servers:
            m = config.model
            layers = (m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.rope_theta)
            spec = ModelSpec(VOCABULARY, m.hidden_size, m.intermediate_size, *layers, tie_embeddings=m.tie_embeddings)
            hf.save(hf.random_state(spec), spec, run / "model")  # without an end token: every turn has its full length
        servers.append(Server(name, config, run))
        stack.callback(servers[-1].end)
    for server in servers:
        server.wait()
        with server.awake():
            server.update()
    return servers


def table(found: dict[str, float], size: Size) -> Iterator[str]:
    yield f"| {size.rollouts} rollouts of {size.turns} turns | embedded | SGLang |\n|---|---|---|"
    for name in (key.removesuffix("_sglang") for key in found if key.endswith("_sglang")):
        yield f"| {name} | {found[f'{name}_embedded']:.3f} | {found[f'{name}_sglang']:.3f} |"
    yield f"\nembedded / SGLang, tokens per second: {found[f'ratio_sglang_{size.rollouts}']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    size = Size(args.rollouts, args.turns)
    if args.rounds < 1 or args.rollouts < 1 or not 1 <= args.turns <= 8:
        print("polyturn: error: --rounds and --rollouts are at least 1, --turns 1 to 8: sequences end there", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines end with this program, however it ends
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            found = measure(started(size, Path(folder), stack), size, args.rounds)
    except KeyboardInterrupt:
        return 130
    except Failed as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(found, size)))
    write("engine", found, head())
    return 0


if __name__ == "__main__":
    sys.exit(main())
