"""Starts a run's programs, restarts those that crash, and leaves none behind.

The learner leads: the run is done when it exits 0, and a stop begins with it. Exit status 2 of any program means
that a restart would not help (it said why): everything stops.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tools.launching.runs import EventLog, checkpoint_steps

LEASH = Path(__file__).with_name("leash.py")
TAIL_LINES = 12
FULL_BYTES = 2**16
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONFIGURATION = 2  # exit status


@dataclass(frozen=True)
class Program:
    name: str  # also names the log
    role: str  # "env", "engine", "router", "relay", "learner" or "actor"
    argv: tuple[str, ...]
    resumes: bool = False  # restarted with --resume when there is a checkpoint


@dataclass(frozen=True)
class Patience:
    """A program that crashes more than `restarts` times in `window_s` ends the run; seconds are bounds of waits."""

    restarts: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.5  # doubles with each crash in the window
    longest_delay_s: float = 10.0
    learner_grace_s: float = 90.0  # a last checkpoint, the summary
    grace_s: float = 15.0
    silence_s: float = 1800.0  # of the learner, before it is taken for dead
    poll_s: float = 0.1


@dataclass(frozen=True)
class Outcome:
    code: int
    reason: str  # "" for a clean end


class View(Protocol):
    def say(self, text: str) -> None: ...
    def refresh(self, states: dict[str, str]) -> None: ...


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0  # where this start's output begins in the log
    start_at: float | None = 0.0  # monotonic seconds; None: not to be started
    started: float = 0.0  # monotonic seconds
    crashes: deque[float] = field(default_factory=deque)  # monotonic seconds
    restarts: int = 0
    fresh_restarts: int = 0  # of the learner without a checkpoint

    @property
    def state(self) -> str:
        if self.process:
            return "running"
        return "ended" if self.start_at is None else "waits to restart"


class Supervisor:
    def __init__(
        self,
        programs: Sequence[Program],
        run: Path,
        root: Path,
        view: View,
        patience: Patience,
        answered: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root` is the folder that the programs run in; its packages are the programs. `answered`: time.monotonic() of the
        learner's newest answer."""
        self._answered = answered
        self._run, self._root, self._view, self._patience = run, root, view, patience
        self._children = [_Child(program) for program in programs]
        self._learner = next(child for child in self._children if child.program.role == "learner")
        self._signals: list[int] = []
        self._events = EventLog(run)
        (run / "logs").mkdir(exist_ok=True)

    @property
    def restarts(self) -> dict[str, int]:
        return {child.program.name: child.restarts for child in self._children if child.restarts}

    def run(self) -> Outcome:
        """Blocks until the run is over, then no process is left. Handles SIGINT, SIGTERM and SIGHUP; call on the main thread
        (a leashed child dies with the thread that started it)."""
        asked = [number for number in STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]  # nohup
        handlers = {number: signal.signal(number, self._on_signal) for number in asked}
        try:
            outcome = self._supervise()
            self._events.add("finished", status=outcome.code, reason=outcome.reason, restarts=self.restarts)
            return outcome
        finally:
            for child in self._children:
                self._kill(child)
            self._events.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _supervise(self) -> Outcome:
        while True:
            if self._signals:
                return self._interrupted()
            outcome = self._tick()
            if outcome:
                if outcome.code == 1:  # given up: what was learned is still worth a checkpoint
                    self._stop([self._learner], self._patience.learner_grace_s)
                self._stop_others()
                return outcome
            time.sleep(self._patience.poll_s)

    def _tick(self) -> Outcome | None:
        now = time.monotonic()
        for child in self._children:
            if child.process is None and child.start_at is not None and now >= child.start_at:
                self._start(child)
            status = self._reap(child)
            outcome = None if status is None else self._ended(child, status)
            if outcome:
                return outcome
        self._end_silence(now)
        self._refresh()
        return None

    def _end_silence(self, now: float) -> None:
        """A learner that is there and never answers is as good as dead: killed, it goes on from its newest checkpoint."""
        learner, limit = self._learner, self._patience.silence_s
        if learner.process and now - max(self._answered(), learner.started) > limit:
            learner.started = now
            self.say(f"learner has not answered for {limit:g} s: killed")
            self._events.add("silent", process=learner.program.name, seconds=limit)
            _send(learner, signal.SIGKILL)

    def _start(self, child: _Child) -> None:
        argv = list(child.program.argv)
        if child.program.resumes and child.restarts and checkpoint_steps(self._run):
            argv.append("--resume")
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv]
        with self._log(child).open("ab") as log:
            child.log_start = log.tell()
            child.process = subprocess.Popen(
                argv,
                cwd=self._root,
                env=child_environment(dict(os.environ), has_accelerator()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )
        child.start_at, child.started = None, time.monotonic()
        self._events.add("started", process=child.program.name, pid=child.process.pid, resume="--resume" in argv)

    def _reap(self, child: _Child) -> int | None:
        """Exit status (negative: a signal) of a child that has ended since the last look; its own children go with it."""
        status = child.process.poll() if child.process else None
        if status is None:
            return None
        self._kill(child)
        why = describe_status(status)
        self._events.add("ended", process=child.program.name, status=status, reason=why)
        return status

    def _ended(self, child: _Child, status: int) -> Outcome | None:
        name = child.program.name
        if status == CONFIGURATION:
            line = complaint(self._log(child), child.log_start)
            if not line:
                self._show_tail(child, f"{name} refused to go on (exit status 2)")
            return Outcome(CONFIGURATION, line or f"{name} refused to go on{self._full()}; see {self._log(child)}")
        if status == 0 and child is self._learner:
            return Outcome(0, "")
        if status == 0 and child.program.role == "actor":
            # It ends when the learner has no more work, and the learner follows. Should it not: try again, unhurried.
            child.start_at = time.monotonic() + self._patience.longest_delay_s
            return None
        return self._crashed(child, status)

    def _crashed(self, child: _Child, status: int) -> Outcome | None:
        now, patience, name = time.monotonic(), self._patience, child.program.name
        while child.crashes and now - child.crashes[0] > patience.window_s:
            child.crashes.popleft()
        child.crashes.append(now)
        what = f"{name} {describe_status(status)}{self._full()}"
        count = len(child.crashes)
        if child.program.resumes and not checkpoint_steps(self._run):
            # A restart from the beginning repeats work, so these are counted over the whole run and never forgotten.
            child.fresh_restarts += 1
            count = max(count, child.fresh_restarts)
        if count > patience.restarts:
            reason = f"{what}, {count} times; see {self._log(child)}"
            self._show_tail(child, what)
            self._events.add("gave_up", process=name, reason=reason)
            return Outcome(1, reason)
        delay = min(patience.first_delay_s * 2 ** (count - 1), patience.longest_delay_s)
        how = self._restart_manner(child)
        self._show_tail(child, f"{what}; restart {count} of {patience.restarts} in {delay:.1f} s{how}")
        child.start_at = now + delay
        child.restarts += 1
        self._events.add("restart", process=name, reason=describe_status(status), delay_s=delay, count=count)
        return None

    def _restart_manner(self, child: _Child) -> str:
        if not child.program.resumes:
            return ""
        return " from the newest checkpoint" if checkpoint_steps(self._run) else " from the beginning: there is no checkpoint yet"

    def _interrupted(self) -> Outcome:
        """The learner first, so that it can still save; a second signal kills."""
        name = signal.Signals(self._signals[0]).name
        self.say(f"{name}: stopping; the learner saves what it has done (again to kill)")
        self._events.add("stopping", reason=name)
        self._stop([self._learner], self._patience.learner_grace_s)
        self._stop_others()
        return Outcome(128 + self._signals[0], f"stopped by {name}")

    def _stop_others(self) -> None:
        self._stop([child for child in self._children if child.process], self._patience.grace_s)

    def _stop(self, children: list[_Child], grace_s: float) -> None:
        """SIGTERM, a bounded wait, SIGKILL."""
        for child in children:
            _send(child, signal.SIGTERM)
        patience_ends = time.monotonic() + grace_s
        while any(child.process for child in children) and time.monotonic() < patience_ends and len(self._signals) < 2:
            for child in self._children:
                self._reap(child)
            self._refresh()
            time.sleep(min(0.05, self._patience.poll_s))
        for child in children:
            if child.process:
                why = "second signal" if len(self._signals) > 1 else f"did not stop in {grace_s:g} s"
                self.say(f"{child.program.name}: {why}: killed")
                self._kill(child)

    def _kill(self, child: _Child) -> None:
        """End the child's whole process group and reap it."""
        process, child.process = child.process, None
        if process is None:
            return
        _kill_group(process.pid)
        process.wait()

    def say(self, text: str) -> None:
        """To the view, as long as somebody reads it."""
        try:
            self._view.say(text)
        except OSError:
            mute()

    def _refresh(self) -> None:
        try:
            self._view.refresh({child.program.name: child.state for child in self._children})
        except OSError:
            mute()

    def _full(self) -> str:
        """A full disk also swallows what a program says about it."""
        return "" if shutil.disk_usage(self._run).free >= FULL_BYTES else f" (the disk of {self._run} is full)"

    def _log(self, child: _Child) -> Path:
        return self._run / "logs" / f"{child.program.name}.log"

    def _show_tail(self, child: _Child, headline: str) -> None:
        lines = tail(self._log(child), child.log_start)
        label = f"last lines of {self._log(child)}:" if lines else f"{self._log(child)} is empty"
        self.say("\n".join([headline, f"  {label}", *(f"  | {line}" for line in lines)]))


def _send(child: _Child, number: signal.Signals) -> None:
    if child.process and child.process.poll() is None:
        child.process.send_signal(number)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: EPERM for a group of zombies)
        os.killpg(leader, signal.SIGKILL)


def mute() -> None:
    """Nobody reads the output any more (`launch.py ... | head`, a closed terminal): the run goes on without it."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def describe_status(status: int) -> str:
    """`exited with status 1`, `was killed by SIGKILL`."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"


def tail(log: Path, start: int = 0, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of what was written to `log` from byte `start` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line[:300] for line in text.splitlines() if line.strip()][-lines:]


def complaint(log: Path, start: int) -> str:
    """The last `polyturn: error: ` line without its mark, or "" when there is none."""
    mark = "polyturn: error: "
    found = [line.partition(mark)[2] for line in tail(log, start, 10_000) if mark in line]
    return found[-1] if found else ""


def child_environment(environment: dict[str, str], accelerator: bool) -> dict[str, str]:
    """What programs get: the launcher's environment, unbuffered output, and JAX's platform where it is not said.

    Without an accelerator JAX is told so (it would probe for one). With one, learner and embedded engines share it, so
    neither may reserve most of its memory at start. An SGLang server whose scheduler has died would wait a minute for core
    dumps of its GPU, and answer nobody, before it ends and can be started again.
    """
    out = {"PYTHONUNBUFFERED": "1", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", **environment}
    if accelerator:
        out.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        out.setdefault("JAX_PLATFORMS", "cpu")
    return out


def has_accelerator() -> bool:
    return (
        any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    )
