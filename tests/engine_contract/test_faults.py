"""Engines that die, hang, or are given the wrong weights, under the real publisher: none of it stops the others, nothing that is
unproven counts, and each engine comes back by itself. docs/engines.md, "When an engine fails"."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from actors.engines import EngineUnavailable, Request
from actors.rollout import run_rollout
from common import keys
from common.record import segments
from common.types import EngineInfo, Limits, Status, ids_array
from common.validate import Vocabulary, check
from common.waits import Wait
from learner.assignments import pairs_of
from learner.proofs import Verdict
from learner.publisher import EnginesRefuse
from tests.actors.servers import ScriptedDomain, assignment, env_server, parts_of, tiny_chat
from tests.engine_contract.conftest import SPEC, Models, ids_of, logprobs_of, make_model, served_by, skip_without
from tests.engine_contract.kept import BACK_S, GO_ON, PATIENT, SHORT, STOP, UPDATE, Fleet, Kept, Life, Weights, flip, living
from tests.engine_contract.test_contract import CLOSE, LONG, PROMPTS, spans_cover
from tests.processes import eventually, until

pytestmark = pytest.mark.timeout(900)  # SGLang starts within a minute where nobody else works
VOCABULARY = Vocabulary(SPEC.vocab_size, SPEC.vocab_size)
SOON_S = 240.0  # for what takes a second, on a machine that does other things too
TENSOR = "model.layers.1.self_attn.v_proj.weight"


@dataclass(frozen=True)
class All:
    """Weights that are published: two of the engines' architecture, and of others."""

    a: Weights
    b: Weights
    wider: Weights
    larger_vocabulary: Weights


@pytest.fixture(scope="module")
def weights(models: Models, tmp_path_factory: pytest.TempPathFactory) -> All:
    root = tmp_path_factory.mktemp("others")
    wider = make_model(root / "wider", 2, spec=replace(SPEC, hidden_size=96))
    larger = make_model(root / "larger", 3, spec=replace(SPEC, vocab_size=2048))
    return All(*(Weights.of(folder) for folder in (models.a, models.b, wider, larger)))


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def fleet(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    skip_without(request.param)
    made = Fleet(request.param, models.a, tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


def comes_back(life: Life, engine: Kept) -> None:
    """By itself, with the newest version, which its canary has proven."""
    until(lambda: life.serves(engine.name), f"{engine.name} to be back", BACK_S)
    assert life.verdict(engine.name, life.version) is Verdict.PROVEN
    assert life.publisher.canaries[engine.name] < CLOSE


# ---- killed --------------------------------------------------------------------------------------------------------------


async def test_killed_while_it_samples(fleet: Fleet, weights: All) -> None:
    """Requests end with an error that says so, the other engine samples their turns, and the records are as good as any."""
    began, (victim, other) = time.monotonic(), fleet.engines
    with fleet.published(weights.a, [0, 1]) as life:
        table, asked = life.publisher.engines(), assignment(["he"] * 3, Limits(3, 500, BACK_S))
        async with (
            env_server(ScriptedDomain()) as server,
            parts_of(tiny_chat(), VOCABULARY, {"scripted": [f"127.0.0.1:{server.port}"]}, table, fleet.key) as parts,
        ):
            samplings = [replace(asked.sampling, max_new_tokens=150, seed=n) for n in range(16)]
            works = [replace(asked, rollout_id=f"r-{s.seed}", sampling=s) for s in samplings]
            rollouts = [asyncio.create_task(run_rollout(work, parts, Wait())) for work in works]
            requests = [Request(f"x-{n}", ids_array(PROMPTS[n]), 400, 1.0, (), n) for n in range(4)]
            direct = [asyncio.create_task(parts.engines.generate(life.row(victim.name), request)) for request in requests]
            await eventually(lambda: parts.engines.places.in_flight[victim.name] >= 4 and victim.served.running() >= 4)
            await asyncio.to_thread(victim.kill)
            lost = await asyncio.gather(*direct, return_exceptions=True)
            records = await asyncio.gather(*rollouts)
        assert any(isinstance(each, EngineUnavailable) for each in lost)
        assert {record.status for record in records} <= {Status.TERMINATED, Status.TRUNCATED}
        # Some of those that were seen in flight may have ended before the signal arrived.
        assert sum(record.metrics["engine_retries"] for record in records) >= 1
        for record in records:
            check(record, VOCABULARY)
        judge = life.publisher.proofs.judge  # the victim may be back already, and have sampled before its canary
        until(lambda: {judge(pairs_of(record), began)[0] for record in records} == {Verdict.PROVEN}, "the proofs", SOON_S)
        rows = [row for record in records for row in segments(record)]
        truth = weights.a.truth.logprobs([(row.ids[:1].tolist(), row.ids[1:].tolist()) for row in rows], 1.0)[0]
        own, sampled = (np.concatenate([getattr(row, name)[1:] for row in rows]) for name in ("logprobs", "mask"))
        assert np.abs(own - truth)[sampled].max() < CLOSE
        life.publish(weights.b)
        until(lambda: life.serves(other.name), "the other engine to be updated", SOON_S)
        comes_back(life, victim)


def test_killed_in_an_update(fleet: Fleet, weights: All) -> None:
    began, (other, victim) = time.monotonic(), fleet.engines
    with fleet.published(weights.a, [0, 1]) as life:
        old, kill = life.version, threading.Timer(0.2, victim.kill)

        def meddle(body: dict) -> None:
            victim.send(STOP)  # the call reaches it, and has no answer before the end
            kill.start()

        life.transport.before[victim.name, UPDATE] = meddle
        new = life.publish(weights.b)
        until(lambda: life.serves(other.name), "the other engine to be updated", SOON_S)
        until(lambda: life.row(victim.name).state == "starting", "the loss to be seen", SOON_S)
        assert "cannot reach" in life.row(victim.name).reason
        assert (life.verdict(victim.name, old), life.verdict(victim.name, new)) == (Verdict.PROVEN, Verdict.FAILED)
        comes_back(life, victim)
        assert life.verdict(victim.name, new, began) is Verdict.FAILED


# ---- hung ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["idle", "in an update"])
def test_hung(fleet: Fleet, weights: All, moment: str) -> None:
    """The other engine goes on being updated; nothing is left that waits for a proof."""
    began, (victim, other) = time.monotonic(), fleet.engines
    with fleet.published(weights.a, [0, 1], SHORT) as life:
        old = life.version
        if moment == "idle":
            victim.send(STOP)
        else:
            life.transport.before[victim.name, UPDATE] = lambda body: victim.send(STOP)
        try:
            first = life.publish(weights.b)
            until(lambda: life.serves(other.name, first), "the other engine to be updated", SOON_S)
            until(lambda: life.was(victim.name, "quarantined", "no answer within"), "quarantine", SOON_S)
            second = life.publish(weights.a)
            until(lambda: life.serves(other.name, second), "the other engine to be updated again", SOON_S)
            assert not life.serves(victim.name)
            waiting = [old, first, second]
            until(
                lambda: Verdict.PENDING not in [life.verdict(victim.name, v, began) for v in waiting], "an end of waiting", SOON_S
            )
        finally:
            victim.send(GO_ON)
        comes_back(life, victim)
        if moment == "in an update":
            assert life.verdict(victim.name, first, began) is Verdict.FAILED


# ---- the wrong weights -----------------------------------------------------------------------------------------------------


def good_weights_bring_it_back(life: Life, weights: All, engine: Kept) -> None:
    life.publish(weights.b)
    comes_back(life, engine)


@pytest.mark.parametrize("harm", ["deleted", "cut short", "another shape", "another vocabulary"])
def test_weights_that_are_refused(fleet: Fleet, weights: All, harm: str) -> None:
    """With the server's own words; the old version is served on, and has proven again that it is."""
    if fleet.kind == "sglang" and harm != "deleted":
        pytest.skip("it dies of them")
    began, engine = time.monotonic(), fleet.engines[0]
    with fleet.published(weights.a, [0]) as life:
        old = life.version
        if harm == "deleted":
            life.transport.before[engine.name, UPDATE] = lambda body: shutil.rmtree(body["model_path"])
        wrong = {"another shape": weights.wider, "another vocabulary": weights.larger_vocabulary}.get(harm, weights.b)
        new = life.publish(wrong, cut if harm == "cut short" else lambda folder: None)
        words = f"update to version {new} failed at update: {UPDATE} answered 400: "
        until(lambda: life.was(engine.name, "quarantined", words), "quarantine", SOON_S)
        assert life.verdict(engine.name, new) is Verdict.FAILED
        until(lambda: life.verdict(engine.name, old, began) is Verdict.PROVEN, "the old version to be proven", SOON_S)
        good_weights_bring_it_back(life, weights, engine)


def test_weights_that_kill(fleet: Fleet, weights: All, tmp_path: Path) -> None:
    """SGLang dies of a shard that is cut short; and of another model, because it rolls back to the same files."""
    if fleet.kind == "embedded":
        pytest.skip("it refuses them")
    began = time.monotonic()
    for name, wrong, harm in [("engine-0", weights.larger_vocabulary, lambda folder: None), ("engine-1", weights.b, cut)]:
        (tmp_path / name).mkdir()
        wrong.write(tmp_path / name)
        harm(tmp_path / name)
    with fleet.published(weights.a, [0, 1]) as life:
        starts = [engine.starts for engine in fleet.engines]
        for engine in fleet.engines:
            life.transport.before[engine.name, UPDATE] = lambda body, name=engine.name: body.update(
                model_path=str(tmp_path / name)
            )
        new = life.publish(weights.b)
        for engine in fleet.engines:
            until(
                lambda name=engine.name: life.was(name, "starting", f"update to version {new} failed at update"), "a death", 120
            )
            assert life.verdict(engine.name, new, began) is Verdict.FAILED
        for engine, before in zip(fleet.engines, starts, strict=True):
            comes_back(life, engine)
            assert engine.starts > before


def cut(folder: Path) -> None:
    """Its last shard, in half."""
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


@pytest.mark.parametrize("harm", ["another place", "flipped bits"])
def test_weights_that_load_and_are_wrong(fleet: Fleet, weights: All, models: Models, harm: str) -> None:
    """Only the canary tells. What was sampled as the old version was proven, and is still."""
    began, engine = time.monotonic(), fleet.engines[0]
    with fleet.published(weights.a, [0]) as life:
        old = life.version
        if harm == "another place":
            life.transport.before[engine.name, UPDATE] = lambda body: body.update(model_path=str(models.a))
            new = life.publish(weights.b)
        else:
            new = life.publish(weights.b, lambda folder: flip(folder, TENSOR, 32))
        words = "failed at canary: /generate: mean |logprob - learner's| is"
        until(lambda: life.was(engine.name, "quarantined", words), "quarantine", SOON_S)
        assert life.verdict(engine.name, new, began) is Verdict.FAILED
        assert life.verdict(engine.name, old, began) is Verdict.PROVEN
        good_weights_bring_it_back(life, weights, engine)


# ---- no fault ------------------------------------------------------------------------------------------------------------


def test_weights_change_under_load(fleet: Fleet, weights: All) -> None:
    """By the publisher, canary included: no request is lost, each token has the logprob of the version that it names."""
    engine = fleet.engines[1]
    with fleet.published(weights.a, [1]) as life:
        prompts = [[*PROMPTS[2], n] for n in range(16)]
        updated = threading.Event()
        sampled: list[tuple[list[int], dict]] = []

        def asks(prompt: list[int], new: int) -> None:
            """Again and again: an engine may sample all of an answer sooner than an update begins."""
            while not updated.is_set():
                sampled.append((prompt, engine.served.generate(prompt, **(LONG | {"new": new}))))

        # Of different lengths: never do all of them end at once.
        askers = [engine.served.threads.submit(asks, prompt, LONG["new"] - 16 * n) for n, prompt in enumerate(prompts)]
        try:
            until(lambda: engine.served.running() == 16, "requests in flight", SOON_S)
            life.publish(weights.b)
            until(lambda: life.serves(engine.name), "the update", SOON_S)
        finally:
            updated.set()
        for asker in askers:
            asker.result(SOON_S)
        asked, answers = [list(each) for each in zip(*sampled, strict=True)]
        for answer in answers:
            spans_cover(answer)
            assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        spans = [answer["meta_info"]["weight_versions"] for answer in answers]
        assert any(len(each) == 2 for each in spans)
        versions = np.concatenate([[span["version"]] * (span["end"] - span["start"]) for each in spans for span in each])
        own, pairs = (
            np.concatenate([logprobs_of(answer) for answer in answers]),
            list(zip(asked, map(ids_of, answers), strict=True)),
        )
        for version, truth in life.truths.items():
            assert np.abs(own - truth.logprobs(pairs, 1.0)[0])[versions == version].max() < CLOSE
        comes_back(life, engine)


def test_logprobs_from_before_the_temperature_are_refused(weights: All, models: Models, tmp_path: Path) -> None:
    skip_without("sglang")
    with served_by("sglang", models.a, tmp_path, environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}) as served:
        rows = [EngineInfo("engine-0", served.url, "main", 0, "starting")]
        with living(Life(tmp_path / "run", keys.read(tmp_path / keys.NAME), rows, 1, PATIENT, 0.7)) as life:
            version = life.publish(weights.a)
            with pytest.raises(EnginesRefuse, match=r"failed at canary.*before the temperature \(0\.7\).*RETURN_ORIGINAL"):
                life.publisher.wait_ready(version, SOON_S)
