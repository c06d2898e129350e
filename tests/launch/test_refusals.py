"""Bad input: one clear line with the fix, exit status 2, nothing started."""

import json
import socket
import subprocess
import sys

import pytest

from common.cli import dump_toml, load
from tests.launch.stage import REPOSITORY


def refused(stage, ended, *parts):
    """One line on stderr that holds all `parts`; nothing started."""
    assert ended.code == 2
    assert ended.err.startswith("polyturn: error: ")
    assert ended.err.count("\n") == 1
    for part in parts:
        assert part in ended.err
    assert stage.starts() == []


def test_a_wrong_key(stage):
    refused(stage, stage.call_local("--optimizer.lrr=1"), "unknown key optimizer.lrr; did you mean 'lr'?")
    assert not stage.run.exists()


def test_an_override_before_the_configuration(stage):
    refused(stage, stage.call("local", "--optimizer.lrr=1", str(stage.config)), "unknown key optimizer.lrr")


def test_an_override_without_a_value(stage):
    refused(stage, stage.call_local("--seed"), "'--seed' is not an option; write overrides as --table.key=value")


def test_an_unknown_verb(stage):
    refused(stage, stage.call("locl", str(stage.config)), "'locl'", "'local'")


def test_no_configuration(stage):
    refused(stage, stage.call("local"), "CONFIG")


def test_a_missing_configuration(stage):
    refused(stage, stage.call("local", "nowhere.toml"), "nowhere.toml: no such file")


def test_an_unknown_domain(stage):
    refused(
        stage, stage.local("--domains.0.name=frozenlak"), "domains.0.name: unknown domain 'frozenlak'", "arithmetic, frozenlake"
    )


def test_a_missing_tokenizer(stage):
    refused(stage, stage.call_local("--model.tokenizer=nowhere"), "model.tokenizer = ", "nowhere", "no such folder")


def test_an_empty_tokenizer_folder(stage):
    (stage.folder / "empty").mkdir()
    refused(stage, stage.call_local("--model.tokenizer=empty"), "no tokenizer.json in it")


def test_a_tokenizer_without_its_end_token(stage):
    (stage.folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    refused(stage, stage.call_local(), "eos_token '<end>' is not in the vocabulary")
    assert not stage.run.exists()  # so that the next try needs no --overwrite


def test_a_model_directory_without_weights(stage):
    (stage.folder / "tokenizer" / "config.json").write_text("{}")
    refused(stage, stage.call_local("--model.path=tokenizer"), "model.path = ", "without weights")


def test_sglang_that_is_not_installed(stage):
    refused(stage, stage.call_local("--engine.kind=sglang"), "sglang is not installed", "--engine.kind=embedded")


@pytest.mark.parametrize("key", ["learner.port", "engine.port"])
def test_a_busy_port(stage, key):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(stage, stage.call_local(f"--{key}={port}"), f"{key}: port {port} on 127.0.0.1 is busy", f"--{key}=0")


def test_an_address_that_is_not_ours(stage):
    refused(stage, stage.call_local("--host=192.0.2.1"), "192.0.2.1")
    assert not stage.run.exists()


def test_an_existing_run(stage):
    stage.run.mkdir(parents=True)
    refused(stage, stage.call_local(), "runs/demo exists; resume it, add --overwrite")


def test_overwrite_removes_a_run_and_nothing_else(stage):
    stage.run.mkdir(parents=True)
    (stage.run / "thesis.txt").write_text("")
    refused(stage, stage.call_local("--overwrite"), "is not a run's folder")
    (stage.run / "config.toml").write_text("")
    stage.play({"learner": ["finish"]})
    ended = stage.local("--overwrite")
    assert ended.code == 0
    assert ended.out.startswith(f"removed {stage.run}\n")
    assert not (stage.run / "thesis.txt").exists()


def test_another_folder_for_runs(stage):
    stage.play({"learner": ["finish"]})
    ended = stage.local("--runs", "elsewhere")
    assert ended.code == 0
    assert (stage.folder / "elsewhere" / "demo" / "summary.json").exists()


@pytest.fixture
def ended_run(stage):
    """The folder of a run that was stopped after its first checkpoint."""
    (stage.run / "checkpoints" / "10").mkdir(parents=True)
    (stage.run / "checkpoints" / "10" / "commit_success.txt").touch()
    (stage.run / "config.toml").write_text(dump_toml(load(stage.config)))
    stage.play({"learner": ["finish"]})
    return stage


def test_resume_continues(ended_run):
    ended = ended_run.launch("resume", "runs/demo")
    assert ended.code == 0
    assert ended_run.started("learner")[0]["argv"] == ["--run", str(ended_run.run), "--resume"]


def test_resume_of_a_finished_run(ended_run):
    assert ended_run.launch("resume", "demo").code == 0
    ended_run.play({})
    refused(ended_run, ended_run.call("resume", "demo"), "has made all its 30 updates")


def test_resume_without_a_checkpoint(ended_run):
    (ended_run.run / "checkpoints" / "10" / "commit_success.txt").unlink()  # cut off while it was written
    for verb in ("resume", "eval"):
        refused(ended_run, ended_run.call(verb, "demo"), "has no checkpoint yet (checkpoint.every = 10)")


def test_resume_of_nothing(stage):
    refused(stage, stage.call("resume", "nowhere"), "nowhere: no run there", "none")


def test_resume_takes_no_overrides(ended_run):
    refused(ended_run, ended_run.call("resume", "demo", "--seed=3"), "'--seed=3': a run keeps its configuration")


def test_resume_of_a_running_run(stage):
    stage.play({})
    process = stage.start("local", str(stage.config))
    stage.wait_started("env-frozenlake-0", "engine-0", "learner", "actor-0")
    for arguments in (("resume", "demo"), ("eval", "demo"), ("local", str(stage.config), "--overwrite")):
        ended = stage.call(*arguments)
        assert (ended.code, "is running" in ended.err) == (2, True)
    process.terminate()
    assert stage.finish(process).code == 143


def test_eval_starts_the_learner_in_its_evaluation_mode(ended_run):
    rows = [
        {"phase": "eval", "version": 3, "mode": "sampled", "domain": "frozenlake", "success": 0.75, "n": 64, "ci95": [0.6, 0.8]}
    ]
    ended_run.play({"learner": ["evaluate " + json.dumps(rows)]})
    ended = ended_run.launch("eval", "demo", "--tasks", "64", "--mode", "sampled")
    assert ended.code == 0
    arguments = ["--run", str(ended_run.run), "--eval", "--tasks", "64", "--mode", "sampled"]
    assert ended_run.started("learner")[0]["argv"] == arguments
    assert "eval eval: frozenlake 0.750 [0.600, 0.800] sampled, n 64, version 3" in ended.out


def test_eval_refuses_what_it_cannot_do(ended_run):
    refused(ended_run, ended_run.call("eval", "demo", "--mode", "best"), "best", "greedy")
    refused(ended_run, ended_run.call("eval", "demo", "--tasks", "999"), "--tasks 999: domain frozenlake has 128")


def test_help_names_the_keys_and_imports_nothing_heavy():
    program = (
        "import sys; from tools.launch import main; status = main(['local', '--help']);"
        "heavy = {'jax', 'flax', 'transformers', 'tokenizers', 'grpc', 'rich', 'numpy'} & set(sys.modules);"
        "sys.exit(status or len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--algorithm.group_size=<int>  (default 8)" in done.stdout
    assert "resume RUN" in done.stdout


def test_the_file_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(REPOSITORY / "tools" / "launch.py"), "status", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("polyturn: error: nowhere: no run there")
