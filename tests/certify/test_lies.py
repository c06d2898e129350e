"""Engines that lie: the certificate is refused, and the right row says why."""

from __future__ import annotations

import time

import pytest

from tests.certify import liars

LOGPROBS = {"logprobs: temperature 1", "logprobs: temperature 0.7"}
CONTINUATION = "non-canonical: continuation"
COUNTS = "counts: ids and logprobs"

LIES = [  # the lie, the rows that fail, words of their reasons
    (liars.DropsEndToken, {"stops: stop id", "stops: end token"}, "the id that ends the turn is missing"),
    (liars.NamesAnotherStop, {"stops: stop id", "stops: end token"}, "finish stop says matched 0"),
    (liars.IgnoresStops, {"stops: stop id"}, "it went on behind the stop id"),
    (liars.RawLogprobs, {"logprobs: temperature 0.7"}, "they are raw, the temperature is ignored"),
    (liars.OneLogprobTooFew, {COUNTS}, "8 output_ids, 7 logprobs"),
    (liars.ShiftedLogprobs, {*LOGPROBS, CONTINUATION}, "they are not the learner's"),
    (liars.EncodesPromptsAgainAndHidesIt, {CONTINUATION}, "the logprobs are those of the tokenizer's spelling"),
    (liars.CountsOneMore, {COUNTS}, "8 output_ids, completion_tokens says 9"),
    (
        liars.CountsAPromptTokenMore,
        {"prefix: sampled turns", "non-canonical: prompt", COUNTS},
        "26 ids were sent, the engine counts 27",
    ),
    (liars.SamplesPadding, {"counts: sampled ids"}, "sampled [1024], which the tokenizer does not have (0..1023)"),
    (liars.VersionsStopShort, {"versions: of each token"}, "do not cover"),
    (liars.TellsNoVersions, {"versions: of each token"}, "no weight_versions"),
]


@pytest.mark.parametrize(("lie", "failed", "words"), LIES, ids=[lie.__name__ for lie, _, _ in LIES])
def test_a_lie_fails_its_rows_and_no_others(lie, failed, words, model, engine, codec, certified) -> None:
    with lie(engine, codec) as liar:
        found = certified(model, liar.url)
    assert (found.status, found.named("FAIL")) == (1, failed)
    assert any(words in found.rows[check]["reason"] for check in failed), [found.rows[check] for check in failed]
    assert "NOT certified" in found.out


@pytest.mark.parametrize(
    ("lie", "least"),
    [
        (liars.EncodesSamplesAgain, {*LOGPROBS, CONTINUATION, "stops: length"}),
        (
            liars.EncodesPromptsAgain,
            {"prefix: sampled turns", "non-canonical: prompt", "non-canonical: echo", COUNTS, CONTINUATION},
        ),
        (liars.CutsEarly, {"stops: length"}),
        (liars.CallsEverythingAStop, {"stops: length", "stops: one token"}),
    ],
)
def test_a_lie_that_shows_in_many_places(lie, least, model, engine, codec, certified) -> None:
    with lie(engine, codec) as liar:
        found = certified(model, liar.url)
    assert found.status == 1
    assert least <= found.named("FAIL")


def test_an_engine_that_lists_no_prompts_is_certified_without_that_row(model, engine, codec, certified) -> None:
    with liars.ListsNoPrompts(engine, codec) as liar:
        found = certified(model, liar.url)
    assert (found.status, found.named("not run")) == (0, {"non-canonical: echo"})
    assert "leave logprob_start_len out" in found.rows["non-canonical: echo"]["reason"]


def test_rows_without_usable_samples_are_not_run_and_refuse_the_certificate(model, engine, codec, certified) -> None:
    with liars.OneLogprobTooFew(engine, codec) as liar:
        found = certified(model, liar.url)
    assert {*LOGPROBS, CONTINUATION} <= found.named("not run")
    assert all(found.rows[check]["required"] for check in (*LOGPROBS, CONTINUATION))


def test_an_engine_that_breaks_down_is_a_row(model, engine, codec, certified) -> None:
    with liars.AnswersNothing(engine, codec) as liar:
        found = certified(model, liar.url)
    assert found.status == 1
    assert "HTTP 500: out of memory" in found.rows["stops: stop id"]["reason"]
    assert "HTTP 500: out of memory" in found.rows["logprobs: temperature 1"]["reason"]


def test_an_engine_that_falls_silent_takes_no_longer_than_allowed(model, engine, codec, certified) -> None:
    begun = time.monotonic()
    with liars.Silent(engine, codec) as liar:
        found = certified(model, liar.url, "--timeout", "1")
    assert found.status == 1
    assert time.monotonic() - begun < 10
    assert found.rows["stops: stop id"]["reason"] == "the time of --timeout is over"
    assert found.rows["stops: stop id"]["verdict"] == "not run"
    assert found.rows["stops: stop id"]["required"]


def test_stock_sglangs_answers_are_read(model, engine, codec, certified) -> None:
    """Its shapes, as captured from 0.5.23; the engine behind them is the embedded one."""
    with liars.Sglang(engine, codec) as server:
        found = certified(model, server.url)
    assert found.status == 0
    assert found.named("not run") == set()
    assert found.rows["non-canonical: echo"]["evidence"] == "the engine lists 53 input ids, 53 were sent"
    assert "as 32 ids, this tokenizer as 32" in found.rows["identity: tokenizer"]["evidence"]


def test_a_policy_that_ends_its_turns_early_is_cut_earlier(model, engine, codec, certified) -> None:
    with liars.EndsEarly(engine, codec) as server:
        found = certified(model, server.url, "--skip-logprobs")
    assert "ids [3] of 3 asked for" in found.rows["stops: length"]["evidence"]
    assert found.rows["stops: length"]["verdict"] == "pass"


def test_an_engine_that_reads_the_same_tokenizer_file_its_own_way_is_told(model, engine, codec, certified) -> None:
    """Seen in SGLang, where tokenizer_class named a class with rules of its own. Actors send ids: nothing depends on it."""
    with liars.SglangWithAnotherTokenizer(engine, codec) as server:
        found = certified(model, server.url, "--skip-logprobs")
    row = found.rows["identity: tokenizer"]
    assert (found.status, row["verdict"]) == (0, "info")
    assert "from the same file: see its tokenizer_class" in row["evidence"]


@pytest.mark.parametrize(
    ("lie", "status", "failed"),
    [
        (liars.SglangWithoutVersions, 0, set()),
        (liars.SglangEchoesOtherIds, 1, {"non-canonical: echo"}),
        (liars.SglangElsewhereWithAnotherTokenizer, 1, {"identity: tokenizer"}),
    ],
)
def test_what_only_sglang_can_get_wrong(lie, status, failed, model, engine, codec, certified) -> None:
    with lie(engine, codec) as server:
        found = certified(model, server.url, "--skip-logprobs")
    assert (found.status, found.named("FAIL")) == (status, failed)
