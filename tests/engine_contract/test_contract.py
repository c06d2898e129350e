"""What Polyturn relies on, of every engine: each test is a row of docs/engines.md."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import wait

import numpy as np
import pytest

from tests.engine_contract.conftest import END, LENGTH, Models, Served, ids_of, logprobs_of
from tests.processes import until

CLOSE = 1e-4  # float32
LONG = {"new": 440, "ignore_eos": True, "stop_token_ids": []}  # still running when a test looks: it cannot end itself
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 1000, length).tolist() for length in (5, 17, 40, 64, 65, 100)]


def spans_cover(answer: dict) -> None:
    at = 0
    for span in answer["meta_info"]["weight_versions"]:
        assert span["start"] == at
        at = span["end"]
    assert at == len(ids_of(answer))


def differences(answer: dict, prompt: list[int], models: Models, temperature: float = 1.0) -> np.ndarray:
    """Of each token's logprob to the learner's, at the version that the engine says sampled it."""
    ids, own = ids_of(answer), logprobs_of(answer)
    out = np.empty(len(ids))
    for span in answer["meta_info"]["weight_versions"]:
        truth = models.truth[span["version"]].logprobs([(prompt, ids)], temperature)[0]
        out[span["start"] : span["end"]] = (own - truth)[span["start"] : span["end"]]
    return np.abs(out)


# ---- generation ----------------------------------------------------------------------------------------------------------


def test_ids_in_ids_and_logprobs_out(engine: Served) -> None:
    answer = engine.generate(PROMPTS[1], new=6)
    meta = answer["meta_info"]
    assert answer["output_ids"] == ids_of(answer)
    assert meta["prompt_tokens"] == len(PROMPTS[1])
    assert meta["completion_tokens"] == len(ids_of(answer))
    assert all(type(i) is int for i in ids_of(answer))
    assert np.isfinite(logprobs_of(answer)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: Served, models: Models, temperature: float) -> None:
    for prompt in PROMPTS:
        answer = engine.generate(prompt, new=12, temperature=temperature)
        assert differences(answer, prompt, models, temperature).max() < CLOSE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_the_prompt_are_those_of_the_model(engine: Served, models: Models, temperature: float) -> None:
    """Of softmax(logits) whatever the temperature, whatever is cached; nothing predicts the first; the output's are as ever."""
    for prompt in PROMPTS:
        engine.generate([*prompt, 1], new=2)
        for start in (0, 3, len(prompt) - 1):
            answer = engine.generate(prompt, new=2, temperature=temperature, start=start)
            pairs = answer["meta_info"]["input_token_logprobs"]
            assert [pair[1] for pair in pairs] == prompt[start:]
            assert (pairs[0][0], answer["meta_info"]["cached_tokens"]) == (None, start)
            if pairs[1:]:
                truth = models.truth["1"].logprobs([(prompt[: start + 1], prompt[start + 1 :])], 1.0)[0]
                assert np.abs(np.asarray([pair[0] for pair in pairs[1:]]) - truth).max() < CLOSE
            assert differences(answer, prompt, models, temperature).max() < CLOSE


def test_logprobs_of_the_prompt_start_inside_it(engine: Served) -> None:
    prompt = PROMPTS[1]
    for none in (-1, len(prompt)):
        assert engine.generate(prompt, start=none)["meta_info"]["input_token_logprobs"] == []
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": len(prompt) + 1}
    status, answer = engine.call("/generate", body | {"sampling_params": {"max_new_tokens": 1}})
    assert status == 400
    assert "logprob_start_len" in answer["error"]["message"]


def test_a_length_stop(engine: Served) -> None:
    answer = engine.generate(PROMPTS[0], new=5)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert len(ids_of(answer)) == 5


def test_a_stop_token_is_the_last_id(engine: Served) -> None:
    free = ids_of(engine.generate(PROMPTS[0], new=8, temperature=0.0))
    stop = free[3]
    answer = engine.generate(PROMPTS[0], new=8, temperature=0.0, stop_token_ids=[END, stop])
    assert ids_of(answer) == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_results_do_not_depend_on_batch_mates(engine: Served) -> None:
    alone = [ids_of(engine.generate(prompt, new=10, temperature=0.0)) for prompt in PROMPTS]
    together = [engine.start(prompt, new=10, temperature=0.0) for prompt in PROMPTS * 3]
    assert [ids_of(each.result(60)) for each in together] == alone * 3


def test_a_prefix_that_was_seen_is_not_computed_again(engine: Served) -> None:
    first = engine.generate(PROMPTS[4], new=8)
    longer = [*PROMPTS[4], *ids_of(first), *PROMPTS[0]]
    assert engine.generate(longer, new=2)["meta_info"]["cached_tokens"] >= len(PROMPTS[4])


# ---- versions and weights ----------------------------------------------------------------------------------------------------


def test_each_token_has_a_version(engine: Served) -> None:
    answer = engine.generate(PROMPTS[2], new=6)
    assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": len(ids_of(answer))}]


def test_new_weights_and_their_name(engine: Served, models: Models) -> None:
    """And no cached key of the old weights serves the new ones."""
    before = engine.generate(PROMPTS[5], new=8)
    engine.api.update_weights(models.b, 2)
    assert engine.api.weight_version() == "2"
    after = engine.generate(PROMPTS[5], new=8)
    assert after["meta_info"]["cached_tokens"] == 0
    assert differences(before, PROMPTS[5], models).max() < CLOSE
    assert differences(after, PROMPTS[5], models).max() < CLOSE
    assert after["meta_info"]["weight_versions"][0]["version"] == "2"


def test_logprobs_of_the_prompt_are_of_the_weights_that_sample_the_first_token(engine: Served, models: Models) -> None:
    """Sixteen requests in flight at an update, of which each names its versions."""
    prompts = [[*PROMPTS[2], n] for n in range(16)]
    flying = [engine.start(prompt, start=0, **LONG) for prompt in prompts]
    until(lambda: engine.running() > 0, "requests in flight", 30)
    engine.api.pause()
    engine.api.update_weights(models.b, 2)
    engine.api.resume()
    for prompt, answer in zip(prompts, [each.result(120) for each in flying], strict=True):
        meta = answer["meta_info"]
        assert [pair[1] for pair in meta["input_token_logprobs"]] == prompt
        truth = models.truth[meta["weight_versions"][0]["version"]].logprobs([(prompt[:1], prompt[1:])], 1.0)[0]
        assert np.abs(np.asarray([pair[0] for pair in meta["input_token_logprobs"][1:]]) - truth).max() < CLOSE
        assert differences(answer, prompt, models).max() < CLOSE


def test_weights_change_under_load(engine: Served, models: Models) -> None:
    """Sixteen requests in flight: none is lost, each token says which weights sampled it, and has their logprob."""
    prompts = [[*PROMPTS[2], n] for n in range(16)]
    flying = [engine.start(prompt, **LONG) for prompt in prompts]
    until(lambda: engine.running() == 16, "requests in flight", 30)
    engine.api.pause()
    engine.api.update_weights(models.b, 2)
    engine.api.resume()
    answers = [each.result(120) for each in flying]
    for prompt, answer in zip(prompts, answers, strict=True):
        spans_cover(answer)
        assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        assert differences(answer, prompt, models).max() < CLOSE
    assert any(len(answer["meta_info"]["weight_versions"]) == 2 for answer in answers)


# ---- pausing and ending ------------------------------------------------------------------------------------------------------


def test_a_pause_keeps_what_was_sampled(engine: Served, models: Models) -> None:
    flying = engine.start(PROMPTS[3], **LONG)
    until(lambda: engine.running() == 1, "a request in flight", 30)
    engine.api.pause()
    engine.api.resume()
    answer = flying.result(120)
    spans_cover(answer)
    assert differences(answer, PROMPTS[3], models).max() < CLOSE


def test_a_request_during_a_pause_waits(engine: Served) -> None:
    engine.api.pause()
    waiting = engine.start(PROMPTS[0], new=4)
    assert not wait([waiting], timeout=1.0).done
    engine.api.resume()
    assert ids_of(waiting.result(60))


def test_an_abort_gives_back_what_there_is(engine: Served, models: Models) -> None:
    flying = engine.start(PROMPTS[3], **LONG, rid="mine")
    until(lambda: engine.running() == 1, "a request in flight", 30)
    engine.call("/abort_request", {"rid": "mine"})
    answer = flying.result(60)
    if answer["meta_info"]["finish_reason"]["type"] == "abort":  # it may have ended by itself
        assert len(ids_of(answer)) < LONG["new"]
    spans_cover(answer)
    assert differences(answer, PROMPTS[3], models).max(initial=0) < CLOSE
    assert engine.call("/abort_request", {"rid": "nobody"})[0] == 200


def test_a_client_that_hangs_up_frees_its_place(engine: Served) -> None:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=60)
    body = {
        "input_ids": PROMPTS[0],
        "sampling_params": {"max_new_tokens": 400, "stop_token_ids": [], "ignore_eos": True},
        "return_logprob": True,
    }
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    until(lambda: engine.running() == 1, "a request in flight", 30)
    connection.close()
    until(lambda: engine.running() == 0, "an idle engine", 30)


# ---- what it says of itself, and of mistakes ---------------------------------------------------------------------------------


def test_what_it_says_of_itself(engine: Served, models: Models) -> None:
    status, info = engine.call("/model_info", method="GET")
    assert (status, info["weight_version"]) == (200, "1")
    assert engine.call("/health", method="GET")[0] == 200
    assert engine.call("/server_info", method="GET")[0] == 200
    assert engine.running() == 0


@pytest.mark.parametrize("ids", [[], [1] * (LENGTH + 50)])
def test_a_prompt_that_cannot_be_is_an_error_with_words(engine: Served, ids: list[int]) -> None:
    status, answer = engine.call(
        "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    )
    assert status == 400
    assert answer["error"]["message"]
    assert ids_of(engine.generate(PROMPTS[0], new=2))  # and it serves on


def test_flushing_forgets_prefixes(engine: Served) -> None:
    engine.generate(PROMPTS[4], new=2)
    engine.api.flush_cache()
    assert engine.generate(PROMPTS[4], new=2)["meta_info"]["cached_tokens"] == 0
