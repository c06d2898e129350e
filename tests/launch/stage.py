"""A stage for launcher tests: a configuration, a script for the fake processes, and the launcher as a real process."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests import processes
from tools.launch import main

REPOSITORY = Path(__file__).parents[2]
RUN_FAKE = Path(__file__).with_name("run_fake.py")
FAKES = Path(__file__).with_name("fakes")
DEADLINE_S = 60.0
until = partial(processes.until, seconds=DEADLINE_S)

CONFIG = """
name = "demo"
model = {{ tokenizer = "{tokenizer}" }}
[[domains]]
name = "frozenlake"
[engine]
{engine}
[learner]
updates = 30
"""


@dataclass
class Stage:
    folder: Path
    script: dict[str, list[str]] = field(default_factory=dict)
    engine: str = ""  # lines of the [engine] table

    def __post_init__(self) -> None:
        tokenizer = self.folder / "tokenizer"
        tokenizer.mkdir()
        ended = {"id": 3, "content": "<|im_end|>"}
        (tokenizer / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [ended]})
        )
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        self.config = self.folder / "demo.toml"
        self.config.write_text(CONFIG.format(tokenizer=tokenizer, engine=self.engine))
        self.launchers: list[subprocess.Popen[str]] = []
        self.play(self.script)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "demo"

    def play(self, script: dict[str, list[str]]) -> None:
        (self.folder / "script.json").write_text(json.dumps(script))
        (self.folder / "starts.jsonl").unlink(missing_ok=True)

    def in_terminal(self, *arguments: str) -> "subprocess.Popen[str]":
        """The launcher in a terminal of its own: stdin is what is typed, stdout what is shown, then how it left the terminal."""
        program = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]
        shell = ["sh", "-c", 'trap : INT; "$@"; echo "status $?"; stty -a', "sh"]
        return self.start(*arguments, stdin=subprocess.PIPE, before=[*program, *shell])

    def start(
        self,
        *arguments: str,
        stdout: int = subprocess.PIPE,
        stdin: int = subprocess.DEVNULL,
        before: Sequence[str] = (),
    ) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "TERM": "xterm",
            "COLUMNS": "160",
            "SCRIPT": str(self.folder / "script.json"),
            "PYTHONPATH": str(REPOSITORY),
        }
        process = subprocess.Popen(
            [*before, sys.executable, str(RUN_FAKE), *arguments],
            cwd=self.folder,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.launchers.append(process)
        return process

    def close(self) -> None:
        """End what a failed test left running; then nothing may be alive."""
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
                process.communicate()
        until(lambda: not self.alive(), "every program to end")

    def call(self, *arguments: str) -> "Ended":
        """The launcher in this process: for what is refused before anything starts."""
        with contextlib.chdir(self.folder), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(list(arguments), root=FAKES)
        return Ended(code, out.getvalue(), err.getvalue())

    def call_local(self, *arguments: str) -> "Ended":
        return self.call("local", str(self.config), *arguments)

    def launch(self, *arguments: str) -> "Ended":
        return self.finish(self.start(*arguments))

    def local(self, *arguments: str) -> "Ended":
        return self.launch("local", str(self.config), *arguments)

    def finish(self, process: "subprocess.Popen[str]") -> "Ended":
        out, err = process.communicate(timeout=DEADLINE_S)
        return Ended(process.returncode, out, err)

    def starts(self) -> list[dict]:
        path = self.folder / "starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def started(self, name: str) -> list[dict]:
        return [start for start in self.starts() if start["name"] == name]

    def wait_started(self, *names: str) -> None:
        until(lambda: all(self.started(name) for name in names), f"{names} to start")

    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "launch_events.jsonl").read_text().splitlines()]

    def alive(self) -> list[str]:
        """Everything that this stage's programs left running: the fakes and their children."""
        pids = {start["pid"] for start in self.starts()} | {start["child"] for start in self.starts()} - {0}
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            words = process.info["cmdline"] or []
            ours = process.info["pid"] in pids and ("sleep" in words or any("python" in word for word in words))
            if (ours or any(str(self.folder) in word for word in words)) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
        return found


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
