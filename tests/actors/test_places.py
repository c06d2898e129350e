"""Which engine gets a request, in which order, and what a failed one is spared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from actors.places import LONGEST_REST_S, NoEngine, PlaceRules, Places
from actors.rollout import run_rollout
from common.types import EngineInfo, Status
from common.waits import Wait
from tests.actors.servers import ScriptedDomain, assignment, env_server, toy_parts
from tests.processes import eventually


def table(*rows: tuple[str, int], pool: str = "main") -> list[EngineInfo]:
    return [EngineInfo(f"engine-{n}", "http://127.0.0.1:9", pool, version, state) for n, (state, version) in enumerate(rows)]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as held:
        yield held


class Client:
    """Takes places and keeps them."""

    def __init__(self, stack: AsyncExitStack, rules: PlaceRules, *rows: tuple[str, int], index: int = 0) -> None:
        self.places = Places(rules, index)
        self.stack = stack
        self.told: list[tuple[str, str, str]] = []
        stack.callback(self.places.close)
        self.places.update(table(*rows))

    async def take(self, preferred: str = "", pool: str = "main", otherwise: str = "") -> str:
        taken = self.places.take((preferred,), pool, lambda *what: self.told.append(what), otherwise)
        found = await self.stack.enter_async_context(taken)
        return found.name


async def waiting(task: asyncio.Task) -> bool:
    """Whether it still waits after all that can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_rollout_goes_back_to_its_engine_while_that_has_a_place(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(2), ("ready", 1), ("ready", 1))
    assert [await client.take("engine-1") for _ in range(3)] == ["engine-1", "engine-1", "engine-0"]


async def test_least_loaded_does_not_care_where_the_prefix_is(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(4, "least_loaded"), ("ready", 1), ("ready", 1))
    assert [await client.take("engine-1") for _ in range(4)] == ["engine-0", "engine-1", "engine-0", "engine-1"]


async def test_processes_begin_with_different_engines(stack: AsyncExitStack) -> None:
    clients = [Client(stack, PlaceRules(4), ("ready", 1), ("ready", 1), ("ready", 1), index=index) for index in range(3)]
    assert [await client.take() for client in clients] == ["engine-0", "engine-1", "engine-2"]


async def test_only_engines_that_are_ready_with_published_weights_are_used(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(4), ("ready", 0), ("updating", 2), ("quarantined", 2))
    asking = asyncio.create_task(client.take("engine-1"))
    assert await waiting(asking)
    assert client.told == [("engine.ready", "engines of main", client.places.states())]
    client.places.update(table(("ready", 0), ("ready", 3), ("quarantined", 2)))
    assert await asking == "engine-1"


async def test_a_pool_without_an_engine_is_an_error_with_words(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(4), ("ready", 1))
    with pytest.raises(NoEngine, match="pool 'late' has no engine; the table: engine-0 ready version 1"):
        await client.take(pool="late")


async def test_a_rollout_without_an_engine_in_the_table_fails_with_words() -> None:
    async with env_server(ScriptedDomain()) as server, toy_parts([f"127.0.0.1:{server.port}"], []) as parts:
        record = await run_rollout(assignment(["he"]), parts, Wait())
    assert record.status == Status.FAILED
    assert record.flags == ("reason:NoEngine: pool 'main' has no engine; the table: no engine in the table",)


async def test_places_are_given_in_the_order_of_asking(stack: AsyncExitStack) -> None:
    """Also to those who come when one is free again: nobody is passed by."""
    places = Client(stack, PlaceRules(1), ("ready", 1)).places
    order: list[int] = []

    async def ask(number: int) -> None:
        async with places.take((), "main", lambda name, on, why: None):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(ask(number))
            if number % 3 == 0:
                await asyncio.sleep(0)
    assert order == list(range(20))
    assert places.in_flight["engine-0"] == 0


async def test_a_full_pool_is_waited_for_by_name(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(1), ("ready", 1), ("updating", 1))
    async with client.places.take((), "main", Wait().set):
        asking = asyncio.create_task(client.take())
        assert await waiting(asking)
        assert client.told == [("engine.place", "engines of main", "1 requests in flight at each of engine-0")]
    assert await asking == "engine-0"


async def test_who_is_cancelled_while_waiting_leaves_no_trace(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(1), ("ready", 1))
    async with client.places.take((), "main", Wait().set):
        gone, stays = asyncio.create_task(client.take()), asyncio.create_task(client.take())
        assert await waiting(gone)
        gone.cancel()
        assert await waiting(stays)
    assert await stays == "engine-0"
    assert gone.cancelled()
    assert client.places.in_flight["engine-0"] == 1


async def test_who_is_cancelled_in_the_moment_of_getting_a_place_gives_it_back(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(1), ("ready", 1))
    async with client.places.take((), "main", Wait().set):
        gone = asyncio.create_task(client.take())
        assert await waiting(gone)
    gone.cancel()  # the place is granted already, and the task has not run since
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert client.places.in_flight["engine-0"] == 0


# ---- engines that fail ---------------------------------------------------------------------------------------------------


def pause(places: Places, name: str = "engine-0") -> float:
    rest = places._rests[name]
    return rest.until - rest.began


async def test_a_failed_engine_rests_longer_each_time_and_comes_back_by_itself(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(8), ("ready", 1), ("ready", 1))
    places, pauses = client.places, []
    for number in range(12):
        places.failed("engine-0", begun=float("inf"))
        pauses.append(pause(places))
        assert await client.take("engine-0") == "engine-1" if number < 4 else True
    for number, seconds in enumerate(pauses):
        longest = min(0.5 * 2**number, LONGEST_REST_S)
        assert longest / 2 <= seconds <= longest
    assert len({seconds / min(0.5 * 2**n, LONGEST_REST_S) for n, seconds in enumerate(pauses)}) == 12  # no two processes agree
    places.answered("engine-0", begun=float("inf"))
    places.failed("engine-0", begun=float("inf"))
    assert pause(places) <= 0.5  # a success ends the row
    places.failed("engine-1", begun=float("inf"))
    assert await client.take("engine-0") in ("engine-0", "engine-1")  # without a word from the learner
    assert client.told[0][0] == "engine.ready"


async def test_requests_that_were_under_way_are_one_failure(stack: AsyncExitStack) -> None:
    places = Client(stack, PlaceRules(8), ("ready", 1)).places
    for _ in range(8):
        places.failed("engine-0", begun=0.0)
    assert places._rests["engine-0"].failures == 1
    places.answered("engine-0", begun=0.0)  # of one that was answered before
    assert "engine-0" in places._rests


@pytest.mark.parametrize(("state", "version"), [("ready", 2), ("updating", 1)])
async def test_the_table_ends_a_rest(stack: AsyncExitStack, state: str, version: int) -> None:
    """The learner has just spoken to an engine with new weights, or to one that it calls ready again."""
    client = Client(stack, PlaceRules(8), ("ready", 1))
    for _ in range(8):
        client.places.failed("engine-0", begun=float("inf"))
    client.places.update(table(("ready", 1)))
    assert "engine-0" in client.places._rests
    asking = asyncio.create_task(client.take())
    assert await waiting(asking)
    client.places.update(table((state, version)))
    client.places.update(table(("ready", version)))
    assert not await waiting(asking)  # at once, not when the rest would have ended by itself


async def test_a_wait_for_a_place_becomes_one_for_an_engine(stack: AsyncExitStack) -> None:
    client = Client(stack, PlaceRules(1), ("ready", 1))
    async with client.places.take((), "main", Wait().set):
        asking = asyncio.create_task(client.take())
        assert await waiting(asking)
        client.places.update(table(("quarantined", 1)))
        assert [name for name, *_ in client.told] == ["engine.place", "engine.ready"]
        client.places.update(table(("ready", 1)))
        client.places.failed("engine-0", begun=float("inf"))
        assert [name for name, *_ in client.told] == ["engine.place", "engine.ready"] * 2
        client.places.update(table(("ready", 1)))
        assert await waiting(asking)
    await eventually(asking.done)


# ---- two pools -----------------------------------------------------------------------------------------------------------


def two_pools(state: str) -> list[EngineInfo]:
    rows = table(("ready", 1), ("ready", 1))
    return [rows[0], replace(rows[1], pool="stale", state=state)]


async def test_whoever_waits_for_a_full_pool_goes_to_the_other_one_when_its_engines_are_gone() -> None:
    async with AsyncExitStack() as stack:
        client = Client(stack, PlaceRules(1))
        client.places.update(two_pools("ready"))
        assert await client.take(pool="stale", otherwise="main") == "engine-1"
        asking = asyncio.create_task(client.take(pool="stale", otherwise="main"))
        staying = asyncio.create_task(client.take(pool="stale"))
        assert await waiting(asking)  # it is full, and ready
        assert client.told == [("engine.place", "engines of stale", "1 requests in flight at each of engine-1")] * 2
        client.places.update(two_pools("updating"))
        assert await asking == "engine-0"
        assert await waiting(staying)
        staying.cancel()
        await asyncio.wait([staying])
        assert client.places.in_flight == {"engine-0": 1, "engine-1": 1}


async def test_a_pool_without_a_ready_engine_is_left_at_once_and_the_wait_for_the_other_has_a_name() -> None:
    async with AsyncExitStack() as stack:
        client = Client(stack, PlaceRules(1))
        client.places.update(two_pools("quarantined"))
        assert await client.take(pool="stale", otherwise="main") == "engine-0"
        asking = asyncio.create_task(client.take(pool="stale", otherwise="main"))
        assert await waiting(asking)
        assert client.told == [("engine.place", "engines of main", "1 requests in flight at each of engine-0")]
        asking.cancel()
        await asyncio.wait([asking])
