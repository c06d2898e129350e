"""How many tokens per second a learner takes in: Deliver, with validation and spool, beside the same trajectories as JSON over
HTTP.

    python tools/bench_ingest.py [--seconds 10] [--actors 8] [--tokens 32768]

Actors are processes of their own. Each leases work and delivers it by the actors' own client, IN_FLIGHT trajectories at once;
the learner validates them, writes its spool, and trains batches in no time (take, commit, and a checkpoint's share of the spool
every ten updates). The other endpoint is of the kind that collects rollouts in Atropos (`/scored_data`): a body of JSON lists
(ids, masks, a logprob per token), checked against a pydantic model and put in a queue; nothing is validated beyond types, and
nothing is written to disk. Both serve from one process, and actors have what they send as their client wants it: arrays, lists.

`tokens_per_s` and `json_tokens_per_s` count what was acknowledged between two moments of the learner's clock, after a start that
is not counted; `ratio_json_http` is their quotient, and `learner_ms` the processor time of the learner per trajectory. Prints a
table and writes runs/bench/ingest.json; with fewer seconds than the default it writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from actors.learner_client import Learner  # noqa: E402
from common.addresses import MAIN  # noqa: E402
from common.seeds import derive_seed  # noqa: E402
from common.types import (  # noqa: E402
    ActionKind,
    Assignment,
    ContextKind,
    Finish,
    Source,
    Status,
    Step,
    StepKind,
    ToolOutcome,
    Trajectory,
    VersionRun,
    spans_of,
)
from learner.control import Control  # noqa: E402
from tools import standins  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402

SECONDS = 10.0
TURNS = 16  # of a trajectory; half of a turn is sampled
IN_FLIGHT = 4  # deliveries of one actor at once
START_S = 60.0  # for actors to begin
CHECKPOINT_EVERY = 10  # updates


def turns(tokens: int, seed: int) -> tuple[Step, ...]:
    """A dialogue of `tokens` tokens: reasoning, a call, an answer to it. Nothing in it is short of what real ones have."""
    random = np.random.default_rng(seed)
    made: list[Step] = []
    for index in range(TURNS):
        length = tokens * (index + 1) // TURNS - tokens * index // TURNS
        action, context = length // 2, length - length // 2
        made.append(
            Step(
                parent=index - 1,
                prefix_len=tokens * index // TURNS,
                context_ids=random.integers(0, standins.VOCABULARY.rows, context, np.int32),
                context_spans=spans_of(
                    [(2, ContextKind.TEMPLATE), (context - 4, ContextKind.OBSERVATION), (2, ContextKind.TEMPLATE)]
                ),
                action_ids=random.integers(0, standins.VOCABULARY.sampleable, action, np.int32),
                action_logprobs=-random.exponential(size=action).astype(np.float32),
                action_spans=spans_of(
                    [(action // 2, ActionKind.REASONING), (1, ActionKind.TEXT), (action - action // 2 - 1, ActionKind.CALL)]
                ),
                versions=(VersionRun(0, 1, standins.ENGINE, MAIN),),
                kind=StepKind.ACT,
                reward=float(index == TURNS - 1),
                finish=Finish.STOP,
                tool_outcomes=(ToolOutcome("search", True, "", 0.1),),
                timings={"generate": 1.0, "env": 0.1},
            )
        )
    return tuple(made)


def answer(asked: Assignment, steps: tuple[Step, ...]) -> Trajectory:
    nothing = steps[0].context_ids[:0]
    return Trajectory(
        rollout_id=asked.rollout_id,
        attempt=asked.attempt,
        group_id=asked.group_id,
        task=asked.task,
        source=Source.POLICY,
        steps=steps,
        tail_ids=nothing,
        tail_spans=spans_of([]),
        status=Status.TERMINATED,
        flags=(),
        metrics={"success": 1.0, "turns": float(len(steps))},
        sampling=asked.sampling,
    )


def as_lists(name: str, steps: tuple[Step, ...]) -> dict[str, Any]:
    """The fields of Atropos's ScoredData for one rollout: of a token that was not sampled the mask is -100, the logprob 1."""
    ids = [i for step in steps for i in (*step.context_ids.tolist(), *step.action_ids.tolist())]
    masks = [i for step in steps for i in (*[-100] * len(step.context_ids), *step.action_ids.tolist())]
    logprobs = [p for step in steps for p in (*[1.0] * len(step.context_ids), *step.action_logprobs.tolist())]
    return {"tokens": [ids], "masks": [masks], "scores": [1.0], "inference_logprobs": [logprobs], "env_id": name}


# ---- actors ----------------------------------------------------------------------------------------------------


def deliver(address: str, name: str, tokens: int) -> None:
    """Lease and deliver until the learner has no more."""

    async def hand_in(client: Learner, asked: Assignment, incarnation: int, steps: tuple[Step, ...]) -> None:
        word = await client.deliver(answer(asked, steps), incarnation)
        if word not in ("STORED", "SUPERSEDED"):  # superseded: cancelled by the end
            raise RuntimeError(f"the learner says {word}")

    async def work() -> None:
        client = Learner(address, name)
        dialogues = [turns(tokens, derive_seed(name, i)) for i in range(IN_FLIGHT)]
        while not (leased := await client.lease(IN_FLIGHT)).no_more:
            pairs = zip(leased.assignments, dialogues, strict=False)
            await asyncio.gather(*[hand_in(client, asked, leased.incarnation, steps) for asked, steps in pairs])
            if not leased.assignments:
                await asyncio.sleep(leased.retry_after_s)
        await client.close()

    logging.getLogger("actors").setLevel(logging.ERROR)
    asyncio.run(work())


def post(url: str, name: str, tokens: int) -> None:
    """Post until the server says that it is enough."""

    async def loop(session: aiohttp.ClientSession, data: dict[str, Any]) -> None:
        while True:
            async with session.post(url, json=data) as reply:
                if (await reply.json())["status"] == "enough":
                    return

    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            data = [as_lists(name, turns(tokens, derive_seed(name, i))) for i in range(IN_FLIGHT)]
            await asyncio.gather(*[loop(session, each) for each in data])

    asyncio.run(work())


@contextlib.contextmanager
def actors(count: int, target: Callable[..., None], address: str, tokens: int) -> Iterator[list[SpawnProcess]]:
    """Processes that run `target`; the caller makes them end by themselves."""
    context = multiprocessing.get_context("spawn")
    made = [context.Process(target=target, args=(address, f"actor-{i}", tokens), daemon=True) for i in range(count)]
    try:
        for process in made:
            process.start()
        yield made
    finally:
        for process in made:
            process.join(START_S)
            process.kill()


@dataclass(frozen=True)
class Rate:
    per_s: float  # trajectories
    server_ms: float  # processor time of the serving process for one of them


def window(stored: Callable[[], int], heard: Callable[[], int], seconds: float, running: list[SpawnProcess]) -> Rate:
    """What is stored within `seconds`, which begin when all actors have been heard and each has had time for a few."""
    limit = time.monotonic() + START_S
    while heard() < len(running) or stored() < 8 * len(running):
        if time.monotonic() > limit or not all(process.is_alive() for process in running):
            raise RuntimeError(f"{heard()} of {len(running)} actors were heard in {START_S:g} s, {stored()} trajectories came")
        time.sleep(0.01)
    begun, before, used = time.perf_counter(), stored(), time.process_time()
    time.sleep(seconds)
    count = stored() - before
    return Rate(count / (time.perf_counter() - begun), 1e3 * (time.process_time() - used) / max(1, count))


# ---- the two endpoints -----------------------------------------------------------------------------------------


def by_deliver(folder: Path, tokens: int, count: int, seconds: float) -> Rate:
    """The real control plane; a thread in place of the training loop."""
    limits = {"max_turns": TURNS, "max_tokens": tokens, "max_new_tokens": tokens}
    tables = {"engine": {"max_length": tokens, "widths": [tokens]}, "learner": {"row_length": tokens, "updates": 10**9}}
    algorithm = {"groups_per_update": 8, "group_size": 8}
    control = standins.control_plane(standins.config({"limits": limits}, algorithm=algorithm, **tables), folder)
    trainer = threading.Thread(target=train, args=(control,))
    with standins.served(control) as address, actors(count, deliver, address, tokens) as running:
        standins.publish(control, 1, 0)
        control.start_rl()
        trainer.start()
        try:
            return window(lambda: control.deliveries["stored"], lambda: len(control.actors), seconds, running)
        finally:
            control.finish()
            trainer.join()


def train(control: Control) -> None:
    update = 0
    while not control.no_more:
        batch = control.take(1.0)
        if batch is None:
            continue
        control.commit(batch)
        update += 1
        control.published(1, update)  # the same weights: nothing becomes stale
        if update % CHECKPOINT_EVERY == 0:
            control.committed(control.state())


class ScoredData(BaseModel):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    env_id: str


class Collector:
    """An asyncio HTTP server on a thread; `/scored_data` is read as FastAPI reads it: json.loads, then pydantic."""

    def __init__(self) -> None:
        self.received, self.over = 0, False
        self.heard: set[str] = set()
        self._queue: deque[ScoredData] = deque(maxlen=512)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(self._app(), access_log=None)
        self._thread = threading.Thread(target=self._loop.run_forever)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/scored_data", self._scored)
        return app

    async def _scored(self, request: web.Request) -> web.Response:
        data = ScoredData.model_validate(json.loads(await request.read()))
        self._queue.append(data)
        self.heard.add(data.env_id)
        self.received += 1
        return web.json_response({"status": "enough" if self.over else "received"})

    async def _start(self) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        self._thread.start()
        try:
            port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)
            yield f"http://127.0.0.1:{port}/scored_data"
        finally:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(START_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def by_json(tokens: int, count: int, seconds: float) -> Rate:
    collector = Collector()
    with collector.serving() as url, actors(count, post, url, tokens) as running:
        try:
            return window(lambda: collector.received, lambda: len(collector.heard), seconds, running)
        finally:
            collector.over = True


def measure(tokens: int, count: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-ingest-") as folder:
        ours = by_deliver(Path(folder), tokens, count, seconds)
    other = by_json(tokens, count, seconds)
    return {
        "tokens_per_s": ours.per_s * tokens,
        "json_tokens_per_s": other.per_s * tokens,
        "ratio_json_http": ours.per_s / other.per_s,
        "trajectories_per_s": ours.per_s,
        "json_trajectories_per_s": other.per_s,
        "learner_ms": ours.server_ms,
        "json_server_ms": other.server_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32_768)
    args = parser.parse_args()
    found = measure(args.tokens, args.actors, args.seconds)
    print(f"| {args.actors} actors, {args.tokens} tokens a trajectory | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:,.2f} |")
    if args.seconds >= SECONDS:
        write("ingest", found, head())


if __name__ == "__main__":
    main()
