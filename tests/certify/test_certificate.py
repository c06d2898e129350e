"""The honest engine, and directories that do not fit it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

from common import keys
from tests.actors.toy import CHATML
from tests.certify import liars
from tests.certify.conftest import REPOSITORY, TINY, make_model
from tests.fakes import FakeEngine

LEARNED = {"logprobs: temperature 1", "logprobs: temperature 0.7", "non-canonical: continuation"}


def test_an_honest_engine_is_certified_with_evidence_in_each_row(model, engine, tmp_path) -> None:
    """As its users start it."""
    command = [sys.executable, "tools/certify.py", str(model), "--engine", engine, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["check"]: row for row in told["rows"]}
    assert told["passed"]
    assert not [check for check, row in rows.items() if row["verdict"] == "not run"]
    assert all(re.search(r"\d", row["evidence"]) for row in rows.values())
    groups = {check.partition(":")[0] for check in rows}
    assert groups >= {
        "identity",
        "template",
        "prefix",
        "injection",
        "non-canonical",
        "utf8",
        "stops",
        "counts",
        "logprobs",
        "versions",
    }
    gap = re.search(
        r"\|Δ\| mean ([\d.e-]+), .* max ([\d.e-]+) if scaled .*; mean ([\d.e-]+)", rows["logprobs: temperature 0.7"]["evidence"]
    )
    assert gap is not None
    assert float(gap[1]) < 1e-5 < float(gap[2]) * 100
    assert float(gap[3]) > 0.1
    assert "1017 after" in rows["stops: end token"]["evidence"]
    assert all(check in done.stdout for check in rows)
    assert "token-exact: 33 pass" in done.stdout


def test_help_comes_at_once() -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "tools/certify.py", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert time.monotonic() - begun < 1
    assert "--skip-logprobs" in done.stdout


# ---- directories -----------------------------------------------------------------------------------------------------


def with_template(folder, template: str):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace("m.content", "(m.content if loop.last or m.role != 'assistant' else '')"), "once each"),
        (CHATML.replace("<|im_end|>", ""), "end token"),
        ("{% for %}", "broken"),
    ],
)
def test_a_template_that_is_not_append_only(template, words, copied, engine, certified) -> None:
    found = certified(with_template(copied, template), engine)
    assert (found.status, found.named("FAIL")) == (1, {"template: append-only"})
    assert words in found.rows["template: append-only"]["reason"]
    assert found.named("not run") >= LEARNED


def test_a_template_that_drops_reasoning_is_told_and_no_failure(copied, engine, certified) -> None:
    dropping = "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' and not loop.last else m.content)"
    found = certified(with_template(copied, CHATML.replace("m.content", dropping)), engine)
    assert found.status == 0
    evidence = found.rows["prefix: reasoning"]["evidence"]
    assert "not prefix-stable at turn 2" in evidence
    assert "was '<think>\\nI add." in evidence
    assert "text equals the template's" in found.rows["prefix: user turns"]["evidence"]


def test_other_weights(engine, tmp_path, certified) -> None:
    found = certified(make_model(tmp_path / "other", seed=1), engine)
    assert (found.status, found.named("FAIL")) == (1, LEARNED)


def test_a_tokenizer_with_other_ids(copied, engine, certified) -> None:
    described = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (copied / "tokenizer.json").write_text(json.dumps(described))
    found = certified(copied, engine)
    assert (found.status, found.named("FAIL")) == (1, {"identity: tokenizer"})
    assert "2 tokens have other ids in the engine's" in found.rows["identity: tokenizer"]["reason"]
    assert "prefix: sampled turns" in found.named("not run")


def test_a_tokenizer_file_in_another_form_is_the_same_tokenizer(copied, engine, certified) -> None:
    (copied / "tokenizer.json").write_text(json.dumps(json.loads((TINY / "tokenizer.json").read_text()), indent=3))
    assert certified(copied, engine, "--skip-logprobs").status == 0


def with_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(copied, engine, certified) -> None:
    found = certified(with_config(copied, vocab_size=1000), engine)
    assert (found.status, found.named("FAIL")) == (1, {"identity: vocabulary"})
    assert "ids 1000..1023 have no row" in found.rows["identity: vocabulary"]["reason"]


def test_another_size_sends_no_id_to_the_engine(copied, engine, codec, certified) -> None:
    """An id outside its vocabulary would end an SGLang server."""
    with liars.AnswersNothing(engine, codec) as server:
        found = certified(with_config(copied, vocab_size=2048), server.url)
    assert (found.status, found.named("FAIL")) == (1, {"identity: model"})
    assert "vocab_size is 1024 in the engine's" in found.rows["identity: model"]["reason"]


def test_an_architecture_that_the_learner_lacks(copied, engine, codec, certified) -> None:
    folder = with_config(copied, model_type="llama", architectures=["LlamaForCausalLM"])
    with liars.Llama(engine, codec) as server:
        found = certified(folder, server.url)
        skipped = certified(folder, server.url, "--skip-logprobs")
    assert (found.status, found.named("FAIL")) == (1, set())
    assert found.named("not run") >= LEARNED
    assert "model_type 'llama'; only 'qwen3' is supported" in found.rows["logprobs: temperature 1"]["reason"]
    assert (skipped.status, skipped.named("FAIL")) == (0, set())


def test_a_runs_chat_table_is_taken(model, engine, tmp_path, certified) -> None:
    (tmp_path / "run.toml").write_text('[[domains]]\nname = "frozenlake"\n[chat]\ntemplate = "raw"\ntools = "react"\n')
    found = certified(model, engine, "--skip-logprobs", "--config", str(tmp_path / "run.toml"))
    assert found.status == 0
    assert "raw layout" in found.rows["template: append-only"]["evidence"]
    assert "one action, not 2" in found.rows["prefix: several answers"]["reason"]
    assert found.rows["injection: tool name"]["verdict"] == "not run"


# ---- wrong input -----------------------------------------------------------------------------------------------------


def refused(found, words: str) -> None:
    assert (found.status, found.out) == (2, "")
    assert re.fullmatch(rf"polyturn: error: .*{words}.*\n", found.error), found.error


def test_engines_that_cannot_be_asked(model, engine, codec, certified) -> None:
    refused(certified(model, "http://127.0.0.1:1"), "http://127.0.0.1:1 cannot be reached .* start it")
    refused(certified(model, "localhost:30000"), "'localhost:30000' is no address")
    with liars.Router(engine, codec) as router:
        refused(certified(model, router.url), "HTTP 404.* not of a router")
    with liars.Starting(engine, codec) as starting:
        refused(certified(model, starting.url), "still starting")


def test_an_engine_that_wants_a_key(model, tmp_path, certified) -> None:
    keys.make(tmp_path)
    with FakeEngine() as engine:
        engine.key = keys.read(tmp_path / keys.NAME)
        refused(certified(model, engine.url), "wants another key; name the engine_key.yaml of its run by --key-file")
        refused(certified(model, engine.url, "--key-file", str(tmp_path / "none")), "none: No such file")
        found = certified(model, engine.url, "--key-file", str(tmp_path / keys.NAME))
        assert found.status == 1  # it is asked, and it is no model
        assert found.rows["stops: length"]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json; name a Hugging Face model directory"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "{}", "has no vocab_size"),
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "{}", "eos_token"),
    ],
)
def test_directories_that_are_no_model(name, text, words, copied, engine, certified) -> None:
    (copied / name).unlink()
    if text is not None:
        (copied / name).write_text(text)
    refused(certified(copied, engine), words)


def test_a_directory_or_a_configuration_that_is_not_there(model, engine, tmp_path, certified) -> None:
    refused(certified(tmp_path / "none", engine), "none is no directory")
    refused(certified(model, engine, "--config", str(tmp_path / "none.toml")), "no such file")


def test_weights_that_are_missing_are_not_scored(copied, engine, certified) -> None:
    (copied / "model.safetensors").unlink()
    found = certified(copied, engine)
    assert (found.status, found.named("FAIL")) == (1, set())
    assert "model.safetensors is missing" in found.rows["logprobs: temperature 1"]["reason"]


def test_options_that_cannot_be_used(model, engine, tmp_path, certified) -> None:
    refused(certified(model, engine, "--timeout", "0"), "--timeout is 0; it must be seconds above 0")
    refused(certified(model, engine, "--json", str(tmp_path / "none" / "rows.json")), "there is no folder .*none; make it first")
