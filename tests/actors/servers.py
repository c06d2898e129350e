"""Real servers for the tests of actors: env servers over scripted domains, and a scripted learner. All on loopback."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from actors.agents import Parts
from actors.chat import Chat
from actors.codec import ByteLevelCodec, ModelFiles
from actors.conversation import Conversation
from actors.engines import Engines
from actors.envs import Envs
from actors.places import PlaceRules
from actors.rollout import run_rollout
from actors.summaries import Summaries
from actors.toolcalls.turns import TurnParser
from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from common.types import (
    Action,
    Assignment,
    ContextPolicy,
    EngineInfo,
    Limits,
    Message,
    Observation,
    Sampling,
    Source,
    Status,
    Task,
    ToolCall,
    Trajectory,
)
from common.validate import Vocabulary
from common.waits import Wait, Waits
from envserver.admission import Catalog
from envserver.env import Domain, Env
from envserver.server import EnvServer, Settings
from tests.actors.toy import VOCABULARY, toy_chat
from tests.fakes import FakeEngine

TINY = Path(__file__).resolve().parents[2] / "configs" / "tokenizers" / "tiny"


class ScriptedEnv(Env):
    """Answers each action with the next text; the last answer ends it with reward 1. payload: {"texts": [...]}.

    The text "crash" does that instead; "slow 0.5" says "he" after so many seconds (for a domain on threads); "huge" is 17 MiB.
    """

    def __init__(self, domain: ScriptedDomain) -> None:
        self.domain = domain
        self.at = 0

    def reset(self, task: Task) -> Observation:
        self.texts = task.payload["texts"]
        begin = task.payload.get("task", "he") * task.payload.get("times", 1)
        return Observation((Message("user", begin),), 0.0, Status.RUNNING)

    def step(self, action: Action) -> Observation:
        text = self.texts[self.at]
        self.at += 1
        self.domain.actions.append(action)
        if text == "crash":
            raise RuntimeError("the disk is full")
        if text.startswith("slow "):
            time.sleep(float(text.removeprefix("slow ")))
            text = "he"
        if text == "huge":
            text = "he" * (17 * 2**19)
        last = self.at == len(self.texts)
        status = Status.TERMINATED if last else Status.RUNNING
        metrics = {"success": 1.0} if last else {}
        return Observation((Message("tool", text),), float(last), status, metrics, state_key=b"s%d" % self.at)

    def close(self) -> None:
        self.domain.closed += 1


class ScriptedDomain(Domain):
    name = "scripted"
    tools = ()
    template = "hello"
    has_reference = True

    def __init__(self, blocking: bool = False) -> None:
        super().__init__()
        self.blocking = blocking
        self.actions: list[Action] = []
        self.closed = 0

    def tasks(self, split: str, n: int) -> list[Task]:
        return []

    def make_env(self) -> Env:
        return ScriptedEnv(self)

    def reference(self, task: Task) -> list[Action]:
        return [Action("", (ToolCall("x", "go", {"n": n}),)) for n in range(task.payload["reference"])]


@asynccontextmanager
async def env_server(domain: Domain, capacity: int = 64, port: int = 0) -> AsyncIterator[EnvServer]:
    settings = Settings(f"127.0.0.1:{port}", capacity=capacity, threads=2, lease_s=60.0, drain_s=0.0)
    server = EnvServer(domain, Catalog({}, {}, {}), settings)
    await server.start()
    try:
        yield server
    finally:
        await server.drain()


def ready(*engines: FakeEngine) -> list[EngineInfo]:
    """An engine table with all of them ready, at version 1."""
    for engine in engines:
        engine.weight_version = "1"
    return [EngineInfo(f"engine-{n}", engine.url, "main", 1, "ready") for n, engine in enumerate(engines)]


@asynccontextmanager
async def toy_parts(addresses: list[str], engines: list[EngineInfo], chat: Conversation | None = None) -> AsyncIterator[Parts]:
    async with parts_of(chat or toy_chat(), VOCABULARY, {"scripted": addresses}, engines) as parts:
        yield parts


@asynccontextmanager
async def parts_of(
    chat: Conversation, vocabulary: Vocabulary, addresses: dict[str, list[str]], engines: list[EngineInfo], key: str = ""
) -> AsyncIterator[Parts]:
    waits = Waits()
    client, envs = Engines(vocabulary, 21.0, PlaceRules(64), key=key, waits=waits), Envs(addresses, waits=waits)
    summaries = Summaries()
    client.places.update(engines)
    try:
        parser = TurnParser(chat.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)
        yield Parts(chat, parser, vocabulary, client, envs, summaries, waits)
    finally:
        await summaries.close()
        await client.close()
        await envs.close()


def tiny_chat() -> Chat:
    codec = ByteLevelCodec(TINY / "tokenizer.json")
    return Chat(ModelFiles(codec, (TINY / "chat_template.jinja").read_text(), "<|im_end|>", 1024))


def assignment(
    texts: list[str], limits: Limits = Limits(8, 300, 20.0), source: Source = Source.POLICY, rollout_id: str = "r-1", **payload
) -> Assignment:
    """A turn may have 16 tokens, one of a reference 64: it is written out."""
    return Assignment(
        rollout_id=rollout_id,
        attempt=0,
        group_id="g",
        task=Task("scripted", "t-1", 0, {"texts": texts, **payload}),
        source=source,
        purpose="train",
        limits=limits,
        sampling=Sampling(temperature=1.0, max_new_tokens=16 if source == Source.POLICY else 64, seed=7),
        context=ContextPolicy(),
    )


def turns(*plans: list[int]):
    """A policy for FakeEngine: the given turns in order, told apart by how many end tokens the prompt holds (TT).

    The opening has two of them (system and user); each turn and its observation add two more.
    """

    def reply(prompt: list[int], sampling: dict) -> list[int]:
        return plans[(prompt.count(2) - 2) // 2]

    return reply


async def play(
    work: Assignment, engine: FakeEngine, chat: Conversation | None = None, domain: ScriptedDomain | None = None
) -> Trajectory:
    async with env_server(domain or ScriptedDomain()) as server:
        table = ready(engine)
        async with toy_parts([f"127.0.0.1:{server.port}"], table, chat) as parts:
            return await run_rollout(work, parts, Wait())


def prompts(engine: FakeEngine) -> list[list[int]]:
    return [body["input_ids"] for path, body in engine.calls if path == "/generate"]


def answer(ids: list[int], finish: str, **meta) -> dict:
    base = {
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
    }
    return {"output_ids": ids, "meta_info": {**base, **meta}}


class ScriptedLearner(pb_grpc.LearnerServiceServicer):
    """Hands out `todo`; keeps what is delivered. `words` are given to Deliver calls before it behaves."""

    def __init__(self, todo: list[Assignment], engines: list[EngineInfo]) -> None:
        self.todo = deque(todo)
        self.engines = [convert.engine_to(engine) for engine in engines]
        self.incarnation = 1
        self.rows: dict[tuple[str, int], Trajectory] = {}
        self.leases: list[int] = []  # capacities that were asked for
        self.leased = self.most_at_once = 0
        self.renewals: list[pb.RenewRequest] = []
        self.cancel: list[tuple[str, int]] = []
        self.words: deque[int | grpc.StatusCode | str] = deque()
        self.delivered = Counter()
        self.no_more = True  # once todo is empty
        self._parts: dict[tuple[str, int], wire.Assembler] = {}

    async def Lease(self, request, context):
        self.leases.append(request.capacity)
        out = [self.todo.popleft() for _ in range(min(request.capacity, len(self.todo)))]
        self.leased += len(out)
        self.most_at_once = max(self.most_at_once, self.leased - len(self.rows))
        return pb.LeaseReply(
            incarnation=self.incarnation,
            assignments=[convert.assignment_to(a) for a in out],
            no_more=self.no_more and not self.todo,
            retry_after_s=0.01,
            engines=self.engines,
        )

    async def Renew(self, request, context):
        self.renewals.append(request)
        cancel = [pb.RolloutKey(rollout_id=rollout_id, attempt=attempt) for rollout_id, attempt in self.cancel]
        return pb.RenewReply(
            incarnation=self.incarnation, engines=self.engines, cancel=cancel, no_more=self.no_more and not self.todo
        )

    async def Deliver(self, request, context):
        key = (request.rollout_id, request.attempt)
        word = self.words.popleft() if self.words else pb.STORED
        if isinstance(word, grpc.StatusCode):
            await context.abort(word, "scripted")
        if word == pb.RESEND:
            self._parts.pop(key, None)
        if word not in (pb.STORED, "lose answer"):
            self.delivered[pb.DeliverStatus.Name(word)] += 1
            return pb.DeliverReply(status=word, reason="scripted", incarnation=self.incarnation)
        chunk = wire.Chunk(request.chunk, request.chunks, request.total_bytes, request.crc32, request.payload)
        data = self._parts.setdefault(key, wire.Assembler()).add(chunk)
        if data is None:
            self.delivered["MORE"] += 1
            return pb.DeliverReply(status=pb.MORE)
        status = pb.DUPLICATE if key in self.rows else pb.STORED
        self.rows.setdefault(key, convert.trajectory_parse(data))
        if word == "lose answer":
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer comes too late")
        self.delivered[pb.DeliverStatus.Name(status)] += 1
        return pb.DeliverReply(status=status, incarnation=self.incarnation)


@asynccontextmanager
async def learner_server(learner: ScriptedLearner) -> AsyncIterator[str]:
    server = wire.aio_server()
    pb_grpc.add_LearnerServiceServicer_to_server(learner, server)
    port = wire.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
