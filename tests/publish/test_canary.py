"""What an engine must answer before what it samples counts."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from learner.canary import BOUNDS, Canary, CanaryError, Judge, Score, canary_ids
from learner.engine_api import EngineApi, EngineError
from learner.proofs import Verdict
from learner.publisher import EnginesRefuse
from tests.fakes import DROP, HANG, LOGPROB, Answer, FakeEngine
from tests.processes import until
from tests.publish.calls import EASY, TIGHT, Log, canary, publishing, save, state, weights

LOGITS = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
CANARY = Canary(np.array([1, 2, 3], np.int32), np.array([0, -1.5, -0.25], np.float32), LOGITS)


def scored(*, offset=0.0, **changes):
    """The right answer at temperature 0.5, each prompt logprob moved by `offset`."""
    z = LOGITS.astype(np.float64) / 0.5
    right = Score(CANARY.logprobs + offset, 1, float(z[1] - np.log(np.exp(z).sum())), "7")
    return Score(**{**right.__dict__, **changes})


def judge(dtype="float32", temperature=0.5):
    return Judge(dtype, temperature)


# ---- one answer ----------------------------------------------------------------------------------------------------------


def test_the_right_answer_passes_with_its_mean():
    assert judge().check(CANARY, scored(), 7) == 0.0
    assert judge().check(CANARY, scored(offset=9e-5), 7) == pytest.approx(9e-5, rel=1e-2)


def test_sampling_is_softmax_of_logits_over_temperature():
    """By hand at temperature 0.5: logits 0, 2, 4, -2; softmax of the second is e^2 / (1 + e^2 + e^4 + e^-2) = 7.389 / 63.12."""
    assert np.exp(CANARY.sampled(1, 0.5)) == pytest.approx(0.1171, abs=1e-4)
    assert sum(np.exp(CANARY.sampled(token, 0.7)) for token in range(4)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (scored(offset=1.1e-4), "serves other weights"),
        (scored(version="6"), "version 6 answered the canary of version 7"),
        (scored(logprobs=np.zeros(2)), "2 finite logprobs were expected for 3 tokens"),
        (scored(logprobs=np.array([0, np.nan, 0])), "finite logprobs"),
        (scored(token=4), "sampled id 4, the model has 4"),
        (scored(token_logprob=-0.5), "differs by"),
        (scored(token_logprob=CANARY.sampled(1, 1.0)), "from before the temperature \\(0.5\\).*SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
)
def test_wrong_answers_are_named(score, words):
    with pytest.raises(CanaryError, match=words):
        judge().check(CANARY, score, 7)


def test_the_first_position_says_nothing():
    assert judge().check(CANARY, scored(logprobs=np.array([123.0, -1.5, -0.25])), 7) == 0.0


def wider(times):
    """The canary and a right answer of a policy whose logits are so many times as wide."""
    canary = replace(CANARY, last_logits=times * LOGITS)
    return canary, replace(scored(), token_logprob=canary.sampled(1, 0.5))


def test_bfloat16_is_calibrated_by_its_first_canary_and_never_above_the_bound():
    own = judge("bfloat16")
    assert own.bound(CANARY) == BOUNDS["bfloat16"] == 0.02
    with pytest.raises(CanaryError, match=r"allowed for bfloat16 is 0.02"):
        own.check(CANARY, scored(offset=0.021), 7)
    assert own.bound(CANARY) == 0.02  # a failure calibrates nothing
    own.check(CANARY, scored(offset=0.002), 7)
    assert own.bound(CANARY) == pytest.approx(0.008, rel=1e-3)  # four times
    own.check(CANARY, scored(offset=0.0079), 7)
    with pytest.raises(CanaryError, match=r"0.008"):
        own.check(CANARY, scored(offset=0.0081), 7)
    close, noisy = judge("bfloat16"), judge("bfloat16")
    close.check(CANARY, scored(), 7)
    noisy.check(CANARY, scored(offset=0.019), 7)
    assert (close.bound(CANARY), noisy.bound(CANARY)) == (1e-3, 0.02)


def test_a_policy_that_has_become_sure_may_differ_by_more_than_the_random_one_it_was():
    """Measured on the smoke model in bfloat16: 2.7e-4 at a width of 0.2, 3.4e-3 at 2.0, twelve times as much."""
    own = judge("bfloat16")
    own.check(CANARY, scored(offset=3e-4), 7)
    assert own.bound(CANARY) == pytest.approx(1.2e-3, rel=1e-2)
    sure, answer = wider(10)
    assert own.bound(sure) == pytest.approx(1.2e-2, rel=1e-2)
    own.check(sure, replace(answer, logprobs=CANARY.logprobs + 3.6e-3), 7)
    assert own.bound(wider(100)[0]) == 0.02
    assert judge("float32").bound(sure) == 1e-4


def test_a_canary_survives_its_file(tmp_path):
    CANARY.save(tmp_path)
    again = Canary.load(tmp_path)
    assert [(x.dtype, x.tolist()) for x in (again.ids, again.logprobs, again.last_logits)] == [
        (x.dtype, x.tolist()) for x in (CANARY.ids, CANARY.logprobs, CANARY.last_logits)
    ]


def test_its_ids_are_the_tokenizers_and_fit_the_engine():
    ids = canary_ids(50, 1000, 3)
    assert (len(ids), ids.dtype, ids.min() >= 0, ids.max() < 50) == (48, np.int32, True, True)
    assert ids.tolist() == canary_ids(50, 1000, 3).tolist() != canary_ids(50, 1000, 4).tolist()
    assert len(canary_ids(50, 20, 3)) == 20


# ---- over a connection -----------------------------------------------------------------------------------------------------


def test_the_question_and_the_answer(engine):
    engine.weight_version = "5"
    score = EngineApi(engine.url, EASY).score(canary().ids, 0.7)
    assert (score.logprobs.tolist(), score.token, score.token_logprob, score.version) == (
        [0.0, LOGPROB, LOGPROB],
        4,
        LOGPROB,
        "5",
    )
    path, body = engine.calls[0]
    assert path == "/generate"
    assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == ([1, 2, 3], 0, True)
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0.7, "ignore_eos": True}


def test_an_answer_without_logprobs_is_an_error(engine):
    engine.script("/generate", Answer(200, {"meta_info": {"output_token_logprobs": [[-0.5, 4, None]]}}))
    with pytest.raises(EngineError, match=r"no logprobs of 3 prompt tokens.*input_token_logprobs"):
        EngineApi(engine.url, EASY).score(canary().ids, 1.0)


def test_an_engine_that_fails_its_canary_is_quarantined_and_comes_back(tmp_path, engine):
    log = Log()
    with publishing(tmp_path, [engine], log=log) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.prompt_logprob = -0.6  # other weights
        version = publisher.publish(1, weights(2), canary())
        until(lambda: state(publisher) == "quarantined", "quarantine")
        reason = publisher.engines()[0].reason
        assert reason.startswith("update to version 2 failed at canary: /generate: mean |logprob - learner's| is 0.1 over")
        pairs = [("engine-0", 2)]
        assert publisher.proofs.judge(pairs, since=0.0)[0] is Verdict.FAILED
        engine.prompt_logprob = LOGPROB
        assert publisher.wait_ready(version, 20) == 2
        assert publisher.proofs.judge(pairs, since=0.0)[0] is Verdict.FAILED  # what was sampled before stays unproven
        assert publisher.proofs.judge(pairs, since=publisher.proofs._clock())[0] is Verdict.PROVEN
        assert publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is Verdict.PROVEN  # it was sampled before
    assert publisher.canaries == {"engine-0": 0.0}
    assert [f["canary"] for kind, f in log.events if kind == "engine_updated"] == [0.0, 0.0]


def test_a_canary_that_fails_ends_what_the_engine_is_doing(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.calls.clear()
        engine.prompt_logprob = -0.6
        publisher.publish(1, weights(2), canary())
        until(lambda: "/flush_cache" in engine.posts(), "the undoing")
        undone = [path for path, _ in engine.calls]
        start = undone.index("/generate") + 1
        until(lambda: "/continue_generation" in [path for path, _ in engine.calls][start:], "it goes on")
        assert [path for path, _ in engine.calls][start : start + 3] == ["/abort_request", "/flush_cache", "/continue_generation"]


def test_wrong_from_the_first_version_on_ends_the_wait(tmp_path, engine):
    engine.prompt_logprob = -0.6
    with publishing(tmp_path, [engine]) as publisher:
        publisher.publish(0, weights(1), canary())
        with pytest.raises(EnginesRefuse, match=r"no engine takes version 1.*failed at canary"):
            publisher.wait_ready(1, 60)


def test_dying_of_the_first_version_again_and_again_ends_the_wait(tmp_path, engine):
    """SGLang does, of files that are cut short and of another model's."""
    engine.script("/update_weights_from_disk", *[DROP] * 3)
    with publishing(tmp_path, [engine]) as publisher:
        version = publisher.publish(0, weights(1), canary())
        with pytest.raises(EnginesRefuse, match=r"no engine takes version 1.*update to version 1 failed at update.*cannot reach"):
            publisher.wait_ready(version, 60)


def test_a_canary_without_an_answer_is_a_failure_too(tmp_path, engine):
    with publishing(tmp_path, [engine], deadlines=TIGHT) as publisher:
        engine.script("/generate", HANG)
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        assert publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is Verdict.FAILED


def test_an_engine_that_hangs_in_an_update_leaves_nothing_pending(tmp_path, engine):
    """Its old version was put in doubt, and nobody can ask it any more: what it sampled must not wait for ever."""
    with publishing(tmp_path, [engine], deadlines=TIGHT, backoff_s=60.0) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/update_weights_from_disk", HANG)
        engine.script("/abort_request", HANG)
        publisher.publish(1, weights(2), canary())
        until(lambda: "may still be paused" in publisher.engines()[0].reason, "the undoing to fail")
        verdict, reason = publisher.proofs.judge([("engine-0", 1)], since=0.0)
        assert verdict is Verdict.FAILED
        assert "failed at update: /update_weights_from_disk: no answer within 1 s; version 1 was not proven again" in reason


def test_an_engine_of_an_unknown_past_is_not_believed(tmp_path, engine):
    """It says to be the version that is published, as another run's engine may."""
    engine.weight_version = "1"
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        assert "/update_weights_from_disk" in engine.posts()
        assert publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is Verdict.PROVEN


def test_nothing_counts_before_the_canary_has_passed(tmp_path, engine):
    """Between continue and the canary the engine serves, and what it samples is pending."""
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.token_s = 0.2  # the canary takes a while
        publisher.publish(1, weights(2), canary())
        until(lambda: engine.weight_version == "2" and not engine.paused, "the new weights serve")
        assert publisher.proofs.judge([("engine-0", 2)], since=0.0)[0] is Verdict.PENDING
        assert state(publisher) == "updating"
        publisher.wait_ready(2, 20)
        assert publisher.proofs.judge([("engine-0", 2)], since=0.0) == (Verdict.PROVEN, "")


@pytest.mark.parametrize("harmed", [False, True])
def test_a_failed_load_puts_the_old_version_in_doubt_until_it_answers_again(tmp_path, engine, harmed):
    """Half of the new weights under the old version's name must not be trained on."""
    with publishing(tmp_path, [engine], backoff_s=60.0) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.calls.clear()
        engine.script("/update_weights_from_disk", Answer(400, {"success": False, "message": "a shard is damaged"}))
        engine.prompt_logprob = -0.6 if harmed else LOGPROB
        publisher.publish(1, weights(2), canary())
        until(lambda: any(path == "/generate" for path, _ in engine.calls), "the old version's canary")
        wanted = Verdict.FAILED if harmed else Verdict.PROVEN
        until(lambda: publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is wanted, "the verdict")
        assert publisher.proofs.judge([("engine-0", 2)], since=0.0)[0] is Verdict.FAILED
        assert state(publisher) == "quarantined"


def test_a_canary_that_fails_leaves_older_tokens_proven(tmp_path, engine):
    with publishing(tmp_path, [engine], backoff_s=60.0) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.prompt_logprob = -0.6
        publisher.publish(1, weights(2), canary())
        until(lambda: publisher.proofs.judge([("engine-0", 2)], since=0.0)[0] is Verdict.FAILED, "the verdict")
        until(lambda: engine.posts()[-3:] == ["/abort_request", "/flush_cache", "/continue_generation"], "the undoing")
        assert publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is Verdict.PROVEN


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", "/continue_generation"])
def test_an_undoing_that_fails_leaves_nothing_pending(tmp_path, engine, path):
    with publishing(tmp_path, [engine], backoff_s=60.0) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/update_weights_from_disk", Answer(400, {"success": False, "message": "no"}))
        engine.script(path, Answer(400, {"message": "no"}))
        publisher.publish(1, weights(2), canary())
        until(lambda: "may still be paused" in publisher.engines()[0].reason, "the reason")
        verdict, why = publisher.proofs.judge([("engine-0", 1)], since=0.0)
        assert verdict is Verdict.FAILED
        assert "version 1 was not proven again" in why


def test_a_canary_that_is_gone_from_disk_is_a_failure_with_words(tmp_path, engine):
    def without(params, directory):
        save(params, directory)
        (directory / "canary.npz").unlink()

    with publishing(tmp_path, [engine], save=without) as publisher:
        publisher.publish(0, weights(1), canary())
        until(lambda: "canary.npz cannot be read: FileNotFoundError" in publisher.engines()[0].reason, "the reason")
        publisher.check()


@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:-40], lambda data: data[:60] + b"x" + data[61:]])
def test_a_damaged_canary_is_an_error_with_words(tmp_path, harm):
    CANARY.save(tmp_path)
    file = tmp_path / "canary.npz"
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(CanaryError, match=r"canary.npz cannot be read"):
        Canary.load(tmp_path)


def test_a_pause_that_fails_leaves_what_was_handed_out_before_trainable(tmp_path, engine):
    """No weights were touched."""
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/pause_generation", Answer(500, {"message": "busy"}))
        publisher.wait_ready(publisher.publish(1, weights(2), canary()), 20)
        assert publisher.proofs.judge([("engine-0", 1), ("engine-0", 2)], since=0.0)[0] is Verdict.PROVEN


def test_what_an_engine_says_to_serve_is_doubted_also_when_it_was_lost_in_between(tmp_path, engine):
    """The table knows no version of an engine that was gone; the engine does."""
    with publishing(tmp_path, [engine], backoff_s=60.0) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.script("/update_weights_from_disk", DROP, Answer(400, {"success": False, "message": "no"}))
        engine.prompt_logprob = -0.6  # the load that was cut off has changed something
        publisher.publish(1, weights(2), canary())
        until(lambda: publisher.proofs.judge([("engine-0", 1)], since=0.0)[0] is Verdict.FAILED, "the verdict")


def test_engines_in_turn_do_not_wait_for_one_that_hangs(tmp_path, engine):
    with FakeEngine() as other, publishing(tmp_path, [engine, other], rolling=True, rolling_wait_s=0.1) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        until(lambda: {e.version for e in publisher.engines()} == {1}, "both")
        engine.script("/update_weights_from_disk", HANG)
        publisher.publish(1, weights(2), canary())
        until(lambda: publisher.engines()[1].version == 2, "the other")
        assert publisher.engines()[0].state == "updating"
        engine.restart()


def test_an_engine_that_dies_before_its_canary_leaves_nothing_pending(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(1), canary()), 20)
        engine.calls.clear()
        engine.script("/generate", HANG)
        publisher.publish(1, weights(2), canary())
        until(lambda: engine.calls and engine.calls[-1][0] == "/generate", "the canary is asked for")
        engine.restart()
        until(lambda: publisher.proofs.judge([("engine-0", 2)], since=0.0)[0] is Verdict.FAILED, "the verdict")
        publisher.wait_ready(2, 20)


def test_rolling_updates_leave_the_others_serving(tmp_path, engine):
    """Never two engines at once between pause and canary; together, both are."""

    def most_at_once(folder, rolling):
        with FakeEngine() as a, FakeEngine() as b:
            a.token_s = b.token_s = 0.05
            with publishing(folder, [a, b], rolling=rolling) as publisher:
                seen, over = [0], threading.Event()

                def look():
                    while not over.wait(0.001):
                        seen.append(sum(e.state == "updating" for e in publisher.engines()))

                thread = threading.Thread(target=look)
                thread.start()
                for update in range(3):
                    publisher.publish(update, weights(update), canary())
                    until(lambda version=update + 1: {e.version for e in publisher.engines()} == {version}, "both updated")
                over.set()
                thread.join()
                return max(seen)

    assert most_at_once(tmp_path / "rolling", True) == 1
    assert most_at_once(tmp_path / "together", False) == 2
