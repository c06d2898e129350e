"""What a /generate body may hold: SGLang's messages where it has one, ours where this engine has less."""

from __future__ import annotations

import pytest

from learner.serving.request import BadRequest, RequestLimits, read_generate

LIMITS = RequestLimits(vocab_size=64, max_length=48, eos=(2,))


def one(**params):
    [request], batched = read_generate({"input_ids": [5, 6], "sampling_params": params}, LIMITS)
    assert not batched
    return request


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_idz": [9]}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [[1], []]}, "input_ids cannot be empty."),
        ({"input_ids": [1] * 48}, "The input (48 tokens) is longer than the model's context length (48 tokens)."),
        ({"input_ids": [3, 64]}, "input_ids holds 64; the model's vocabulary has the ids 0..63."),
        ({"input_ids": [-1]}, "input_ids holds -1"),
        ({"input_ids": [1.0]}, "input_ids holds 1.0"),
        ({"input_ids": [True]}, "input_ids holds True"),
        ({"input_ids": "1"}, "input_ids is str"),
        ({"text": "hello"}, "no tokenizer"),
        ({"input_ids": [1], "stream": True}, "stream=true"),
        ({"input_ids": [1], "rid": ["a", "b"]}, "rid is a list of 2 for 1 prompt"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num"),
        ([], "JSON object"),
    ],
)
def test_bad_bodies(body, message):
    with pytest.raises(BadRequest) as error:
        read_generate(body, LIMITS)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"max_new_tokens": 47},
            "Requested token count exceeds the model's maximum context length of 48 tokens. You requested a total of 49",
        ),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer"),
        ({"temperature": -0.5}, "temperature must be a non-negative number, got -0.5"),
        ({"temperature": "hot"}, "temperature must be a non-negative number"),
        ({"top_p": 0.9}, "top_p=0.9 is not supported: it changes the sampling distribution"),
        ({"top_k": 1}, "top_k=1 is not supported"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"n": 2}, "n=2"),
        ({"json_schema": "{}"}, "json_schema="),
        ({"stop": ["\n"]}, "stop strings need a tokenizer"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is ['a']"),
        ({"stop_token_ids": list(range(17))}, "at most 16"),
        ({"temprature": 1}, "no field 'temprature'"),
        ({"sampling_seed": 2**32}, "sampling_seed must be an integer in 0..4294967295"),
    ],
)
def test_bad_sampling_params(params, message):
    with pytest.raises(BadRequest) as error:
        one(**params, **({} if "max_new_tokens" in params else {"max_new_tokens": 1}))
    assert message in str(error.value)


@pytest.mark.parametrize("start", [3, -2, True, "0", 0.0])
def test_bad_starts_of_prompt_logprobs(start):
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": start}
    with pytest.raises(BadRequest, match=f"logprob_start_len is {start!r}; send an integer in 0..2"):
        read_generate(body, LIMITS)
    read_generate(body | {"return_logprob": False}, LIMITS)  # SGLang ignores it then


def test_prompt_logprobs_without_a_token_are_refused():
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    with pytest.raises(BadRequest, match="max_new_tokens is 0; logprobs of the prompt come with"):
        read_generate(body, LIMITS)


def test_neutral_values_are_accepted():
    one(max_new_tokens=46, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1, n=1, json_schema=None, skip_special_tokens=False)


def test_stops_are_asked_ones_and_eos_unless_ignored():
    assert one(max_new_tokens=1, stop_token_ids=[9, 2]).stops == (9, 2)
    assert one(max_new_tokens=1).stops == (2,)
    assert one(max_new_tokens=1, stop_token_ids=[9], ignore_eos=True).stops == ()


def test_the_default_length_fits():
    assert one().max_new_tokens == 46


def test_tiny_temperatures_are_greedy_and_missing_seeds_differ():
    assert one(max_new_tokens=1, temperature=1e-7).temperature == 0
    assert one(max_new_tokens=1, sampling_seed=7).seed == 7
    assert len({one(max_new_tokens=1).seed for _ in range(8)}) > 1


def test_a_batch_spreads_single_values():
    body = {"input_ids": [[1], [2, 3]], "rid": "r", "sampling_params": {"max_new_tokens": 2}, "return_logprob": [True, False]}
    requests, batched = read_generate(body, LIMITS)
    assert batched
    assert [(r.rid, r.prompt.tolist(), r.return_logprob) for r in requests] == [("r_0", [1], True), ("r_1", [2, 3], False)]


def test_spans_of_a_finished_request():
    """Three tokens by "1", none by "2", two by "3": the empty run leaves no span."""
    request = one(max_new_tokens=5)
    request.append([7, 8, 9], [-1.0, -1.0, -1.0], "1")
    request.append([], [], "2")
    request.append([10, 11], [-1.0, -1.0], "3")
    assert request.finish == {"type": "length", "length": 5}
    assert request.response()["meta_info"]["weight_versions"] == [
        {"version": "1", "start": 0, "end": 3},
        {"version": "3", "start": 3, "end": 5},
    ]
