"""A run in one process: the real control plane, agent loop, environments, engine and trainer, without launcher, wire and HTTP.

What is left out is transport. Requests go to the embedded engine's queue, steps to the domain's own environments, deliveries, as
the bytes that they would be on the wire, to the control plane's door, which checks them. Rollouts play in lockstep: the
engine gets its requests when every rollout that plays has asked for a turn, in the order of their names. So a run is a function
of its configuration alone on one machine, and the arms of a comparison differ in what they are to differ in.

Lag is imposed: after every update all that the ledger has room for is played at once by the newest weights, and the oldest groups
train first. With `learner.max_lag` L, every token that update u (from 0) trains on is min(u, L) updates old: the worst that the
bound allows, where a run of many processes has a mixture below it.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from actors.agents import Parts
from actors.codec import load_model_files
from actors.conversation import conversation
from actors.engines import FINISH, Engines, Generation, Request
from actors.envs import Envs, Replica, Session
from actors.places import PlaceRules
from actors.rollout import run_rollout
from actors.summaries import Summaries
from actors.toolcalls.turns import TurnParser
from common import convert, wire
from common.addresses import MAIN
from common.config import RunConfig
from common.config_engine import EngineConfig
from common.proto.rl_pb2_grpc import EnvServiceStub
from common.types import Action, Assignment, EngineInfo, Observation, Status, Task, Trajectory, VersionRun
from common.validate import Vocabulary
from common.vocabulary import sampleable
from common.waits import Wait, Waits
from envserver.domains import load_domain
from envserver.env import Domain, Env
from learner.batch import Batch
from learner.canary import BOUNDS
from learner.control import Control
from learner.evaluation import SPLIT
from learner.model import hf
from learner.model.spec import ModelSpec, read_config
from learner.serving import request as serving
from learner.serving.engine import Engine
from learner.serving.programs import EngineShape
from learner.update import Trainer
from tools.launching.preflight import write_folder

ENGINE = "engine-0"
NOWHERE = "127.0.0.1:1"  # of a channel that is never used
CANARY = np.zeros(2, np.int32)  # nobody asks this engine for one: every update compares it with the learner on its own tokens
INCARNATION = 1
EVERYTHING = 1 << 20  # rollouts of one lease
REFILLS = 100  # leases for one update, then a selection that makes room again and again has failed


class LocalEngines(Engines):
    """The client of one embedded engine in this process."""

    def __init__(self, vocabulary: Vocabulary, rules: PlaceRules, engine: EngineShape, spec: ModelSpec, waits: Waits) -> None:
        super().__init__(vocabulary, 600.0, rules, waits=waits)
        model = hf.build_stored(spec, hf.stored(hf.random_state(spec), "float32"), "float32")
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, tuple[serving.Request, asyncio.Future[None]]] = {}
        self._sent: dict[str, asyncio.Future[None]] = {}
        self._playing = 0
        self._engine, self._spec = Engine(model, engine, "default", self._deliver), spec
        self._engine.start()

    def serve(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        """Answer with these weights, of Hugging Face's names, from now on. Nothing may be in flight."""
        places = [place for place, _ in nnx.to_flat_state(hf.abstract_state(self._spec))]
        params = hf.on_device({place: tensors[hf.hf_name(place)] for place in places}, "float32")
        self._engine.update(params, str(version)).result()
        self.places.update([row(version)])

    def begins(self, rollouts: int) -> None:
        """So many more rollouts play; fewer when it is negative."""
        self._playing += rollouts
        self._send()

    async def generate(self, engine: EngineInfo, request: Request) -> Generation:
        own = serving.Request(
            rid=request.rid,
            prompt=request.ids,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stops=request.stop_token_ids,
            return_logprob=True,
        )
        done = self._loop.create_future()
        self._asked[request.rid] = own, done
        self._send()
        await done
        assert own.finish is not None  # the engine hands back what is finished
        runs = tuple(VersionRun(start, int(version), engine.name, engine.pool) for version, start in own.switches)
        return Generation(own.output, own.logprobs, runs, FINISH[own.finish["type"]], max(own.cached_tokens, 0))

    def _send(self) -> None:
        """All of it, when nobody else is going to ask."""
        if self._asked and len(self._asked) == self._playing:
            ordered = [self._asked[rid] for rid in sorted(self._asked)]
            self._sent = {own.rid: done for own, done in ordered}
            self._asked = {}
            self._engine.submit([own for own, _ in ordered])

    def _deliver(self, finished: Sequence[serving.Request]) -> None:
        """On the engine's thread."""
        rids = [own.rid for own in finished]
        self._loop.call_soon_threadsafe(lambda: [self._sent[rid].set_result(None) for rid in rids])

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.stop)
        await super().close()


class LocalEnvs(Envs):
    """The client of one domain's environments in this process, which must not block."""

    def __init__(self, domain: Domain, waits: Waits) -> None:
        super().__init__({}, waits=waits)
        self._domain, self._tools_json = domain, json.dumps(domain.tools)
        channel = wire.aio_channel(NOWHERE)
        self._here = Replica(domain.name, f"env-{domain.name}-0", NOWHERE, EnvServiceStub(channel), channel)
        self._envs: dict[str, Env] = {}

    async def open(self, task: Task, session_id: str, with_reference: bool, wait: Wait | None = None) -> Session:
        env = self._envs[session_id] = self._domain.make_env()
        reference = tuple(self._domain.reference(task)) if with_reference else ()
        return Session(session_id, self._here, env.reset(task), self._domain.instructions, self._tools_json, reference)

    async def step(self, session: Session, index: int, action: Action) -> Observation:
        return self._envs[session.id].step(action)

    def close_session(self, session: Session) -> None:
        self._envs.pop(session.id).close()

    async def close(self) -> None:
        await self._here.channel.close()


def row(version: int) -> EngineInfo:
    """Of the table of engines."""
    return EngineInfo(ENGINE, "", MAIN, version, "ready")


def engine_shape(engine: EngineConfig) -> EngineShape:
    """With two slots of cache for every request at work: lockstep leaves no more of them between two turns."""
    chunks = engine.decode_chunk, engine.prefill_slots, engine.prefill_chunk
    return EngineShape(engine.slots, 2 * engine.slots, engine.max_length, *chunks, tuple(engine.widths))


class Site:
    """What arms with the same model, domain and engine share: everything but control plane and trainer. Use as a context."""

    def __init__(self, config: RunConfig) -> None:
        """Raises DomainError."""
        (domain,) = config.domains
        self._rollouts = config.engine.slots
        self._runner = asyncio.Runner()
        with tempfile.TemporaryDirectory() as folder:
            write_folder(config, Path(folder))
            self.files = load_model_files(Path(folder) / "model")
            self.spec = ModelSpec.from_hf(read_config(Path(folder) / "model"))
            self.vocabulary = Vocabulary(self.spec.vocab_size, sampleable(Path(folder) / "model"))
        own = load_domain(domain.name, domain.options, domain.instructions)
        counts = {"train": domain.train_tasks, SPLIT: domain.heldout_tasks}
        self.tasks = {domain.name: {split: own.tasks(split, count) for split, count in counts.items()}}
        self._runner.run(self._begin(config, own))

    async def _begin(self, config: RunConfig, domain: Domain) -> None:
        waits = Waits()
        shape = engine_shape(config.engine)
        self.engines = LocalEngines(self.vocabulary, PlaceRules(config.engine.slots), shape, self.spec, waits)
        chat = conversation(self.files, config.chat)
        parser = TurnParser(chat.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)
        self._parts = Parts(chat, parser, self.vocabulary, self.engines, LocalEnvs(domain, waits), Summaries(), waits)

    def play(self, assigned: Sequence[Assignment]) -> list[Trajectory]:
        """In the order of `assigned`."""
        return self._runner.run(self._play(assigned))

    async def _play(self, assigned: Sequence[Assignment]) -> list[Trajectory]:
        room, engines = asyncio.Semaphore(self._rollouts), self.engines
        engines.begins(min(self._rollouts, len(assigned)))
        left = len(assigned)

        async def one(assignment: Assignment) -> Trajectory:
            nonlocal left
            async with room:
                made = await run_rollout(assignment, self._parts, Wait())
                left -= 1
                if left < self._rollouts:  # nobody takes its place
                    engines.begins(-1)
                return made

        return await asyncio.gather(*map(one, assigned))

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            await self._parts.engines.close()
            await self._parts.envs.close()
            await self._parts.summaries.close()

        self._runner.run(end())
        self._runner.close()


class LocalRun:
    """A learner's loop over a Site. Use as a context: its spool is in a folder that goes."""

    def __init__(self, site: Site, config: RunConfig, trainer: Trainer) -> None:
        self.site, self.config, self.trainer = site, config, trainer
        self._folder = tempfile.TemporaryDirectory()
        self.events: list[tuple[str, dict[str, Any]]] = []
        (domain,) = config.domains
        own = site.tasks[domain.name]
        tasks = {domain.name: {"train": own["train"][: domain.train_tasks], SPLIT: own[SPLIT]}}
        self.control = Control(
            config, tasks, Path(self._folder.name), INCARNATION, site.vocabulary, lambda *event: self.events.append(event)
        )
        self.version = self.update = 0
        self.publish()

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def publish(self) -> None:
        """The trainer's weights are served as the next version."""
        self.version += 1
        self.tensors, _ = self.trainer.snapshot(CANARY)
        self.control.published(self.version, self.update)
        self.trainer.published(self.version)
        self.site.engines.serve(self.tensors, self.version)
        self.control.proofs.passed(ENGINE, self.version)
        self.control.set_engines([row(self.version)])

    def fill(self) -> list[Trajectory]:
        """Play all that there is room for, with the newest weights, and deliver it; again, where a selection has made room.

        Raises RuntimeError for a rollout that failed or is not accepted (here nothing is away for a while, so another try would
        end as this one), and when selection leaves nothing of what is played."""
        played: list[Trajectory] = []
        for _ in range(REFILLS):
            assigned = self.control.lease("actor-0", EVERYTHING).assignments
            if not assigned:
                return played
            for trajectory in self.site.play(assigned):
                if trajectory.status is Status.FAILED:
                    raise RuntimeError(f"rollout {trajectory.rollout_id} of task {trajectory.task.id}: {trajectory.flags}")
                key = trajectory.rollout_id, trajectory.attempt
                answer = self.control.deliver(INCARNATION, key, convert.trajectory_bytes(trajectory))
                if answer.status != "STORED":
                    raise RuntimeError(f"rollout {key} is {answer.status}: {answer.reason}")
                played.append(trajectory)
        raise RuntimeError(
            f"update {self.update}: after {len(played)} rollouts there is still room: selection leaves too few groups"
        )

    def take(self) -> Batch:
        """Of what was played. Raises RuntimeError when that is not enough for an update."""
        batch = self.control.take(0.0)
        if batch is None:
            raise RuntimeError(f"update {self.update}: no batch; {self.control.status()['sentence']}")
        return batch

    def supervise(self) -> float:
        """One supervised update on reference rollouts; its loss."""
        self.fill()
        batch = self.take()
        metrics = self.trainer.supervised(batch.trajectories, self.config.warm.lr)
        self.control.commit(batch)
        return metrics["loss"]

    def train(self) -> tuple[Batch, dict[str, float]]:
        """One policy update on the oldest of what was played; the new weights are served. Raises RuntimeError when engine and
        learner do not compute the same policy."""
        batch = self.take()
        metrics = self.trainer.policy_update(batch.groups, batch.live, self.version)
        if (gap := metrics.get("gap_mean", math.inf)) > BOUNDS[self.config.model.dtype]:
            raise RuntimeError(f"update {self.update}: engine and learner differ by {gap:.2g} in a token's logprob")
        self.control.commit(batch)
        self.update += 1
        self.publish()
        return batch, metrics

    def evaluate(self, mode: str) -> float:
        """Held-out success of the newest weights, "greedy" or "sampled". What there is room for in training must have been
        played."""
        evaluation = self.control.evaluation
        evaluation.start(self.control.ledger, "rl", self.version, [mode])
        self.fill()
        (result,), _ = evaluation.finish()
        return result["success"]
