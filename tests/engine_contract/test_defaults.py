"""What a request says wins over what a server was started with: an engine whose own defaults would change every distribution,
by its arguments and by its model's generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from actors.engines import NEUTRAL
from tests.engine_contract.conftest import END, Models, Served, ids_of, logprobs_of, make_model, served_by

PREFERRED = {  # min_new_tokens and stop need a tokenizer, which servers are started without
    "top_p": 0.01,
    "top_k": 1,
    "min_p": 0.9,
    "frequency_penalty": 2.0,
    "presence_penalty": 2.0,
    "repetition_penalty": 2.0,
    "ignore_eos": True,
    "logit_bias": {"5": 100.0},
}
GENERATION = {"do_sample": True, "top_p": 0.01, "top_k": 1, "min_p": 0.9, "repetition_penalty": 2.0, "temperature": 0.1}
PROMPT = np.random.default_rng(5).integers(0, 1000, 20).tolist()
DRAWS = 12


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def opinionated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine with weights A, and with opinions (the embedded one takes none as arguments)."""
    model = make_model(tmp_path_factory.mktemp("opinionated") / "a", 0)
    (model / "generation_config.json").write_text(json.dumps(GENERATION | {"eos_token_id": END}))
    arguments = ("--preferred-sampling-params", json.dumps(PREFERRED)) if request.param == "sglang" else ()
    with served_by(request.param, model, tmp_path_factory.mktemp("engine"), *arguments) as served:
        served.api.pause()  # as the learner does: SGLang's own look at its health may still be running
        served.api.update_weights(model, 1)
        served.api.resume()
        yield served


def differences(answer: dict, models: Models) -> np.ndarray:
    truth = models.truth["1"].logprobs([(PROMPT, ids_of(answer))], 1.0)[0]
    return np.abs(logprobs_of(answer) - truth)


def test_every_field_that_is_said_wins(opinionated: Served, models: Models) -> None:
    answers = [opinionated.generate(PROMPT, new=8, **NEUTRAL) for _ in range(DRAWS)]
    assert max(differences(answer, models).max() for answer in answers) < 1e-4
    assert len({ids_of(answer)[0] for answer in answers}) > DRAWS // 2  # not the likeliest each time
    likeliest = ids_of(opinionated.generate(PROMPT, new=1, **{**NEUTRAL, "temperature": 0.0}))[0]
    ended = opinionated.generate(PROMPT, new=8, **{**NEUTRAL, "temperature": 0.0, "stop_token_ids": [likeliest]})
    assert ids_of(ended) == [likeliest]  # stop tokens are neither ignored nor put off


def test_without_a_word_the_server_decides(opinionated: Served) -> None:
    """Else the test above would show nothing."""
    if opinionated.name == "embedded":
        pytest.skip("the embedded engine has no defaults of its own")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    answers = [opinionated.call("/generate", body)[1] for _ in range(2)]
    assert [ids_of(answer) for answer in answers] == [[5] * 4] * 2  # logit_bias
