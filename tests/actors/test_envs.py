"""The client of env servers: placement, back-off, lost answers, lost sessions."""

from __future__ import annotations

import asyncio
import json
from collections import deque

import grpc
import pytest

from actors.envs import EnvLost, Envs
from common import wire
from common.proto import rl_pb2_grpc as pb_grpc
from common.types import Action, Status, Task
from common.waits import Wait
from envserver.admission import Catalog
from envserver.server import EnvService
from envserver.sessions import Sessions
from tests.actors.servers import ScriptedDomain, env_server
from tests.processes import eventually

TASK = Task("scripted", "t-1", 0, {"texts": ["he", "done"]})


class LosesAnswers(EnvService):
    """Does what it is asked, then loses the next answers: the given codes are what the caller sees."""

    def __init__(self, domain: ScriptedDomain, codes: list[grpc.StatusCode]) -> None:
        self.live = Sessions(domain, 8, 1, 60.0)
        super().__init__(domain, Catalog({}, {}, {}), self.live)
        self.codes = deque(codes)
        self.steps: list[int] = []

    async def Step(self, request, context):
        self.steps.append(request.step_index)
        reply = await super().Step(request, context)
        if self.codes:
            await context.abort(self.codes.popleft(), "lost")
        return reply


class LosesOpens(LosesAnswers):
    async def Open(self, request, context):
        reply = await super().Open(request, context)
        if self.codes:
            await context.abort(self.codes.popleft(), "lost")
        return reply


async def served(service: EnvService) -> tuple[grpc.aio.Server, str]:
    server = wire.aio_server()
    pb_grpc.add_EnvServiceServicer_to_server(service, server)
    port = wire.bind(server, "127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_077_a_lost_answer_is_asked_for_again_and_the_tool_runs_once() -> None:
    domain = ScriptedDomain()
    service = LosesAnswers(domain, [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
    server, address = await served(service)
    envs = Envs({"scripted": [address]})
    session = await envs.open(TASK, "s-1", False)
    observation = await envs.step(session, 0, Action("a"))
    assert (observation.messages[0].text, observation.status) == ("he", Status.RUNNING)
    assert service.steps == [0, 0, 0, 0]
    assert len(domain.actions) == 1
    await envs.close()
    assert domain.closed == 1
    await server.stop(0)


async def test_a_server_that_stays_away_is_given_up() -> None:
    domain = ScriptedDomain()
    service = LosesAnswers(domain, [grpc.StatusCode.UNAVAILABLE] * 99)
    server, address = await served(service)
    envs = Envs({"scripted": [address]})
    session = await envs.open(TASK, "s-1", False)
    with pytest.raises(EnvLost, match=r"Step at .* UNAVAILABLE: lost"):
        await envs.step(session, 0, Action("a"))
    assert len(service.steps) == 6
    await envs.close()
    await server.stop(0)


async def test_a_full_replica_sends_us_to_the_other() -> None:
    async with env_server(ScriptedDomain(), capacity=1) as small, env_server(ScriptedDomain(), capacity=8) as large:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}" for server in (small, large)]})
        for n in range(9):
            await envs.open(TASK, f"s-{n}", False)
        assert (len(small.sessions), len(large.sessions)) == (1, 8)
        await envs.close()


async def test_the_less_loaded_of_two_replicas_is_chosen() -> None:
    async with env_server(ScriptedDomain()) as one, env_server(ScriptedDomain()) as other:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}" for server in (one, other)]})
        for n in range(10):
            await envs.open(TASK, f"s-{n}", False)
        assert (len(one.sessions), len(other.sessions)) == (5, 5)
        await envs.close()
        await eventually(lambda: not len(one.sessions) + len(other.sessions))


async def test_opening_waits_while_everything_is_full() -> None:
    async with env_server(ScriptedDomain(), capacity=1) as server:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}"]})
        first = await envs.open(TASK, "s-1", False)
        second = asyncio.create_task(envs.open(TASK, "s-2", False))
        await asyncio.sleep(0.05)
        assert not second.done()
        envs.close_session(first)
        assert (await second).id == "s-2"
        await envs.close()


async def test_a_session_that_the_server_lost_is_known_by_the_next_heartbeat() -> None:
    async with env_server(ScriptedDomain()) as server:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}"]})
        session = await envs.open(TASK, "s-1", False)
        await envs.renew()
        assert not session.lost
        server.sessions.close("s-1")
        await envs.renew()
        with pytest.raises(EnvLost, match="session s-1 is gone"):
            await envs.step(session, 0, Action("a"))
        await envs.close()


async def test_heartbeats_tell_who_drains_and_how_full_a_replica_is() -> None:
    async with env_server(ScriptedDomain()) as one, env_server(ScriptedDomain()) as other:
        addresses = [f"127.0.0.1:{server.port}" for server in (one, other)]
        somebody, envs = Envs({"scripted": addresses[1:]}), Envs({"scripted": addresses})
        await somebody.open(TASK, "theirs", False)
        await envs.renew()
        assert {envs._choose("scripted", "").address for _ in range(20)} == {addresses[0]}
        one.sessions.draining = True
        await envs.renew()
        assert {envs._choose("scripted", "").address for _ in range(20)} == {addresses[1]}
        await somebody.close()
        await envs.close()


async def test_a_lost_answer_to_open_is_asked_for_again_and_nothing_stays_behind() -> None:
    """On the only replica the same session is joined; on another one, the first is told to close."""
    domain = ScriptedDomain()
    alone = LosesOpens(domain, [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
    server, address = await served(alone)
    envs = Envs({"scripted": [address]})
    session = await envs.open(TASK, "s-1", False)
    assert (await envs.step(session, 0, Action("a"))).messages[0].text == "he"
    assert len(alone.live) == 1
    async with env_server(domain) as second:
        both = Envs({"scripted": [address, f"127.0.0.1:{second.port}"]})
        alone.codes.append(grpc.StatusCode.UNAVAILABLE)
        both._replicas["scripted"][1].reported = 99  # the first replica is tried first
        assert (await both.open(TASK, "s-2", False)).replica.address == f"127.0.0.1:{second.port}"
        await eventually(lambda: len(alone.live) == 1)
        await both.close()
    await envs.close()
    await server.stop(0)


async def test_an_unknown_domain_and_a_wrong_task_are_clear() -> None:
    async with env_server(ScriptedDomain()) as server:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}"]})
        with pytest.raises(EnvLost, match=r"no env server for domain 'chess'; there are \['scripted'\]"):
            await envs.open(Task("chess", "t", 0, {}), "s-1", False)
        with pytest.raises(EnvLost, match="Open at"):
            await envs.open(Task("scripted", "t", 0, json.loads("{}")), "s-1", False)
        await envs.close()


async def test_a_heartbeat_brings_what_sessions_wait_for_inside_of_the_server() -> None:
    """The step takes a second on a thread; the heartbeat answers meanwhile, so the server is not silent."""
    async with env_server(ScriptedDomain(blocking=True)) as server:
        envs = Envs({"scripted": [f"127.0.0.1:{server.port}"]})
        session = await envs.open(Task("scripted", "t", 0, {"texts": ["slow 1", "he"]}), "s-1", False)
        step = asyncio.create_task(envs.step(session, 0, Action("a")))
        await eventually(lambda: server.sessions.edges({"s-1"}))
        await envs.renew()
        (edge,) = envs.edges()
        assert (edge.owner, edge.name, edge.why) == ("env-scripted-0/s-1", "env.code", "step 0")
        heard = envs.waits.silence("env-scripted-0")
        await envs.renew()
        assert envs.waits.silence("env-scripted-0") < heard + 1.0
        await step
        assert envs.edges() == []
        await envs.close()


async def test_a_wait_for_an_opening_names_the_replica_and_what_it_answered() -> None:
    async with env_server(ScriptedDomain(), capacity=1) as server:
        envs, wait = Envs({"scripted": [f"127.0.0.1:{server.port}"]}), Wait("r-1")
        assert envs.waits.silence("env-scripted-0") == float("inf")
        first = await envs.open(TASK, "s-1", False)
        assert envs.waits.silence("env-scripted-0") < float("inf")
        opening = asyncio.create_task(envs.open(TASK, "s-2", False, wait))
        await eventually(lambda: "all 1 sessions are in use" in str(wait))
        assert (wait.name, wait.on) == ("env.open", "env-scripted-0")
        number = wait.edge(0.0, 0.0).number
        envs.close_session(first)
        await opening
        assert wait.edge(0.0, 0.0).number == number  # one wait, however often it was tried
        await envs.close()
