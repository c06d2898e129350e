"""The conformance suite: what every domain must do, as a class of plain pytest tests.

    class TestGuess(DomainConformance):
        def make_domain(self) -> Domain:
            return Guess()

Subclass it in a test file of your own and run pytest. `serving` starts a real server on a loopback port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from common.tasks import SPLITS, fingerprint
from common.types import Action, Observation, Status, Task, ToolCall
from envserver.admission import Catalog, build_catalog, judge
from envserver.env import Domain, EnvMisuse
from envserver.server import EnvServer, Settings
from envserver.sessions import Sessions

# Mistakes of an agent that every domain must survive: each is an observation, none ends the process.
WRONG_ACTIONS = (
    Action("", (ToolCall("w0", "no_such_tool", {"x": 1}),)),
    Action("", (ToolCall("w1", "", error="the call is not JSON"),)),
    Action("", (ToolCall("w2", "\ud800<|im_end|>\x00", {"\udfff": "\ud800"}),)),
)


@dataclass(frozen=True)
class Served:
    """A running server and a client of it."""

    server: EnvServer
    stub: pb_grpc.EnvServiceStub
    address: str


@asynccontextmanager
async def serving(domain: Domain, catalog: Catalog, settings: Settings | None = None) -> AsyncIterator[Served]:
    """The domain on a free loopback port, until the block ends."""
    settings = settings or Settings("127.0.0.1:0", capacity=64, threads=4, lease_s=60.0, drain_s=0.0)
    server = EnvServer(domain, catalog, settings)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    channel = wire.aio_channel(address)
    try:
        yield Served(server, pb_grpc.EnvServiceStub(channel), address)
    finally:
        await channel.close()
        await server.drain()


def without_clock(observation: Observation) -> Observation:
    """The observation without how long its tools took, to compare two episodes."""
    outcomes = tuple(dataclasses.replace(outcome, seconds=0.0) for outcome in observation.tool_outcomes)
    return dataclasses.replace(observation, tool_outcomes=outcomes)


def play(domain: Domain, task: Task, actions: Iterable[Action]) -> list[Observation]:
    """The observations of an episode in this process, from reset to the end or the last action."""
    env = domain.make_env()
    try:
        out = [env.reset(task)]
        for action in actions:
            if out[-1].status != Status.RUNNING:
                break
            out.append(env.step(action))
    finally:
        env.close()
    return [without_clock(observation) for observation in out]


async def play_remote(stub: pb_grpc.EnvServiceStub, session_id: str, task: Task, actions: Iterable[Action]) -> list[Observation]:
    """The same through a server."""
    opened = await stub.Open(pb.OpenRequest(session_id=session_id, task=convert.task_to(task)))
    out = [convert.observation_from(opened.observation)]
    for index, action in enumerate(actions):
        if out[-1].status != Status.RUNNING:
            break
        request = pb.StepRequest(session_id=session_id, step_index=index, action=convert.action_to(action))
        out.append(convert.observation_from((await stub.Step(request)).observation))
    await stub.Close(pb.CloseRequest(session_id=session_id))
    return [without_clock(observation) for observation in out]


class DomainConformance:
    """Tests of one domain, with `n` tasks per split."""

    n = 8

    def make_domain(self) -> Domain:
        raise NotImplementedError("return the domain to test")

    def actions(self, domain: Domain, task: Task) -> list[Action]:
        """Some episode: wrong calls, silence, then the reference solution."""
        reference = domain.reference(task) if domain.has_reference else []
        return [*WRONG_ACTIONS, Action(""), *reference]

    def test_tasks_are_the_same_every_time_and_survive_json(self) -> None:
        domain, again = self.make_domain(), self.make_domain()
        for split in SPLITS:
            tasks = domain.tasks(split, self.n)
            assert 0 < len(tasks) <= self.n
            assert len({task.id for task in tasks}) == len(tasks)
            assert all(task.domain == domain.name and task.id for task in tasks)
            assert fingerprint(tasks) == fingerprint(again.tasks(split, self.n))
            assert fingerprint(tasks[:-1]) == fingerprint(domain.tasks(split, self.n)[:-1])
            for task in tasks:
                assert json.loads(json.dumps(task.payload)) == task.payload
                wired = convert.task_from(convert.task_to(task))
                assert (wired.domain, wired.id, wired.seed, wired.payload) == (task.domain, task.id, task.seed, task.payload)

    def test_splits_never_overlap(self) -> None:
        domain = self.make_domain()
        train, heldout = (domain.tasks(split, self.n * 8) for split in SPLITS)
        texts = [{json.dumps(task.payload, sort_keys=True) for task in tasks} for tasks in (train, heldout)]
        assert not texts[0] & texts[1]
        assert not {task.id for task in train} & {task.id for task in heldout}

    def test_tools_and_instructions_are_text_a_template_can_show(self) -> None:
        domain = self.make_domain()
        assert domain.instructions.strip() == domain.instructions != ""
        json.dumps(domain.tools).encode("utf-8")
        for tool in domain.tools:
            assert tool["type"] == "function"
            assert tool["function"]["name"]
            assert tool["function"]["description"]
            assert tool["function"]["parameters"]["type"] == "object"

    def test_reset_is_a_function_of_the_task(self) -> None:
        """Two environments, and a third after one of them has changed its state, say the same."""
        domain = self.make_domain()
        for task in domain.tasks("train", self.n):
            actions = self.actions(domain, task)
            first = play(domain, task, actions)
            assert play(domain, task, actions) == first
            assert play(self.make_domain(), task, actions) == first

    def test_environments_are_single_use(self) -> None:
        domain = self.make_domain()
        task = domain.tasks("train", 1)[0]
        env = domain.make_env()
        assert _raises(lambda: env.step(Action("")), EnvMisuse), "step before reset must raise EnvMisuse"
        env.reset(task)
        assert _raises(lambda: env.reset(task), EnvMisuse), "a second reset must raise EnvMisuse"
        env.close()
        env.close()

    def test_step_after_the_end_is_an_error(self) -> None:
        domain = self.make_domain()
        if not domain.has_reference:
            return
        task = domain.tasks("train", 1)[0]
        env = domain.make_env()
        env.reset(task)
        statuses = [env.step(action).status for action in domain.reference(task)]
        assert statuses[-1] in (Status.TERMINATED, Status.TRUNCATED)
        assert _raises(lambda: env.step(Action("")), EnvMisuse), "step after the end must raise EnvMisuse"
        env.close()

    def test_wrong_actions_are_observations(self) -> None:
        domain = self.make_domain()
        task = domain.tasks("train", 1)[0]
        for action in (*WRONG_ACTIONS, *_wrong_arguments(domain)):
            observation = play(domain, task, [action])[-1]
            assert observation.reward == 0
            assert [message.tool_call_id for message in observation.messages] == [call.id for call in action.tool_calls]
            assert all(message.text for message in observation.messages)
            assert not any(outcome.ok for outcome in observation.tool_outcomes)
            assert len(observation.tool_outcomes) == len(action.tool_calls)

    def test_calls_of_one_action_fail_alone(self) -> None:
        domain = self.make_domain()
        task = domain.tasks("train", 1)[0]
        good = domain.reference(task)[0].tool_calls if domain.has_reference else ()
        if good:
            observation = play(domain, task, [Action("", (WRONG_ACTIONS[0].tool_calls[0], *good))])[-1]
            assert [outcome.ok for outcome in observation.tool_outcomes] == [False] + [True] * len(good)

    def test_every_text_is_utf8(self) -> None:
        domain = self.make_domain()
        for task in domain.tasks("heldout", self.n):
            for observation in play(domain, task, self.actions(domain, task)):
                assert all(message.text.encode("utf-8") and message.role in ("user", "tool") for message in observation.messages)
                convert.observation_to(observation).SerializeToString()

    def test_admission_null_scores_zero_reference_scores_one(self) -> None:
        domain = self.make_domain()
        for split in SPLITS:
            for task in domain.tasks(split, self.n):
                verdict = judge(domain, task)
                assert verdict.kind == "admitted", f"{task.id}: {verdict.reason}"

    def test_over_the_wire_is_the_same_episode(self) -> None:
        domain = self.make_domain()
        catalog = build_catalog(domain, dict.fromkeys(SPLITS, self.n), checks=0)

        async def compare() -> None:
            async with serving(domain, catalog) as served:
                for task in catalog.tasks["heldout"]:
                    # JSON on the wire cannot carry the third wrong action as it is
                    actions = [WRONG_ACTIONS[0], WRONG_ACTIONS[1], *self.actions(domain, task)[len(WRONG_ACTIONS) :]]
                    assert await play_remote(served.stub, f"s-{task.id}", task, actions) == play(domain, task, actions)
                assert len(served.server.sessions) == 0

        asyncio.run(compare())

    def test_siblings_of_one_task_do_not_see_each_other(self) -> None:
        """Four sessions of one task: what the first one does changes nothing for the others."""
        domain = self.make_domain()
        task = domain.tasks("train", 1)[0]
        actions = self.actions(domain, task)
        alone = play(domain, task, actions)

        async def compare() -> None:
            sessions = Sessions(domain, capacity=4, threads=2, lease_s=60.0)
            for name in "abcd":
                await sessions.open(name, task, False)
            for name in "abcd":  # one after another: each would find what the one before it left
                for index, action in enumerate(actions):
                    if alone[index].status != Status.RUNNING:
                        break
                    reply = await sessions.step(name, index, action)
                    assert without_clock(convert.observation_from(reply.observation)) == alone[index + 1]
            sessions.close_all()

        asyncio.run(compare())


def _raises(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def _wrong_arguments(domain: Domain) -> list[Action]:
    """Calls of real tools with an unknown argument, and with a list in place of the arguments' object."""
    names = [tool["function"]["name"] for tool in domain.tools]
    unknown = [Action("", (ToolCall("w3", name, {"no_such_argument": 1}),)) for name in names]
    return unknown + [Action("", (ToolCall("w4", name, [1]),)) for name in names]  # pyright: ignore[reportArgumentType]
