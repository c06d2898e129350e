"""The publisher over real fake engines: order, deadlines, quarantine, restarts."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest

from common.types import EngineInfo
from learner.publisher import EnginesRefuse, PublishError
from tests.fakes import DROP, HANG, LOSE, Answer, FakeEngine
from tests.processes import until
from tests.publish.calls import EASY, KEY, TIGHT, Log, canary, generate, in_background, load, publishing, state, weights

SEQUENCE = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
UNDO = ["/abort_request", "/flush_cache", "/continue_generation"]


@pytest.fixture(params=["disk", "relay"])
def engine(request):
    """Every test of this file runs over both transports: nobody above them can tell which it is."""
    with FakeEngine() as running:
        running.relayed = request.param == "relay"
        running.key = KEY if running.relayed else ""
        yield running


LOADED = {"flush_cache": True, "load_format": "safetensors"}


def test_order_of_an_update(tmp_path, engine):
    log = Log()
    with publishing(tmp_path, [engine], log=log) as publisher:
        until(lambda: publisher.engines()[0].reason == "no weights are published yet", "the engine is seen")
        version = publisher.publish(0, weights(1), canary())
        assert (version, publisher.wait_ready(version, 20)) == (1, 1)
        assert engine.posts() == SEQUENCE
        assert engine.calls[0][1] == {"mode": "retract"}
        folder = str((tmp_path / ("host" if engine.relayed else "weights") / "1").resolve())
        assert engine.calls[1][1] == {"model_path": folder, "weight_version": "1", **LOADED}
        assert np.array_equal(load(tmp_path / "weights" / "1")["model.norm.weight"], np.ones(4, np.float32))
        assert (tmp_path / "weights" / "1" / "DONE").exists()
        assert publisher.engines() == [EngineInfo("engine-0", engine.url, "main", 1, "ready", "")]
        assert publisher.update_of(1) == 0
        assert publisher.wait_ready(publisher.publish(7, weights(2), canary()), 20) == 2
        assert publisher.update_of(2) == 7
    assert log.states("engine-0")[-4:] == [("updating", 0), ("ready", 1), ("updating", 1), ("ready", 2)]
    updated = [fields["stages"] for kind, fields in log.events if kind == "engine_updated"]
    assert [list(stages) for stages in updated] == [["pause", "update", "verify", "continue", "canary"]] * 2
    assert log.tables[-1][0].version == 2
    assert not engine.paused


@pytest.mark.parametrize(
    ("path", "answer", "stage", "undo"),
    [
        ("/pause_generation", Answer(400, {"error": {"message": "no"}}), "pause", UNDO[2:]),
        ("/pause_generation", HANG, "pause", UNDO[2:]),
        ("/update_weights_from_disk", Answer(400, {"success": False, "message": "no"}), "update", UNDO),
        ("/update_weights_from_disk", HANG, "update", UNDO),
        ("/continue_generation", Answer(500, {"message": "no"}), "continue", UNDO[2:]),
        ("/continue_generation", HANG, "continue", UNDO[2:]),
    ],
)
def test_a_failure_at_any_stage_is_undone_named_and_tried_again(tmp_path, engine, path, answer, stage, undo):
    log = Log()
    engine.script(path, answer)
    with publishing(tmp_path, [engine], log=log, deadlines=TIGHT if answer == HANG else EASY) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        until_stage = SEQUENCE[: SEQUENCE.index(path) + 1]
        assert engine.posts() == until_stage + undo + SEQUENCE
        assert not engine.paused
    reasons = [f["reason"] for kind, f in log.events if kind == "engine" and f["state"] == "quarantined"]
    words = "no answer within 1 s" if answer == HANG else f"answered {answer.status}: no"
    assert reasons == [f"update to version 1 failed at {stage}: {path}{': ' if answer == HANG else ' '}{words}"]


def test_a_wrong_version_after_the_update_is_a_failure(tmp_path, engine):
    log = Log()
    with publishing(tmp_path, [engine], log=log) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/update_weights_from_disk", Answer(200, {"success": True, "message": "said so"}))  # but did nothing
        assert publisher.wait_ready(publisher.publish(1, weights(2), canary()), 20) == 2
    assert "update to version 2 failed at verify: /model_info answered 200: it serves version 1 after the update to 2" in [
        f.get("reason") for _, f in log.events
    ]
    assert engine.posts() == SEQUENCE + SEQUENCE[:2] + UNDO + SEQUENCE


def test_a_publisher_that_waits_for_an_engine_says_for_which_stage_and_until_when(tmp_path, engine):
    engine.script("/update_weights_from_disk", HANG)
    with publishing(tmp_path, [engine], deadlines=replace(EASY, update_s=3.0)) as publisher:
        version = publisher.publish(0, weights(1), canary())
        seen = []
        until(
            lambda: seen.extend(e for e in publisher.waits.edges() if e.name == "publish.update") or seen, "the update to begin"
        )
        assert (seen[0].owner, seen[0].on, seen[0].why) == ("publisher of engine-0", "engine-0", "version 1")
        assert seen[0].deadline == 3.0
        assert publisher.waits.silence("engine-0") < float("inf")  # it had answered the look and the pause
        assert publisher.wait_ready(version, 20) == version
        until(lambda: all(edge.name == "engine.look" for edge in publisher.waits.edges()), "nothing to be waited for")


def test_weights_changed_but_not_flushed_never_generates_on_the_old_cache(tmp_path, engine):
    """SGLang's 400 "Weights were updated, but the cache was not flushed": running requests end, the cache goes, then on."""
    engine.token_s = 0.02
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        generate(engine.url, {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
        assert engine.cache
        with in_background(generate, engine.url, {"input_ids": [9], "sampling_params": {"max_new_tokens": 10_000}}) as request:
            until(lambda: engine.running, "the request runs")
            engine.script("/update_weights_from_disk", Answer(400, {"success": False, "message": "not flushed"}))
            publisher.wait_ready(publisher.publish(1, weights(2), canary()), 20)
            assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"
        generate(engine.url, {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
        assert all(reader == writer for reader, writer in engine.reused)


def test_an_engine_that_stays_broken_is_quarantined_and_stops_nobody(tmp_path, engine):
    with FakeEngine() as broken:
        broken.script("/update_weights_from_disk", *[Answer(400, {"success": False, "message": "shape mismatch"})] * 1000)
        with publishing(tmp_path, [engine, broken]) as publisher:
            for update in range(3):
                publisher.wait_ready(publisher.publish(update, weights(update), canary()), 20)
            until(lambda: state(publisher, 1) == "quarantined", "quarantine")
            assert "shape mismatch" in publisher.engines()[1].reason
            assert publisher.engines()[0].version == 3
            broken._scripts.clear()
            until(lambda: state(publisher, 1) == "ready" and publisher.engines()[1].version == 3, "readmission")


def test_a_pause_that_cannot_be_undone_says_so_until_it_is(tmp_path, engine):
    engine.script("/update_weights_from_disk", *[Answer(400, {"message": "no"})] * 1000)
    engine.script("/flush_cache", *[Answer(400, "Flush cache failed.")] * 1000)
    with publishing(tmp_path, [engine]) as publisher:
        publisher.publish(0, weights(1), canary())
        until(lambda: "may still be paused: /flush_cache" in publisher.engines()[0].reason, "the reason")
        assert engine.paused

        def told() -> str:
            with pytest.raises(PublishError) as error:
                publisher.wait_ready(1, 0.05)
            return str(error.value)

        # Between two tries the engine is updating, not quarantined.
        table = r"no engine (serves|takes) version 1.*engine-0 .*quarantined .*failed at update"
        until(lambda: re.search(table, told()), "the error that says what became of it")
        engine._scripts.clear()
        until(lambda: state(publisher) == "ready", "readmission")
        assert not engine.paused


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/pause_generation", "/model_info"])
def test_engines_that_refuse_their_first_weights_end_the_wait_at_once(tmp_path, engine, path):
    engine.script(path, *[Answer(400, {"message": "not in this house"})] * 1000)
    with publishing(tmp_path, [engine]) as publisher:
        publisher.publish(0, weights(1), canary())
        with pytest.raises(EnginesRefuse, match=r"no engine takes version 1: engine-0 .*not in this house"):
            publisher.wait_ready(1, 60)


def test_engines_that_may_still_come_do_not(tmp_path, engine):
    """One that took weights before, one that fails with a 5xx, one that is not there, and one of two."""
    refusal = Answer(400, {"message": "no"})
    with FakeEngine() as other, publishing(tmp_path / "a", [engine, other]) as publisher:
        other.script("/update_weights_from_disk", *[refusal] * 1000)
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)  # engine-0 takes it
        engine.script("/update_weights_from_disk", *[refusal] * 5)
        until(lambda: publisher._refusals[1] >= 5, "more refusals than are allowed")
        publisher.wait_ready(publisher.publish(1, weights(2), canary()), 20)
    with FakeEngine() as sick, publishing(tmp_path / "b", [sick]) as publisher:
        sick.script("/update_weights_from_disk", *[Answer(500, {"message": "out of memory"})] * 6)
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)


def test_an_engine_that_is_not_there_is_starting_and_gets_the_newest_when_it_comes(tmp_path, engine):
    engine.stop()
    with publishing(tmp_path, [engine]) as publisher:
        publisher.publish(0, weights(1), canary())
        until(lambda: "ConnectionRefused" in publisher.engines()[0].reason, "the refusal")
        assert state(publisher) == "starting"
        with pytest.raises(PublishError, match=r"engine-0 at .* is starting"):
            publisher.wait_ready(1, 0.05)
        publisher.publish(1, weights(2), canary())
        engine.healthy = False
        engine.restart()
        until(lambda: "503" in publisher.engines()[0].reason, "503 is starting")
        assert engine.posts() == []
        engine.healthy = True
        assert publisher.wait_ready(2, 20) == 2


def test_a_restarted_engine_gets_the_newest_version_again(tmp_path, engine):
    log = Log()
    with publishing(tmp_path, [engine], log=log) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.restart()
        assert engine.weight_version == "default"
        until(lambda: engine.weight_version == "1" and state(publisher) == "ready", "the version is back")
    assert engine.posts() == SEQUENCE * 2


def test_a_new_process_does_not_wait_for_the_back_off_of_the_old(tmp_path, engine):
    engine.script("/update_weights_from_disk", Answer(400, {"message": "no"}))
    with publishing(tmp_path, [engine], backoff_s=3600.0) as publisher:
        publisher.publish(0, weights(1), canary())
        until(lambda: "failed at update" in publisher.engines()[0].reason and not engine.paused, "quarantine, pause undone")
        with pytest.raises(PublishError, match="quarantined"):
            publisher.wait_ready(1, 0.2)  # tried again too early otherwise
        engine.stop()
        until(lambda: state(publisher) == "starting", "it is gone")
        engine.restart()
        assert publisher.wait_ready(1, 20) == 1


def test_another_version_does_not_wait_for_the_back_off_of_the_one_that_failed(tmp_path, engine):
    engine.script("/update_weights_from_disk", Answer(400, {"message": "no"}))
    with publishing(tmp_path, [engine], backoff_s=3600.0) as publisher:
        publisher.publish(0, weights(1), canary())
        until(lambda: "failed at update" in publisher.engines()[0].reason and not engine.paused, "quarantine, pause undone")
        assert publisher.wait_ready(publisher.publish(1, weights(2), canary()), 20) == 2


def test_a_version_that_kills_an_engine_is_not_given_to_it_for_ever(tmp_path, engine):
    """Each death is a start that the launcher counts."""
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/update_weights_from_disk", *[DROP] * 4)
        publisher.publish(1, weights(2), canary())
        until(lambda: "it died of version 2 3 times" in publisher.engines()[0].reason, "quarantine")
        assert engine.posts().count("/update_weights_from_disk") == 4
        assert state(publisher) == "quarantined"
        engine.unscript()
        assert publisher.wait_ready(publisher.publish(2, weights(3), canary()), 20) == 3


@pytest.mark.parametrize("path", SEQUENCE)
@pytest.mark.parametrize("how", [DROP, LOSE])
def test_a_connection_lost_in_the_middle(tmp_path, engine, path, how):
    engine.script(path, how)
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        assert (engine.weight_version, engine.paused) == ("1", False)


def test_066_update_under_load_serves_each_request_once_and_none_between_update_and_flush(tmp_path, engine):
    """8 running, 5 queued, one that arrives during the pause."""
    engine.token_s = 0.005
    body = {"sampling_params": {"max_new_tokens": 40}}
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        answers = {}

        def ask(index):
            answers[index] = generate(engine.url, {**body, "input_ids": [index], "rid": f"r{index}"})

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(14)]
        for thread in threads[:13]:
            thread.start()
        until(lambda: len(engine.running) == 8 and len(engine.waiting) == 5, "8 run and 5 wait")
        publisher.publish(1, weights(2), canary())
        until(lambda: engine.paused or engine.weight_version == "2", "the pause")
        threads[13].start()
        publisher.wait_ready(2, 20)
        for thread in threads:
            thread.join()
    for index in range(14):
        assert answers[index]["output_ids"] == [(index + 1 + i) % 100 for i in range(40)]
        spans = answers[index]["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] in (["1", "2"], ["2"])
        assert spans[-1]["end"] == 40
    at = engine.trace.index(("update", "2"))
    assert engine.trace[at + 1] == ("flush", "")


def test_065_no_cached_token_survives_an_update(tmp_path, engine):
    body = {"input_ids": list(range(20)), "sampling_params": {"max_new_tokens": 4}}
    with publishing(tmp_path, [engine]) as publisher:
        for update in range(3):
            publisher.wait_ready(publisher.publish(update, weights(update), canary()), 20)
            assert generate(engine.url, body)["meta_info"]["cached_tokens"] == 0
            assert generate(engine.url, body)["meta_info"]["cached_tokens"] == 19
    assert engine.reused
    assert all(reader == writer for reader, writer in engine.reused)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_093_non_finite_parameters_are_never_published(tmp_path, engine, bad):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(4, weights(1), canary()), 20)
        poisoned = {"model": {"a": np.ones(3, np.float32), "b": np.array([1, bad, 2], np.float32)}}
        with pytest.raises(PublishError, match=r"update 5 is not published: 1 of 3 values of model\.b are not finite"):
            publisher.publish(5, poisoned, canary())
        assert publisher.update_of(1) == 4
        assert [p.name for p in (tmp_path / "weights").iterdir()] == ["1"]
        assert publisher.publish(6, weights(1), canary()) == 2  # no number was used


def test_a_failing_writer_reaches_the_main_loop(tmp_path, engine):
    def full(params, folder):
        raise OSError(28, "No space left on device")

    with publishing(tmp_path, [engine], save=full) as publisher:
        version = publisher.publish(0, weights(0), canary())
        with pytest.raises(PublishError, match="No space left on device"):
            publisher.wait_ready(version, 20)
        with pytest.raises(PublishError, match="No space left on device"):
            publisher.publish(1, weights(1), canary())


def test_recompilations_are_summed_over_embedded_engines(tmp_path, engine):
    with FakeEngine() as other, publishing(tmp_path, [engine, other]) as publisher:
        assert publisher.recompilations() is None
        engine.server_info = {"compilations_after_warmup": 2}
        assert publisher.recompilations() == 2
        other.server_info = {"compilations_after_warmup": 3}
        assert publisher.recompilations() == 5
        other.stop()
        assert publisher.recompilations() == 2
