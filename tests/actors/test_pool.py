"""The actor process: leases, heartbeats, deliveries, and how it ends. Real servers, real sockets, real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from actors.__main__ import main
from actors.chat import Context
from actors.learner_client import Learner
from actors.pool import Pool
from actors.tape import Tape
from common import cli
from common.config import DomainConfig, RunConfig
from common.proto import rl_pb2 as pb
from common.record import full_prompt
from common.types import ContextKind, Limits, Source, Status, spans_of
from common.validate import Vocabulary, check
from envserver.domains import load_domain
from tests.actors.servers import (
    TINY,
    ScriptedDomain,
    ScriptedLearner,
    assignment,
    env_server,
    learner_server,
    parts_of,
    ready,
    tiny_chat,
    toy_parts,
    turns,
)
from tests.actors.toy import VOCABULARY
from tests.fakes import HANG, FakeEngine
from tests.processes import eventually

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def pool_of(learner: ScriptedLearner, engine: FakeEngine, domain: ScriptedDomain, slots: int = 8):
    async with (
        env_server(domain) as server,
        learner_server(learner) as address,
        toy_parts([f"127.0.0.1:{server.port}"], []) as parts,
    ):
        client = Learner(address, "actor-0")
        yield Pool(client, parts, slots)
        await client.close()


def many(count: int, **options):
    return [assignment(["he", "done"], rollout_id=f"r-{n}", **options) for n in range(count)]


def one_turn_policy() -> FakeEngine:
    return FakeEngine(reply=turns([7, 2], [5, 2]), slots=64)


async def test_every_assignment_is_played_and_delivered_once() -> None:
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(40), ready(engine))
        async with pool_of(learner, engine, ScriptedDomain(), slots=16) as pool:
            await pool.run()
    assert len(learner.rows) == 40
    assert learner.delivered == {"STORED": 40}
    assert max(learner.leases) == learner.most_at_once == 16
    assert all(row.status == Status.TERMINATED for row in learner.rows.values())
    for row in learner.rows.values():
        check(row, VOCABULARY, {1})
    assert pool.outcomes == {"STORED": 40}


async def test_077_an_answer_that_comes_too_late_leaves_one_row() -> None:
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(1), ready(engine))
        learner.words.extend(["lose answer", "lose answer"])
        async with pool_of(learner, engine, ScriptedDomain()) as pool:
            await pool.run()
    assert len(learner.rows) == 1
    assert learner.delivered == {"DUPLICATE": 1}


async def test_delivery_outlives_a_learner_that_is_away_and_resends_what_broke() -> None:
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(1), ready(engine))
        learner.words.extend([grpc.StatusCode.UNAVAILABLE, pb.RESEND, grpc.StatusCode.INTERNAL])
        async with pool_of(learner, engine, ScriptedDomain()) as pool:
            await pool.run()
    assert learner.delivered == {"RESEND": 1, "STORED": 1}


@pytest.mark.parametrize("word", ["SUPERSEDED", "REFUSED", "DUPLICATE"])
async def test_final_words_end_a_delivery(word: str) -> None:
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(1), ready(engine))
        learner.words.append(pb.DeliverStatus.Value(word))
        async with pool_of(learner, engine, ScriptedDomain()) as pool:
            await pool.run()
    assert pool.outcomes == {word: 1}
    assert learner.rows == {}


async def test_a_long_trajectory_travels_in_chunks_and_again_when_one_breaks() -> None:
    tape = Tape(assignment([], Limits(1, 2**31 - 1, 1.0)))
    ids = np.random.default_rng(0).integers(0, 356, 1_500_000).astype(np.int32)  # 6 MB: three chunks
    tape.fail("a long one")
    tape.tail = Context(ids, spans_of([(len(ids), ContextKind.OBSERVATION)]))
    learner = ScriptedLearner([], [])
    learner.words.extend([pb.STORED, pb.RESEND])
    async with learner_server(learner) as address:
        client = Learner(address, "actor-0")
        assert await client.deliver(tape.trajectory(VOCABULARY), 1) == "STORED"
        await client.close()
    (row,) = learner.rows.values()
    assert (row.tail_ids == ids).all()
    assert learner.delivered == {"MORE": 3, "RESEND": 1, "STORED": 1}


async def test_a_cancelled_rollout_is_dropped_and_its_slot_is_free() -> None:
    domain = ScriptedDomain()
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(2), ready(engine))
        engine.script("/generate", HANG)
        async with pool_of(learner, engine, domain, slots=1) as pool:
            run = asyncio.create_task(pool.run())
            await eventually(lambda: engine.calls)
            learner.cancel = [("r-0", 0)]
            await run
            await eventually(lambda: domain.closed == 2)
            assert "/abort_request" in engine.posts()
    assert list(learner.rows) == [("r-1", 0)]
    assert pool.outcomes == {"CANCELLED": 1, "STORED": 1}


async def test_heartbeats_say_what_each_rollout_waits_for() -> None:
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(1), ready(engine))
        engine.script("/generate", HANG)
        async with pool_of(learner, engine, ScriptedDomain()) as pool:
            run = asyncio.create_task(pool.run())
            await eventually(lambda: learner.renewals)
            pool.stop()
            await run
    renewal = learner.renewals[0]
    assert [(key.rollout_id, key.attempt) for key in renewal.running] == [("r-0", 0)]
    (wait,) = renewal.waits
    assert (wait.name, wait.owner, wait.on, wait.deadline) == ("engine.generate", "r-0", "engine-0", 21.0)  # engine.timeout_s
    assert renewal.incarnation == 1


async def test_a_restarted_learner_keeps_the_rollouts_that_it_still_wants() -> None:
    """The new incarnation cancels one of two; the other goes on and is delivered as its lease said."""
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(2), ready(engine))
        learner.no_more = False
        engine.script("/generate", HANG, HANG)
        async with pool_of(learner, engine, ScriptedDomain()) as pool:
            run = asyncio.create_task(pool.run())
            await eventually(lambda: len(engine.calls) == 2)
            learner.incarnation, learner.cancel = 2, [("r-0", 0)]
            await eventually(lambda: pool.outcomes["CANCELLED"] == 1)
            assert list(pool._running) == [("r-1", 0)]
            assert pool._running["r-1", 0].incarnation == 1
            pool.stop()
            await run


async def test_stop_cancels_everything_and_closes_the_sessions() -> None:
    domain = ScriptedDomain()
    with one_turn_policy() as engine:
        learner = ScriptedLearner(many(3), ready(engine))
        engine.script("/generate", HANG, HANG, HANG)
        async with pool_of(learner, engine, domain) as pool:
            run = asyncio.create_task(pool.run())
            await eventually(lambda: len(engine.calls) == 3)
            pool.stop()
            await run
            await eventually(lambda: domain.closed == 3)
    assert learner.rows == {}


async def test_an_engine_death_in_the_middle_loses_no_rollout() -> None:
    with one_turn_policy() as first, one_turn_policy() as second:
        learner = ScriptedLearner(many(30), ready(first, second))
        async with pool_of(learner, first, ScriptedDomain(), slots=10) as pool:
            run = asyncio.create_task(pool.run())
            await eventually(lambda: len(learner.rows) >= 5)
            await asyncio.to_thread(first.stop)
            await run
    assert len(learner.rows) == 30
    assert all(row.status == Status.TERMINATED for row in learner.rows.values())


async def test_frozenlake_with_the_tiny_tokenizer_through_every_process_boundary() -> None:
    """The real domain, tokenizer and template: policy rollouts that repeat the references' moves reach the goal."""
    chat, domain = tiny_chat(), load_domain("frozenlake")
    tasks = domain.tasks("heldout", 6)
    vocabulary = Vocabulary(1024, 1024)
    base = assignment([])
    work = [
        replace(base, task=task, source=source, rollout_id=f"{task.id}-{source.name}")
        for task in tasks
        for source in (Source.REFERENCE, Source.POLICY)
    ]
    known: dict[tuple[int, ...], list[int]] = {}  # a prompt of a reference and its turn

    def reply(prompt: list[int], sampling: dict) -> list[int]:
        return known[tuple(prompt)]

    with FakeEngine(reply=reply, vocabulary=1024) as engine:
        async with env_server(domain) as server:
            addresses = {"frozenlake": [f"127.0.0.1:{server.port}"]}
            async with parts_of(chat, vocabulary, addresses, ready(engine)) as parts:
                for source in (Source.REFERENCE, Source.POLICY):
                    learner = ScriptedLearner([a for a in work if a.source == source], ready(engine))
                    async with learner_server(learner) as address:
                        client = Learner(address, "actor-0")
                        await Pool(client, parts, 4).run()
                        await client.close()
                    for row in learner.rows.values():
                        assert (row.status, row.total_reward, row.metrics["success"]) == (Status.TERMINATED, 1.0, 1.0), row.flags
                        check(row, vocabulary, {1})
                        for index, step in enumerate(row.steps):
                            assert len(step.action_ids) == 4
                            assert len(step.context_ids) == 14 or index == 0
                            known[tuple(full_prompt(row, index).tolist())] = step.action_ids.tolist()


# ---- the process ------------------------------------------------------------------------------------------


def write_run(run: Path, learner: str, envs: list[str]) -> Path:
    run.mkdir(exist_ok=True)
    config = RunConfig(domains=[DomainConfig(name="frozenlake")])
    (run / "config.toml").write_text(cli.dump_toml(config))
    (run / "addresses.json").write_text(json.dumps({"learner": learner, "engines": [], "envs": {"frozenlake": envs}}))
    (run / "model").mkdir(exist_ok=True)
    (run / "model" / "config.json").write_text(json.dumps({"vocab_size": 1024}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / "model" / name).write_text((TINY / name).read_text())
    return run


async def start(run: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "actors",
        "--run",
        str(run),
        "--index",
        "1",
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_process_plays_delivers_and_ends_with_0(tmp_path: Path) -> None:
    domain = load_domain("frozenlake")
    base = assignment([])
    work = [replace(base, task=task, source=Source.REFERENCE, rollout_id=task.id) for task in domain.tasks("train", 3)]
    learner = ScriptedLearner(work, [])
    async with env_server(domain) as server, learner_server(learner) as address:
        process = await start(write_run(tmp_path / "run", address, [f"127.0.0.1:{server.port}"]))
        _, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    assert len(learner.rows) == 3
    assert b"actor-1: done" in log


async def test_sigterm_ends_the_process_soon_and_cleanly(tmp_path: Path) -> None:
    learner = ScriptedLearner([], [])
    learner.no_more = False
    async with learner_server(learner) as address:
        process = await start(write_run(tmp_path / "run", address, []))
        await eventually(lambda: learner.leases)
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    assert process.returncode == 0, log.decode()


@pytest.mark.parametrize("broken", ["addresses.json", "config.toml", "model/tokenizer.json", "model/config.json"])
def test_a_wrong_start_is_one_clear_line_and_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: str) -> None:
    run = write_run(tmp_path / "run", "127.0.0.1:1", [])
    (run / broken).unlink()
    assert main(["--run", str(run)]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("polyturn: error: ")]
    assert broken.split("/")[-1] in line
