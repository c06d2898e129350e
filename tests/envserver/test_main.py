"""The process: it serves, ends on SIGTERM, and says in one line what is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common import wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from envserver.__main__ import main

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_folder(tmp_path, domain="frozenlake", extra="", addresses=None):
    (tmp_path / "config.toml").write_text(
        f'[eval]\ntasks = 4\n[[domains]]\nname = "{domain}"\ntrain_tasks = 16\nheldout_tasks = 8\n{extra}\n'
    )
    port = free_port()
    envs = {domain: [f"127.0.0.1:{port}"]} if addresses is None else addresses
    (tmp_path / "addresses.json").write_text(json.dumps({"learner": "127.0.0.1:1", "engines": [], "envs": envs}))
    return port


def start(tmp_path):
    command = [sys.executable, "-m", "envserver", "--run", str(tmp_path), "--domain", "frozenlake", "--replica", "0"]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_it_serves_and_ends_on_sigterm(tmp_path):
    port = run_folder(tmp_path)
    process = start(tmp_path)
    try:
        with wire.channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.EnvServiceStub(channel)
            described = stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60)
            assert (described.domain, described.splits["train"].tasks, described.splits["heldout"].tasks) == ("frozenlake", 16, 8)
            assert len(stub.ListTasks(pb.ListTasksRequest(split="heldout")).tasks) == 8
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"INFO serving frozenlake on port {port}" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("folder", "arguments", "words"),
    [
        ({"extra": "options = {siz = 4}"}, {}, "unknown option 'siz'; did you mean 'size'?"),
        ({"extra": 'options = {tasks_file = "TMP/tasks.jsonl"}'}, {}, "tasks.jsonl:1: not JSON: "),
        ({"extra": "leases = 3"}, {}, "unknown key domains.0.leases; did you mean 'lease_s'?"),
        ({"domain": "frozen"}, {"domain": "frozen"}, "unknown domain 'frozen'; known domains: arithmetic, frozenlake"),
        ({}, {"domain": "chess"}, "domain 'chess' is not in this run's config; it has: frozenlake"),
        ({}, {"replica": 1}, "replica 1 of domain 'frozenlake'"),
        ({"extra": "[tls]\ncert = 'no.pem'\nkey = 'no.pem'\nca = 'no.pem'"}, {}, "No such file or directory: 'no.pem'"),
        ({"addresses": {}}, {}, "no addresses for domain 'frozenlake'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(tmp_path, capsys, folder, arguments, words):
    (tmp_path / "tasks.jsonl").write_text("{\n")
    run_folder(
        tmp_path, **{key: value.replace("TMP", str(tmp_path)) if key == "extra" else value for key, value in folder.items()}
    )
    arguments = {"domain": "frozenlake", "replica": 0} | arguments
    status = main(["--run", str(tmp_path), "--domain", arguments["domain"], "--replica", str(arguments["replica"])])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("polyturn: error: ")
    assert words in line


def test_a_busy_port_is_one_line_and_status_2(tmp_path):
    port = run_folder(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = start(tmp_path)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith(f"polyturn: error: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in errors


def test_importing_the_package_imports_no_domain():
    code = "import sys, envserver.server, envserver.domains; print({'gymnasium', 'reasoning_gym', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
