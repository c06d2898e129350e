"""Bad input: one clear line with the fix, exit status 2, nothing started."""

import ast
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from common.cli import dump_toml, load
from common.config import RunConfig
from envserver.domains import DOMAINS, Row
from tests.launch.stage import REPOSITORY
from tools.launching import preflight, runs


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


def test_a_configuration_that_is_not_utf8(stage):
    stage.config.write_bytes(b'name = "\xff"\n')
    refused(stage, stage.call_local(), "demo.toml: not UTF-8")


def test_runs_that_is_a_file(stage):
    (stage.folder / "runs").write_text("")
    refused(stage, stage.call_local(), "runs/demo cannot be made", "--runs")


def test_a_missing_extra():
    (line,) = preflight.missing_packages({"learner": ("json", "no_such_package", "no_such_parent.package"), "actors": ("json",)})
    assert line.startswith("no_such_package, no_such_parent.package missing in ")
    assert line.endswith(': run `make setup`, or pip install -e ".[learner]"')


def test_every_package_of_the_extras_is_looked_for():
    """Those that a program imports at its start, found in the sources: without one it would die with a traceback."""
    ours = {"common", "learner", "actors", *sys.stdlib_module_names}
    always = {"google", "grpc", "grpc_health", "grpc_reflection", "numpy", "pydantic"}  # of the distribution itself
    for extra, packages in preflight.EXTRAS.items():
        found = set()
        for path in (REPOSITORY / extra).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {name.name for name in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module)
        wanted = {name.partition(".")[0] for name in found} - ours - always
        assert wanted == {package.partition(".")[0] for package in packages}


def test_certificates_that_are_none(stage):
    for name in ("cert", "key", "ca"):
        (stage.folder / f"{name}.pem").write_text("no certificate")
    options = [f"--tls.{name}={name}.pem" for name in ("cert", "key", "ca")]
    refused(stage, stage.call_local(*options), "tls.cert, tls.key and tls.ca must be PEM files")
    refused(stage, stage.call_local(*options, "--tls.ca=no.pem"), "tls.ca = ", "no such file")


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
    refused(
        stage,
        stage.call_local("--engine.kind=sglang", "--engine.python=/no/python"),
        "engine.python = '/no/python': no such file",
    )
    refused(stage, stage.call_local("--engine.kind=sglang", f"--engine.python={sys.executable}"), "no sglang in its environment")


def test_a_router_that_is_not_installed(stage):
    refused(stage, stage.call_local("--engine.router=true"), "no sglang_router in this Python", "--engine.router_python=")
    router = ("--engine.router=true", "--engine.router_python=/no/python")
    refused(stage, stage.call_local(*router), "engine.router_python = '/no/python': no such file")
    router = ("--engine.router=true", f"--engine.router_python={sys.executable}")
    refused(stage, stage.call_local(*router), "no sglang_router in the environment of engine.router_python")


@pytest.mark.parametrize("key", ["learner.port", "engine.port"])
def test_a_busy_port(stage, key):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(stage, stage.call_local(f"--{key}={port}"), f"{key}: port {port} on 127.0.0.1 is busy", f"--{key}=0")


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ("{", "tasks.jsonl:1: not JSON"),
        ("[" * 100_000, "tasks.jsonl:1: nested too deeply"),
        (None, "tasks.jsonl: [Errno 2] No such"),
    ],
)
def test_a_task_file_that_cannot_be_read(stage, tasks, says):
    if tasks:
        (stage.folder / "tasks.jsonl").write_text(tasks)
    refused(stage, stage.call_local('--domains.0.options={tasks_file = "tasks.jsonl"}'), "domains.0: ", says)
    assert not stage.run.exists()


def test_words_about_memory_that_cannot_be_read(stage):
    ended = stage.call_local("--domains.0.memory=task", "--domains.0.memory_instructions=words.txt")
    refused(stage, ended, "domains.0: domains.frozenlake.memory_instructions: cannot read ", "words.txt: No such file")
    assert not stage.run.exists()


def test_options_that_the_domain_does_not_know(stage):
    refused(stage, stage.call_local("--domains.0.options.sise=4"), "domains.0: domain 'frozenlake': unknown option 'sise'")
    assert not stage.run.exists()


def test_a_warm_start_without_references(stage, monkeypatch):
    class Blind(DOMAINS["frozenlake"].load({}, "").__class__):
        has_reference, template = False, "Go."

    monkeypatch.setitem(DOMAINS, "frozenlake", Row(Blind))
    refused(stage, stage.call_local("--warm.updates=3"), "warm.updates = 3: domain 'frozenlake' has no reference solutions")


def test_a_tokenizer_that_is_not_json(stage):
    (stage.folder / "tokenizer" / "tokenizer.json").write_text("{bad")
    refused(stage, stage.call_local(), "tokenizer.json: not JSON: ")


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path):
    (tmp_path / "pydantic.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, str(REPOSITORY / "tools" / "launch.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with interrupts(), subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
        assert process.stderr.read() == ""


@contextlib.contextmanager
def interrupts():
    """Children take SIGINT, whatever these tests were started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_port_is_chosen_twice():
    """As many ports as programs: a configured one of them is no choice for the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    wanted = range(first, first + 40)
    for _ in range(20):
        addresses = preflight.choose_addresses(
            RunConfig.model_validate(
                {
                    "domains": [{"name": "frozenlake", "replicas": 12}],
                    "engine": {"count": 12},
                    "cross_policy": {"engines": 3},
                    "learner": {"port": first + 7},
                    "weights": {"transport": "relay"},
                }
            ),
            wanted,
        )
        ports = [addresses.learner, *addresses.envs["frozenlake"], *(e.url.removeprefix("http://") for e in addresses.engines)]
        ports += [addresses.weights, addresses.relays[0].url.removeprefix("http://")]
        assert len(set(ports)) == 27
        assert [engine.pool for engine in addresses.engines] == ["main"] * 9 + ["stale"] * 3


def test_an_address_that_is_not_ours(stage):
    refused(stage, stage.call_local("--host=192.0.2.1"), "192.0.2.1")
    assert not stage.run.exists()


def test_an_existing_run(stage):
    stage.run.mkdir(parents=True)
    refused(stage, stage.call_local(), "runs/demo exists; it has no checkpoint to resume: add --overwrite")


def test_an_existing_run_with_a_checkpoint(ended_run):
    refused(ended_run, ended_run.call_local(), "runs/demo exists; resume it, add --overwrite")


def test_a_folder_that_cannot_be_written(ended_run):
    (ended_run.run / "launcher.lock").mkdir()  # as good as a read-only disk: the lock cannot be opened
    for verb in ("resume", "eval"):
        refused(ended_run, ended_run.call(verb, "demo"), "launcher.lock: Is a directory; runs need a folder with room")


def test_a_python_without_anything():
    """`-S` leaves out installed packages."""
    command = [sys.executable, "-S", "-E", str(REPOSITORY / "tools" / "launch.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("polyturn: error: pydantic missing in ")
    assert done.stderr.count("\n") == 1


def test_overwrite_removes_a_run_and_nothing_else(stage):
    stage.run.mkdir(parents=True)
    (stage.run / "thesis.txt").write_text("")
    refused(stage, stage.call_local("--overwrite"), "is not a run's folder")
    (stage.run / "config.toml").write_text("")  # many programs have one
    refused(stage, stage.call_local("--overwrite"), "is not a run's folder")
    (stage.run / "launcher.lock").write_text("")
    stage.run.rename(stage.folder / "big")
    stage.run.symlink_to(stage.folder / "big")
    refused(stage, stage.call_local("--overwrite"), "is a symbolic link: --overwrite does not remove it")
    stage.run.unlink()
    (stage.folder / "big").rename(stage.run)
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


def test_resume_leaves_the_configuration_as_it_is(ended_run):
    """Written anew, it would be lost with a full disk."""
    path = ended_run.run / "config.toml"
    path.write_text(path.read_text() + "# as it was\n")
    assert ended_run.launch("resume", "runs/demo").code == 0
    assert path.read_text().endswith("# as it was\n")


def test_a_file_of_tasks_is_looked_up_where_the_user_is(stage):
    (stage.folder / "tasks.jsonl").write_text("")
    with contextlib.chdir(stage.folder):
        config = preflight.resolve_paths(load(stage.config, ['--domains.0.options={tasks_file = "tasks.jsonl"}']), [stage.folder])
    assert config.domains[0].options == {"tasks_file": str(stage.folder / "tasks.jsonl")}


def test_words_about_memory_are_looked_up_where_the_user_is(stage):
    (stage.folder / "words.txt").write_text("")
    overrides = ["--domains.0.memory=rollout", "--domains.0.memory_instructions=words.txt"]
    config = preflight.resolve_paths(load(stage.config, overrides), [stage.folder])
    assert config.domains[0].memory_instructions == str(stage.folder / "words.txt")


def test_a_reference_is_looked_up_where_the_user_is(stage):
    """The run's and a domain's."""
    (stage.folder / "reference").mkdir()
    whole = ["--algorithm.kl.where=loss", "--algorithm.kl.reference=reference"]
    for place in ("", "domains.0."):
        overrides = [f"--{place}{override.removeprefix('--')}" for override in whole]
        config = preflight.resolve_paths(load(stage.config, overrides), [stage.folder])
        (algorithm,) = config.algorithms.values()
        assert algorithm.kl.reference == str(stage.folder / "reference")


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
    ended = ended_run.launch("eval", "demo", "--tasks", "64", "--mode", "sampled", "--samples", "4")
    assert ended.code == 0
    arguments = ["--run", str(ended_run.run), "--eval", "--tasks", "64", "--mode", "sampled", "--samples", "4"]
    assert ended_run.started("learner")[0]["argv"] == arguments
    assert "eval eval: frozenlake 0.750 [0.600, 0.800] sampled, n 64, version 3" in ended.out


def test_eval_refuses_what_it_cannot_do(ended_run):
    refused(ended_run, ended_run.call("eval", "demo", "--mode", "best"), "best", "greedy")
    refused(ended_run, ended_run.call("eval", "demo", "--samples", "4"), "--samples 4 is for mode sampled")
    refused(ended_run, ended_run.call("eval", "demo", "--samples", "-1", "--mode", "sampled"), "--samples -1: ask for 1")
    refused(ended_run, ended_run.call("eval", "demo", "--tasks", "999"), "--tasks 999: domain frozenlake has 128")
    refused(ended_run, ended_run.call("eval", "demo", "--tasks", "-5"), "--tasks -5: ", "ask for 1 to as many")


def test_looking_at_a_run_takes_nothing_from_it(stage):
    """Neither the lock from who wants it at that moment nor the process id that stands in it."""
    stage.run.mkdir(parents=True)
    lock = runs.Lock(stage.run)
    lock.take()
    assert runs.is_running(stage.run)
    held = (stage.run / "launcher.lock").read_text()
    lock.free()
    assert not runs.is_running(stage.run)
    assert (stage.run / "launcher.lock").read_text() == held == str(os.getpid())
    with (stage.run / "launcher.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.05, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        lock.take()
        lock.free()


def test_the_newest_checkpoint_in_words(stage):
    config = load(stage.config, ["--warm.updates=60"])
    assert runs.newest_checkpoint(stage.run, config) == ""
    for step, words in ((40, "warm update 40"), (60, "update 0"), (72, "update 12")):
        (stage.run / "checkpoints" / str(step)).mkdir(parents=True)
        (stage.run / "checkpoints" / str(step) / "commit_success.txt").touch()
        assert runs.newest_checkpoint(stage.run, config) == words


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
