"""The whole system as its users start it: `tools/launch.py` on configs/tiny.toml, in a folder of its own."""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common.cli import load
from common.wire import Tls
from learner.checkpoints import committed_steps
from learner.metrics import read_metrics
from learner.runfolder import read_trajectories
from tools.launching.view import ask

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tiny.toml"
DEADLINE_S = 240.0  # only keeps a broken test from hanging
WARM_ROLLOUTS = 3 * 8  # of tiny.toml
OUTCOMES = ("trained", "filtered", "stale", "failed", "cancelled")


@dataclass
class Launched:
    """Launchers of one run, one after the other."""

    folder: Path
    root: Path = REPOSITORY  # its packages are the programs
    config: Path = TINY
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def run(self) -> Path:
        return self.runs / self.config.stem

    # ---- launchers -----------------------------------------------------------------------------------------

    def start(self, verb: str, *arguments: str) -> None:
        target = str(self.config) if verb == "local" else self.run.name
        command = [sys.executable, str(self.root / "tools" / "launch.py"), verb, target, "--runs", str(self.runs), *arguments]
        with (self.folder / f"launcher-{len(self.launchers)}.txt").open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(process)

    def finish(self) -> tuple[int, str]:
        """Exit status and output of the newest launcher."""
        code = self.launchers[-1].wait(DEADLINE_S)
        return code, self.output()

    def launch(self, verb: str, *arguments: str) -> tuple[int, str]:
        self.start(verb, *arguments)
        return self.finish()

    def output(self) -> str:
        return (self.folder / f"launcher-{len(self.launchers) - 1}.txt").read_text()

    def until(self, condition, what: str) -> None:
        """Wait while the launcher is alive."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.launchers[-1].poll() is None, f"the launcher ended before {what}:\n{self.output()}"
            assert time.monotonic() < end, f"waited in vain for {what}:\n{self.output()}"
            time.sleep(0.02)

    # ---- processes -----------------------------------------------------------------------------------------

    def alive(self) -> list[psutil.Process]:
        """Every process of this folder; all their command lines name it."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            ours = any(str(self.folder) in word for word in process.info["cmdline"] or [])
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def pids(self, name: str) -> list[int]:
        """Of every start of a process, in order."""
        return [event["pid"] for event in self.launch_events("started") if event["process"] == name]

    def kill_everything(self) -> None:
        """kill -9 of the launcher and all that it started."""
        everything = [psutil.Process(self.launchers[-1].pid), *psutil.Process(self.launchers[-1].pid).children(recursive=True)]
        for process in everything:
            process.kill()
        self.launchers[-1].wait()
        psutil.wait_procs(everything, timeout=DEADLINE_S)

    def close(self) -> None:
        """End what a failed test left running."""
        for process in self.alive():
            process.kill()
        for launcher in self.launchers:
            launcher.wait()

    # ---- the run's folder ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The learner's report; {} while it does not answer."""
        addresses = self.run / "addresses.json"
        return (ask(json.loads(addresses.read_text())["learner"], Tls()) if addresses.exists() else None) or {}

    def update(self) -> int:
        """RL updates so far."""
        report = self.status()
        return report["update"] if report.get("phase") == "rl" else 0

    def launch_events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "launch_events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def checkpoints(self) -> list[int]:
        if not (self.run / "config.toml").exists():
            return []
        warm = load(self.run / "config.toml").warm.updates
        return [step - warm for step in committed_steps(self.run / "checkpoints") if step >= warm]

    def trained(self) -> list[dict[str, Any]]:
        """Rows of all trajectory files that still count, in the order of updates."""
        files = [path for path in (self.run / "trajectories").glob("*.parquet") if path.stem.isdigit()]
        return [row for path in sorted(files, key=lambda path: int(path.stem)) for row, _ in read_trajectories(path)]

    def history(self, updates: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
        """Summary, rows of trained rollouts, and metrics: what one unbroken life of so many updates leaves."""
        summary, rows, metrics = self.summary(), self.trained(), read_metrics(self.run)
        assert summary["updates"] == updates
        assert balanced(summary["rollouts"])
        assert [line["update"] for line in metrics] == list(range(1, updates + 1))
        assert len({row["rollout_id"] for row in rows}) == len(rows)  # nothing was trained twice
        assert summary["tokens"]["trained"] == sum(line["trained_tokens"] for line in metrics)
        return summary, rows, metrics


def balanced(rollouts: dict[str, int]) -> bool:
    return rollouts["dispatched"] == sum(rollouts[outcome] for outcome in OUTCOMES)


def ordinal(group_id: str) -> int:
    """Of a training group's dispatch, whichever incarnation of the learner made it."""
    match = re.fullmatch(r"\d+-g(\d+)", group_id)
    assert match, group_id
    return int(match[1])
