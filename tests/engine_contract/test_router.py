"""SGLang's router between actors and engines: the fake one, and the real one where POLYTURN_SGLANG names a Python that has it
(`make test-sglang`), as the launcher starts it. The engines behind it are fakes: what they are sent is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from actors.engines import NEUTRAL, Engines, EngineUnavailable, Generation, Request
from actors.places import PlaceRules
from common.addresses import Addresses
from common.config_engine import EngineConfig
from common.types import EngineInfo, VersionRun
from common.validate import Vocabulary
from learner.engine_api import EngineApi, EngineError
from learner.publisher import Publisher, PublisherOptions
from learner.router import Router
from tests.engine_contract.conftest import REPOSITORY, SGLANG, free_port
from tests.fake_router import FakeRouter
from tests.fakes import DROP, Answer, FakeEngine, count_up
from tests.processes import eventually, until
from tests.publish.calls import canary, save, weights
from tools.launching.engines import router_command


class RealRouter:
    """The same life as a fake one's."""

    def __init__(self, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", log
        self.start()

    def start(self) -> None:
        addresses = Addresses(learner="", engines=[], envs={}, router=self.url, router_metrics=f"127.0.0.1:{free_port()}")
        command = router_command(EngineConfig(kind="sglang", python=SGLANG, router=True), addresses)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out)
        until(self._answers, "the router", 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(EngineError):
            return EngineApi(self.url).call("GET", "/workers", 5.0)["total"] == 0
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture(params=["fake", "real"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeRouter | RealRouter]:
    if request.param == "fake":
        with FakeRouter() as router:
            yield router
        return
    if not SGLANG or not any(Path(SGLANG).parents[1].glob("lib/python*/site-packages/sglang_router")):
        pytest.skip("make test-sglang runs this against the real router")
    router = RealRouter(tmp_path / "log")
    yield router
    router.stop()


def endless(token: int):
    return lambda prompt, sampling: [token] * sampling["max_new_tokens"]


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with FakeEngine(reply=endless(7), token_s=0.002) as first, FakeEngine(reply=endless(8), token_s=0.002) as second:
        first.weight_version = second.weight_version = "1"
        yield [first, second]


class Run:
    """The learner's side with a table that the test writes, the rows that actors would see, and an actor's client."""

    def __init__(self, process: FakeRouter | RealRouter, engines: list[FakeEngine]) -> None:
        self.engines, self.rows, self.events = engines, [], []
        self.client = Engines(Vocabulary(2000, 2000), 20.0, PlaceRules(32))
        self.router = Router(process.url, self.rows.append, lambda name, values: self.events.append(values), poll_s=0.05)

    def table(self, *states: tuple[str, int]) -> None:
        rows = [("engine-0", self.engines[0].url), ("engine-1", self.engines[1].url)]
        self.router.hear(
            [EngineInfo(name, url, "main", v, state, "why") for (name, url), (state, v) in zip(rows, states, strict=True)]
        )

    @property
    def row(self) -> EngineInfo:
        return self.rows[-1][0] if self.rows else EngineInfo("", "", "", 0, "nothing")

    def workers(self) -> set[str]:
        listed = EngineApi(self.row.url).call("GET", "/workers", 5.0)["workers"]
        return {f"engine-{n}" for n, engine in enumerate(self.engines) if engine.url in [w["url"] for w in listed]}

    async def both(self, version: int = 1) -> None:
        self.table(("ready", version), ("ready", version))
        await eventually(lambda: (self.row.state, self.row.reason, self.workers()) == ("ready", "", {"engine-0", "engine-1"}))

    async def ask(self, rid: str = "r", most: int = 4, ids: list[int] | None = None) -> Generation:
        self.client.places.update([self.row])
        async with self.client.places.take("router", "main", lambda name, on, why: None) as chosen:
            request = Request(rid, np.asarray(ids or [5, 6], np.int32), most, 1.0, (3,), 4_000_000_000)
            return await self.client.generate(chosen, request)

    def asked(self) -> list[dict]:
        return [body for engine in self.engines for path, body in engine.calls if path == "/generate"]


@pytest.fixture
async def run(process: FakeRouter | RealRouter, engines: list[FakeEngine]) -> AsyncIterator[Run]:
    made = Run(process, engines)
    try:
        yield made
        assert +made.client.places.in_flight == {}
        await eventually(lambda: not any(engine.running or engine.waiting for engine in engines))
    finally:
        await made.client.close()
        await asyncio.to_thread(made.router.close)


# ---- what goes through it ------------------------------------------------------------------------------------------------


async def test_request_and_answer_pass_whole(run: Run) -> None:
    await run.both()
    part = await run.ask("mine")
    assert part.ids in ([7] * 4, [8] * 4)
    assert part.logprobs == [-0.5] * 4
    assert part.versions == (VersionRun(0, 1, "router", "main"),)
    (body,) = run.asked()
    assert (body["rid"], body["input_ids"], body["return_logprob"]) == ("mine", [5, 6], True)
    said = {key: value for key, value in NEUTRAL.items() if value is not None}  # it leaves out what is null
    said |= {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": [3], "sampling_seed": 4_000_000_000}
    assert said.items() <= body["sampling_params"].items()


@pytest.mark.parametrize("failure", [Answer(503), Answer(500), Answer(429), DROP], ids=str)
async def test_it_tries_nothing_again(run: Run, failure: Answer | str) -> None:
    await run.both()
    for engine in run.engines:
        engine.script("/generate", failure)
    with pytest.raises(EngineUnavailable):
        await run.ask()
    assert len(run.asked()) == 1


async def test_a_request_that_is_cancelled_ends_at_its_engine(run: Run) -> None:
    await run.both()
    asking = asyncio.create_task(run.ask(most=100_000))
    await eventually(lambda: any(engine.running for engine in run.engines))
    asking.cancel()
    await eventually(lambda: not any(engine.running for engine in run.engines))


async def test_a_conversation_stays_on_its_engine(run: Run, process: FakeRouter | RealRouter) -> None:
    if isinstance(process, FakeRouter):
        pytest.skip("the fake one takes turns")
    await run.both()
    rng = np.random.default_rng(0)

    async def talk(number: int) -> set[int]:
        ids, seen = rng.integers(0, 1000, 60).tolist(), set()
        for turn in range(4):
            part = await run.ask(f"{number}.{turn}", 20, ids)
            seen.add(part.ids[0])
            ids = [*ids, *part.ids, *rng.integers(0, 1000, 8).tolist()]
        return seen

    seen = await asyncio.gather(*(talk(number) for number in range(16)))
    assert all(len(each) == 1 for each in seen)
    assert set().union(*seen) == {7, 8}  # and both engines work


# ---- who is a worker ------------------------------------------------------------------------------------------------------


async def test_the_row_follows_the_engines(run: Run) -> None:
    await eventually(lambda: run.router._row.reason == "")  # it has seen the router
    run.table(("starting", 0), ("starting", 0))
    await eventually(lambda: run.row.state == "starting")
    run.table(("ready", 3), ("starting", 0))
    await eventually(lambda: run.row.state == "ready")
    assert (run.row.name, run.row.pool, run.row.version, run.row.reason) == ("router", "main", 3, "engine-1 starting (why)")
    assert run.workers() == {"engine-0"}
    run.table(("ready", 3), ("ready", 2))
    await eventually(lambda: run.row.version == 2)  # the oldest that it may be served by
    run.table(("updating", 3), ("ready", 3))
    assert (run.row.state, run.row.version) == ("ready", 3)
    run.table(("updating", 3), ("updating", 3))
    assert run.row.state == "updating"
    await asyncio.sleep(0.3)  # it has looked again
    assert run.workers() == {"engine-0", "engine-1"}  # what they have in flight waits and goes on


async def test_an_engine_in_quarantine_gets_nothing_and_comes_back(run: Run) -> None:
    await run.both()
    run.table(("quarantined", 1), ("ready", 1))
    await eventually(lambda: run.workers() == {"engine-1"})
    assert {tuple((await run.ask(f"q{n}", ids=[n, n + 1])).ids) for n in range(6)} == {(8,) * 4}
    run.table(("quarantined", 1), ("quarantined", 1))
    assert run.row.state == "quarantined"
    await eventually(lambda: run.workers() == set())
    await run.both()
    assert (await run.ask("fresh")).ids


async def test_an_engine_that_is_removed_ends_what_it_has(run: Run) -> None:
    await run.both()
    asking = [asyncio.create_task(run.ask(f"r{n}", 200, [100 * n, n])) for n in range(6)]
    await eventually(lambda: sum(len(engine.running) for engine in run.engines) == 6)
    run.table(("quarantined", 1), ("ready", 1))
    await eventually(lambda: run.workers() == {"engine-1"})
    assert all(len(part.ids) == 200 for part in await asyncio.gather(*asking))


async def test_a_router_that_is_restarted_gets_its_workers_again(run: Run, process: FakeRouter | RealRouter) -> None:
    await run.both()
    await asyncio.to_thread(process.stop)
    await eventually(lambda: run.row.state == "starting")
    assert "cannot reach" in run.row.reason
    await asyncio.to_thread(process.start) if isinstance(process, RealRouter) else await asyncio.to_thread(process.restart)
    await eventually(lambda: run.row.state == "ready" and len(run.workers()) == 2)
    assert (await run.ask("fresh")).ids


async def test_a_dead_engine_leaves_and_comes_back_by_the_publishers_word(
    process: FakeRouter | RealRouter, engines: list[FakeEngine], tmp_path: Path
) -> None:
    rows: list[list[EngineInfo]] = []
    router = Router(process.url, rows.append, lambda name, values: None, poll_s=0.05)
    table = [EngineInfo(f"engine-{n}", engine.url, "main", 0, "starting") for n, engine in enumerate(engines)]
    options = PublisherOptions(tmp_path, 1, poll_s=0.05)
    for engine in engines:
        engine.reply = count_up  # as its canary wants
    publisher = Publisher(options, table, save, lambda name, values: None, router.hear)

    def workers() -> int:
        return EngineApi(process.url).call("GET", "/workers", 5.0)["total"]

    try:
        publisher.publish(0, weights(0), canary())
        await eventually(lambda: rows and rows[-1][0].state == "ready" and rows[-1][0].reason == "" and workers() == 2)
        await asyncio.to_thread(engines[0].stop)
        await eventually(lambda: workers() == 1)
        assert rows[-1][0].state == "ready"
        await asyncio.to_thread(engines[0].restart)
        await eventually(lambda: workers() == 2 and rows[-1][0].reason == "")
        assert engines[0].weight_version == "1"
    finally:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(router.close)
