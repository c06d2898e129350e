"""What the user sees: a live table on a terminal, one line per change elsewhere.

A thread asks the learner for its report about once a second. An unreachable learner is normal (it starts, compiles,
restarts) and shows as such.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from common.config import RunConfig
from tools.launching import report as words
from tools.launching.keys import Keys
from tools.launching.report import Report

if TYPE_CHECKING:
    from common.wire import Tls  # gRPC takes a while to import: only those who ask the learner pay for it

PERIOD_S = 1.0
STALL_KEY = "s"
QUIET_S = 30.0  # plain output says what is waited for when nothing else happened for so long


class Poller:
    """The learner's newest report."""

    def __init__(self, address: str, tls: Tls) -> None:
        self._address, self._tls = address, tls
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)
        self.report: Report = {}  # {} until the first answer
        self.reachable = False
        self.answered = 0.0  # time.monotonic() of the newest answer

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(PERIOD_S):
            answer = ask(self._address, self._tls)
            self.reachable = answer is not None
            self.answered = time.monotonic() if self.reachable else self.answered
            self.report = answer or self.report


def tls_of(config: RunConfig) -> Tls:
    from common.wire import Tls

    return Tls(config.tls.cert, config.tls.key, config.tls.ca)


def ask(address: str, tls: Tls, timeout_s: float = 2.0) -> Report | None:
    """The learner's report, or None when it does not answer."""
    import grpc

    from common import wire
    from common.proto import rl_pb2, rl_pb2_grpc

    try:
        with wire.channel(address, tls) as channel:
            reply = rl_pb2_grpc.LearnerServiceStub(channel).Status(rl_pb2.StatusRequest(), timeout=timeout_s)
        report = json.loads(reply.report_json)
    except (grpc.RpcError, ValueError):
        return None
    return report if isinstance(report, dict) else None


class PlainView:
    """Short lines for logs: at most one per update, each evaluation once, and waits when nothing happens."""

    def __init__(self, poller: Poller, out: TextIO) -> None:
        self._poller, self._out = poller, out
        self._position: tuple[Any, Any] = (None, None)
        self._evals: set[str] = set()  # already said; a learner that restarts reports them again
        self._spoken = time.monotonic()

    def __enter__(self) -> Self:
        self._poller.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._poller.stop()

    def say(self, text: str) -> None:
        self._spoken = time.monotonic()
        print(text, file=self._out, flush=True)

    def refresh(self, states: dict[str, str]) -> None:
        report = self._poller.report
        if not report:
            return
        position = (report.get("phase"), report.get("update"))
        if position != self._position:
            self._position = position
            self.say(words.line(report))
        for said in map(words.evaluation, words.rows(report, "evals")):
            if said not in self._evals:
                self._evals.add(said)
                self.say(said)
        if time.monotonic() - self._spoken > QUIET_S:
            waits = words.waits(report, 2) or [f"{name} {state}" for name, state in states.items() if state != "running"]
            sentence = "; ".join(waits) or str(report.get("sentence", "nothing has happened for a while"))
            self.say(sentence if self._poller.reachable else "the learner does not answer (it may be compiling)")


class LiveView:
    """A table that is redrawn once a second; messages scroll above it, and the wait-for graph when `s` is typed."""

    def __init__(self, poller: Poller, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._poller, self._title = poller, title
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn = 0.0
        self._keys = Keys()

    def __enter__(self) -> Self:
        self._poller.start()
        self._keys.__enter__()
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        self._keys.__exit__(kind, error, trace)
        self._poller.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def refresh(self, states: dict[str, str]) -> None:
        now = time.monotonic()
        if STALL_KEY in self._keys.pressed():
            self.say("\n".join(waiting(self._poller.report, self._poller.reachable, words.ALL)))
        if now - self._drawn >= PERIOD_S:
            self._drawn = now
            self._live.update(picture(self._title, self._poller.report, self._poller.reachable, states), refresh=True)


def waiting(report: Report, reachable: bool, most: int = 6) -> list[str]:
    if not reachable:
        return ["the learner does not answer (it starts, compiles or restarts); `launch.py status` says what its folder knows"]
    return words.waits(report, most) or [str(report.get("sentence", "nobody waits"))]


def picture(title: str, report: Report, reachable: bool, states: dict[str, str]) -> Any:  # a rich renderable
    """The live table."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    update, updates = report.get("update"), report.get("updates")
    if isinstance(update, int) and isinstance(updates, int) and updates > 0:
        grid.add_row(Text(words.progress(report)), ProgressBar(total=updates, completed=min(update, updates), width=50))
    speed = f"{words.number(report['tokens_per_s'])} tokens/s" if "tokens_per_s" in report else ""
    entries = [
        ("phase", [str(report.get("phase", "starting"))]),
        ("success", [words.success(report)]),
        ("off-policy", [words.lag(report)]),
        ("speed", [speed]),
        ("rollouts", [words.outcomes(report)]),
        ("engines", words.engines(report)),
        ("actors", words.actors(report)),
        ("evaluations", [words.evaluation(row) for row in words.rows(report, "evals")[-3:]]),
        ("waits", waiting(report, reachable)),
        ("processes", [", ".join(f"{name} {state}" for name, state in states.items())]),
    ]
    for name, lines in entries:
        if any(lines):
            grid.add_row(Text(name, style="bold"), Text("\n".join(lines)))
    return Panel(grid, title=title, title_align="left", subtitle=f"{STALL_KEY}: every wait", subtitle_align="right")


def make_view(poller: Poller, title: str) -> PlainView | LiveView:
    if sys.stdout.isatty():
        try:
            return LiveView(poller, title)
        except ModuleNotFoundError:
            pass  # no rich: plain lines do
    return PlainView(poller, sys.stdout)
