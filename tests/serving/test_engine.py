"""The engine's thread against the training forward pass: log-probabilities, independence, reuse, updates, aborts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from learner.model import hf
from learner.serving.programs import DecodeRows, EngineShape, Programs
from learner.serving.request import STOPS
from tests.serving.conftest import SHAPE, SPEC, Bench, make_model, make_request, make_scored, model_logprobs, prompt_logprobs

PROMPTS = [[(7 * i + 3 * j) % 61 + 1 for j in range(4 + 3 * i)] for i in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_training_forward_pass(bench, model, temperature):
    requests = [make_request(str(i), prompt, 10, temperature, seed=i) for i, prompt in enumerate(PROMPTS)]
    for request in bench.run(*requests).values():
        assert len(request.output) == 10
        np.testing.assert_allclose(request.logprobs, model_logprobs(model, request), atol=1e-4)


def test_greedy_takes_the_most_likely_token(bench, model):
    request = bench.run(make_request("g", PROMPTS[3], 6, temperature=0.0))["g"]
    for cut in range(6):
        best = max(range(SPEC.vocab_size), key=lambda token: _logprob_of(model, request, cut, token))
        assert request.output[cut] == best


def _logprob_of(model, request, cut, token):
    probe = make_request("p", request.sequence()[: len(request.prompt) + cut].tolist(), 1, 0.0)
    probe.output = [token]
    return model_logprobs(model, probe)[0]


def test_a_result_does_not_depend_on_batch_mates_or_chunking(bench, model):
    alone = [bench.run(make_request(f"a{i}", p, 12, 1.0, seed=i))[f"a{i}"] for i, p in enumerate(PROMPTS)]
    assert bench.engine.flush().result(60)
    crowd = bench.run(*[make_request(f"c{i}", p, 12, 1.0, seed=i) for i, p in enumerate(PROMPTS)])
    other = Bench(model, type(SHAPE)(2, 2, 48, 1, 1, 3, (48,)))
    single = other.run(*[make_request(f"s{i}", p, 12, 1.0, seed=i) for i, p in enumerate(PROMPTS)])
    other.engine.stop()
    for i, first in enumerate(alone):
        for second in (crowd[f"c{i}"], single[f"s{i}"]):
            assert second.output == first.output
            np.testing.assert_allclose(second.logprobs, first.logprobs, atol=1e-5)


def test_seeds_differ_and_a_seed_repeats(bench):
    runs = bench.run(*[make_request(f"{seed}-{k}", PROMPTS[2], 12, 1.0, seed=seed) for seed in range(3) for k in range(2)])
    outputs = [tuple(runs[f"{seed}-0"].output) for seed in range(3)]
    assert len(set(outputs)) == 3
    assert all(runs[f"{seed}-0"].output == runs[f"{seed}-1"].output for seed in range(3))


def test_a_stop_token_ends_a_row_inside_a_chunk(bench):
    free = bench.run(make_request("free", PROMPTS[1], 12, 1.0, seed=5))["free"]
    stop = free.output[5]  # the chunk has 4 steps: this one is inside the second
    first = free.output.index(stop)
    cut = bench.run(make_request("cut", PROMPTS[1], 12, 1.0, seed=5, stops=[stop]))["cut"]
    assert cut.output == free.output[: first + 1]
    assert cut.finish == {"type": "stop", "matched": stop}
    assert len(cut.logprobs) == len(cut.output)


def test_the_length_is_checked_before_the_stop_token(bench):
    free = bench.run(make_request("free", PROMPTS[1], 3, 1.0, seed=5))["free"]
    stop = free.output[2]
    if stop not in free.output[:2]:
        cut = bench.run(make_request("cut", PROMPTS[1], 3, 1.0, seed=5, stops=[stop]))["cut"]
        assert cut.finish == {"type": "length", "length": 3}


def test_the_next_turn_finds_its_own_prefix(bench, model):
    first = bench.run(make_request("t1", PROMPTS[2], 6, 1.0, seed=1))["t1"]
    bench.run(*[make_request(f"x{i}", [60 - i] * 9, 4, 1.0) for i in range(4)])  # others come between
    follow = [*first.sequence().tolist(), 9, 8, 7]
    second = bench.run(make_request("t2", follow, 6, 1.0, seed=2))["t2"]
    # all but the last sampled token, whose key was never written
    assert (first.cached_tokens, second.cached_tokens) == (0, len(first.sequence()) - 1)
    np.testing.assert_allclose(second.logprobs, model_logprobs(model, second), atol=1e-4)


def test_a_shared_prefix_is_copied_and_its_owner_keeps_the_rest(bench, model):
    owner = bench.run(make_request("o", PROMPTS[5], 6, 1.0, seed=1))["o"]
    fork = bench.run(make_request("f", [*PROMPTS[5][:10], 1, 2, 3], 6, 1.0, seed=2))["f"]
    back = bench.run(make_request("b", [*owner.sequence().tolist(), 5], 4, 1.0, seed=3))["b"]
    assert (fork.cached_tokens, back.cached_tokens) == (10, len(owner.sequence()) - 1)
    for request in (fork, back):
        np.testing.assert_allclose(request.logprobs, model_logprobs(model, request), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_prompt_logprobs_are_those_of_the_training_forward_pass(bench, model, temperature):
    """At temperature 1, whatever is sampled at; between ordinary requests; shorter, as long and longer than a chunk."""
    scored = [make_scored(f"s{i}", prompt, 0, 4, temperature) for i, prompt in enumerate([[7], [7, 8], *PROMPTS])]
    plain = [make_request(f"p{i}", prompt, 4, temperature) for i, prompt in enumerate(PROMPTS)]
    for request in bench.run(
        *[each for pair in zip(scored, plain, strict=False) for each in pair], *scored[len(plain) :]
    ).values():
        expected = prompt_logprobs(model, request) if request in scored else []
        np.testing.assert_allclose(request.prompt_logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(request.logprobs, model_logprobs(model, request), atol=1e-4)


def test_prompt_logprobs_use_the_cache_up_to_where_they_start(bench, model):
    prompt = PROMPTS[5]
    bench.run(make_request("first", [*prompt, 1], 2))
    for start, cached in ((0, 0), (1, 1), (6, 6), (len(prompt) - 1, len(prompt) - 1), (7, 0)):
        if not cached:
            assert bench.engine.flush().result(60)
        request = bench.run(make_scored(f"from {start}", prompt, start, 3))[f"from {start}"]
        assert request.cached_tokens == cached
        np.testing.assert_allclose(request.prompt_logprobs, prompt_logprobs(model, request), atol=1e-4)
        np.testing.assert_allclose(request.logprobs, model_logprobs(model, request), atol=1e-4)
        assert [pair[1] for pair in request.response()["meta_info"]["input_token_logprobs"]] == prompt[start:]


def test_prompt_logprobs_are_of_the_weights_that_sample_the_first_token(bench, model):
    """Retracted in the middle of decoding, and while they wait: each has one version, and the first span names it."""
    new = make_model(1)
    requests = [make_scored(str(i), prompt, 0, 16, 0.7) for i, prompt in enumerate(PROMPTS[:7])]
    requests[0].max_new_tokens = 2
    bench.then.append(lambda: bench.engine.update(nnx.state(new, nnx.Param), "2"))
    bench.engine.submit(requests)
    finished = bench.collect(len(requests))
    bench.answers.get(timeout=60).result(60)
    bench.engine.update(nnx.state(model, nnx.Param), "default").result(60)
    assert {"default": model, "2": new}.keys() == {request.switches[0][0] for request in finished.values()}
    assert any(len(request.switches) == 2 for request in finished.values())
    for request in finished.values():
        first = {"default": model, "2": new}[request.switches[0][0]]
        np.testing.assert_allclose(request.prompt_logprobs, prompt_logprobs(first, request), atol=1e-4)
        _check_spans(request, {"default": model_logprobs(model, request), "2": model_logprobs(new, request)})


def test_a_request_that_is_cut_before_it_was_scored_has_no_prompt_logprobs(bench):
    bench.engine.pause("retract").result(60)
    bench.engine.submit([make_scored("w", PROMPTS[0])])
    bench.engine.abort("w").result(60)
    bench.engine.resume().result(60)
    assert bench.collect(1)["w"].response()["meta_info"]["input_token_logprobs"] == []


def test_065_no_key_survives_a_weight_update(bench, model):
    """Field record 065: after an update, cached tokens are 0 and results are those of a fresh engine."""
    new = make_model(1)
    before = bench.run(make_request("b", PROMPTS[5], 8, 0.0))["b"]
    bench.engine.update(nnx.state(new, nnx.Param), "2").result(60)
    after = bench.run(make_request("a", PROMPTS[5], 8, 0.0))["a"]
    fresh_bench = Bench(new, replace(SHAPE, widths=(48,)))
    fresh = fresh_bench.run(make_request("f", PROMPTS[5], 8, 0.0))["f"]
    fresh_bench.engine.stop()
    bench.engine.update(nnx.state(model, nnx.Param), "default").result(60)
    assert after.cached_tokens == 0
    assert after.output == fresh.output != before.output
    np.testing.assert_allclose(after.logprobs, fresh.logprobs, atol=1e-6)


def test_pause_update_continue_under_load_loses_nothing(bench, model):
    """Tokens before the switch have the old weights' logprobs, tokens after it the new ones', and the spans say which."""
    new = make_model(1)
    requests = [make_request(str(i), prompt, 24, 1.0, seed=i) for i, prompt in enumerate(PROMPTS[:7])]
    requests[0].max_new_tokens = 2  # when it ends, others are half way, or waiting
    bench.then.append(lambda: bench.engine.pause("retract"))
    bench.engine.submit(requests)
    first = bench.done.get(timeout=60)
    bench.answers.get(timeout=60).result(60)
    late = make_request("late", PROMPTS[0], 5, 1.0, seed=9)
    bench.engine.submit([late])
    assert bench.engine.load().running == 0
    bench.engine.update(nnx.state(new, nnx.Param), "2").result(60)
    bench.engine.resume().result(60)
    finished = {first.rid: first} | bench.collect(len(requests))
    bench.engine.update(nnx.state(model, nnx.Param), "default").result(60)
    assert set(finished) == {str(i) for i in range(7)} | {"late"}
    assert finished["late"].switches == [("2", 0)]
    assert any(len(request.switches) == 2 for request in finished.values())
    for request in finished.values():
        _check_spans(request, {"default": model_logprobs(model, request), "2": model_logprobs(new, request)})


def test_an_update_without_a_pause_retracts_running_requests(bench, model):
    new = make_model(1)
    requests = [make_request("short", PROMPTS[0], 2, 1.0, seed=1), make_request("long", PROMPTS[1], 40, 1.0, seed=2)]
    bench.then.append(lambda: bench.engine.update(nnx.state(new, nnx.Param), "2"))
    bench.engine.submit(requests)
    bench.collect(1)
    assert bench.answers.get(timeout=60).result(60) == 1
    long = bench.collect(1)["long"]
    bench.engine.update(nnx.state(model, nnx.Param), "default").result(60)
    assert [version for version, _ in long.switches] == ["default", "2"]
    _check_spans(long, {"default": model_logprobs(model, long), "2": model_logprobs(new, long)})


def _check_spans(request, expected):
    assert len(request.output) == request.max_new_tokens
    spans = request.response()["meta_info"]["weight_versions"]
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == len(request.output)
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
    for span in spans:
        part = slice(span["start"], span["end"])
        np.testing.assert_allclose(request.logprobs[part], expected[span["version"]][part], atol=1e-4)
    if len(spans) == 2:
        assert request.retractions == 1


def test_an_abort_keeps_what_was_sampled(bench, model):
    bench.then += [lambda: bench.engine.abort("nobody"), lambda: bench.engine.abort("long")]
    bench.engine.submit([make_request("long", PROMPTS[0], 40, 1.0, seed=1), make_request("other", PROMPTS[1], 2, 1.0, seed=2)])
    finished = bench.collect(2)
    assert len(finished["other"].output) == 2
    aborted = finished["long"]
    assert aborted.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(aborted.output) < 40
    np.testing.assert_allclose(aborted.logprobs, model_logprobs(model, aborted), atol=1e-4)


def test_a_pause_with_abort_ends_everything_and_later_requests_wait(bench):
    bench.engine.submit([make_request(str(i), p, 30, 1.0, seed=i) for i, p in enumerate(PROMPTS[:6])])
    bench.engine.pause("abort").result(60)
    finished = bench.collect(6)
    bench.engine.submit([make_request("late", PROMPTS[0], 3, 1.0)])
    assert bench.engine.call(lambda: None).result(60) is None
    assert bench.done.empty()
    bench.engine.resume().result(60)
    assert all(len(r.output) == len(r.logprobs) for r in finished.values())
    assert {r.finish["type"] for r in finished.values()} == {"abort"}
    assert bench.collect(1)["late"].finish["type"] == "length"


def test_flush_refuses_while_requests_wait(bench):
    bench.engine.pause("retract").result(60)
    bench.engine.submit([make_request("w", PROMPTS[0], 3)])
    assert bench.engine.flush().result(60) is False
    bench.engine.resume().result(60)
    bench.collect(1)
    assert bench.engine.flush().result(60) is True


def test_steady_state_compiles_nothing(bench, model):
    """Mixed lengths, temperatures and stops, reuse, copies, an abort, a weight update and a retraction."""
    state = nnx.state(model, nnx.Param)
    before = bench.engine.compilations.total
    assert before > 0
    for size in (1, 3, 8):
        requests = [make_request(f"{size}-{i}", PROMPTS[i], 3 + 4 * i, i % 2, i, [i]) for i in range(size)]
        bench.engine.submit(requests)
        bench.engine.pause("retract").result(60)
        bench.engine.update(state, "default").result(60)
        bench.engine.resume().result(60)
        finished = bench.collect(size)
        bench.run(*[make_request(f"n{r.rid}", [*r.sequence().tolist(), 3], 2) for r in finished.values()])
        bench.run(make_request("fork", [*PROMPTS[size - 1][:4], 2, 2], 2))
        bench.run(make_scored("scored", PROMPTS[size - 1], size))
    assert bench.engine.compilations.total == before


@pytest.mark.parametrize("rows", [1, 4])
def test_programs_in_bfloat16_copy_no_matrix(rows):
    """XLA on a CPU likes to turn bfloat16 weights to float32 first, in every dispatch: most of its time, with a real model."""
    spec = replace(SPEC, vocab_size=4096, hidden_size=64)
    params = hf.stored(hf.random_state(spec), "bfloat16")
    shape = EngineShape(rows, rows, 16, 4, 1, 4, (16,))
    programs = Programs(hf.build_stored(spec, params, "bfloat16"), shape)
    row, tokens = np.zeros(rows, np.int32), np.zeros(4, np.int32)
    decode = DecodeRows(row, row, row, row, row.astype(np.uint32), row.astype(np.float32), np.zeros((rows, STOPS), np.int32))
    lowered = [
        programs._decode.lower(params, programs.cache, decode, np.int32(1), 16),
        programs._score.lower(params, programs.cache, np.int32(0), tokens, tokens, tokens),
    ]
    for program in lowered:
        assert program.compile().memory_analysis().temp_size_in_bytes < spec.vocab_size * spec.hidden_size * 4
