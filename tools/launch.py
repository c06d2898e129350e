"""Starts and supervises a run.

    python tools/launch.py local CONFIG [--table.key=value ...] [--runs DIR] [--overwrite]
    python tools/launch.py resume RUN
    python tools/launch.py eval RUN [--tasks N] [--mode greedy|sampled] [--samples N]
    python tools/launch.py status RUN

RUN is a run's folder, or its name below --runs (default: runs). --overwrite removes a run folder of the same name.
Exit status: 0 done, 1 a process kept crashing, 2 refused (wrong input, or a run that cannot go on; a line says why), 129, 130
and 143 after SIGHUP, Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports, before anything was started, is no traceback

if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

try:
    import pydantic  # noqa: F401 - what everything below needs first
except ModuleNotFoundError:
    print(
        f"polyturn: error: pydantic missing in {sys.executable}: pip install polyturn, or use .venv/bin/python", file=sys.stderr
    )
    sys.exit(2)

from common.cli import ConfigError, help_text, load
from common.config import RunConfig
from tools.launching import remains, report, runs
from tools.launching.preflight import check, programs, resolve_paths, with_contexts, write_folder
from tools.launching.runs import Refusal
from tools.launching.supervisor import Patience, Supervisor
from tools.launching.view import Poller, ask, make_view, tls_of

ROOT = Path(__file__).resolve().parents[1]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; see `python tools/launch.py --help`")


def parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Options, and the configuration overrides that stand among them. Raises Refusal."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb", parser_class=_Parser)
    for verb, place in (("local", "CONFIG"), ("resume", "RUN"), ("eval", "RUN"), ("status", "RUN")):
        options = verbs.add_parser(verb, add_help=False, allow_abbrev=False)
        options.add_argument("target", metavar=place)
        options.add_argument("--runs", type=Path, default=Path("runs"))
        if verb == "local":
            options.add_argument("--overwrite", action="store_true")
        if verb == "eval":
            options.add_argument("--tasks", type=int, default=0)  # 0: as many as the configuration says
            options.add_argument("--mode", choices=("greedy", "sampled"), default="")
            options.add_argument("--samples", type=int, default=0)  # of each task in mode sampled; 0: as configured
    found, rest = parser.parse_known_args(arguments)
    for word in rest:
        if not word.startswith("--") or "=" not in word:
            raise Refusal(f"{word!r} is not an option; write overrides as --table.key=value, for instance --optimizer.lr=1e-3")
        if found.verb != "local":
            raise Refusal(f"{word!r}: a run keeps its configuration; start another one with local CONFIG {word} --name=...")
    return found, rest


def prepare_new(options: Namespace, overrides: list[str]) -> tuple[RunConfig, Path]:
    """The checked configuration and the run's new, empty folder. Raises Refusal and ConfigError."""
    config = resolve_paths(load(options.target, overrides), [Path.cwd(), ROOT])
    check(config)
    config = with_contexts(config)
    run = options.runs.resolve() / config.name
    if run.exists():
        if not options.overwrite:
            first = "resume it, add" if runs.checkpoint_steps(run) else "it has no checkpoint to resume: add"
            raise Refusal(f"{run} exists; {first} --overwrite to remove it, or choose another --name={config.name}-2")
        if not runs.is_run(run) and (not run.is_dir() or any(run.iterdir())):
            raise Refusal(f"{run} is not a run's folder: --overwrite does not remove it; choose another --name")
        if run.is_symlink():
            raise Refusal(f"{run} is a symbolic link: --overwrite does not remove it; remove it, or choose another --name")
        if runs.is_running(run):
            raise Refusal(f"{run} is running: --overwrite does not remove it; stop it first")
        shutil.rmtree(run)
        print(f"removed {run}")
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise Refusal(f"{run} cannot be made: {error.strerror}; choose another --runs") from error
    return config, run


def prepare_old(options: Namespace) -> tuple[RunConfig, Path]:
    """A run that can be resumed or evaluated. Raises Refusal and ConfigError."""
    run = runs.find(options.target, options.runs)
    config = load(run / "config.toml")
    if runs.is_running(run):
        raise Refusal(f"{run} is running; see it with `python tools/launch.py status {run}`, or stop it first")
    if options.verb == "resume" and runs.finished(run, config):
        raise Refusal(f"{run} has made all its {config.learner.updates} updates; evaluate it, or start another run")
    if not runs.checkpoint_steps(run):
        raise Refusal(
            f"{run} has no checkpoint yet (checkpoint.every = {config.checkpoint.every}); start it again with --overwrite"
        )
    for domain in config.domains if options.verb == "eval" else []:
        if not 0 <= options.tasks <= domain.heldout_tasks:
            raise Refusal(
                f"--tasks {options.tasks}: domain {domain.name} has {domain.heldout_tasks} held-out tasks; ask for 1 to as many"
            )
    if options.verb == "eval" and options.samples:
        if options.samples < 0:
            raise Refusal(f"--samples {options.samples}: ask for 1 or more rollouts per task")
        if "sampled" not in ([options.mode] if options.mode else config.eval.modes):
            raise Refusal(f"--samples {options.samples} is for mode sampled; add --mode sampled")
    check(config)
    return config, run


def learner_arguments(options: Namespace) -> list[str]:
    if options.verb == "local":
        return []
    if options.verb == "resume":
        return ["--resume"]
    asked = {"--tasks": options.tasks, "--mode": options.mode, "--samples": options.samples}
    return ["--eval", *(word for name, value in asked.items() if value for word in (name, str(value)))]


def supervise(options: Namespace, config: RunConfig, run: Path, root: Path, patience: Patience) -> int:
    """Run everything to its end, with a view of it. Returns the exit status; raises Refusal."""
    started, lock = time.time(), runs.Lock(run)
    lock.take()
    addresses = write_folder(config, run)
    poller = Poller(addresses.learner, tls_of(config))
    with make_view(poller, f"{options.verb} {run}") as view:
        plan = programs(config, run, addresses, learner_arguments(options))
        patience = replace(patience, silence_s=config.learner.give_up_s)
        supervisor = Supervisor(plan, run, root, view, patience, lambda: poller.answered)
        supervisor.say(f"{options.verb} {run}: {', '.join(program.name for program in plan)}; logs in {run / 'logs'}")
        outcome = supervisor.run()
    lock.free()
    results = run / ("eval.json" if options.verb == "eval" else "summary.json")
    if results.is_file() and results.stat().st_mtime >= started - 1:
        print("\n".join(report.summary(runs.read_json(results), supervisor.restarts)))
    if outcome.code == 2:
        raise Refusal(outcome.reason)
    restarts = ", ".join(f"{name} {count}" for name, count in supervisor.restarts.items()) or "none"
    end = f"ended: {outcome.reason}" if outcome.reason else "done"
    print(f"{end} after {time.time() - started:.0f} s; restarts: {restarts}", flush=True)
    return outcome.code


def status(run: Path) -> int:
    """Print what the run's learner says about itself, or what is left of a run that is over."""
    config, address = load(run / "config.toml"), runs.read_json(run / "addresses.json").get("learner", "")
    answer = ask(address, tls_of(config)) if runs.is_running(run) else None
    if answer:
        print("\n".join(report.sentences(answer)))
    elif runs.is_running(run):
        print(f"{run} is running; its learner does not answer (it starts, compiles, restarts or hangs); see {run / 'logs'}.")
        print("".join(f"{line}\n" for line in remains.lines(run)), end="")
    else:
        state = "has finished" if runs.finished(run, config) else "is not running"
        newest = runs.newest_checkpoint(run, config)
        print(f"{run} {state}; {f'newest checkpoint: {newest}' if newest else 'no checkpoint'}.")
        if state == "is not running":
            print("".join(f"{line}\n" for line in remains.lines(run)), end="")
        summary = runs.read_json(run / "summary.json")
        if summary:
            print("\n".join(report.summary(summary, {})))
    return 0


def main(arguments: list[str], root: Path = ROOT, patience: Patience = Patience()) -> int:
    """Returns the exit status. `root` holds the packages that are started."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{help_text()}")
        return 0 if arguments else 2
    try:
        options, overrides = parse(arguments)
        if options.verb == "status":
            return status(runs.find(options.target, options.runs))
        config, run = prepare_new(options, overrides) if options.verb == "local" else prepare_old(options)
        return supervise(options, config, run, root, patience)
    except (Refusal, ConfigError) as error:
        for line in str(error).splitlines():
            print(f"polyturn: error: {line}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        where = f"{error.filename2 or error.filename}: " if error.filename else ""
        print(
            f"polyturn: error: {where}{error.strerror or error}; runs need a folder with room that can be written",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
