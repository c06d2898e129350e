"""Fake processes of a run. Each does what the test's script says for its name, start by start.

The script is the JSON file named by SCRIPT: {"actor-0": ["crash 3", "serve"], ...}; the last behaviour repeats and
"serve" is the default. Beside it, starts.jsonl gets a line for every start.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(os.environ["SCRIPT"])
STARTS = SCRIPT.with_name("starts.jsonl")


def starts() -> list[dict]:
    return [json.loads(line) for line in STARTS.read_text().splitlines()] if STARTS.exists() else []


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def play(name: str) -> None:
    behaviours = json.loads(SCRIPT.read_text()).get(name, ["serve"])
    earlier = sum(start["name"] == name for start in starts())
    behaviour, _, argument = behaviours[min(earlier, len(behaviours) - 1)].partition(" ")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    entry = {"name": name, "pid": os.getpid(), "argv": sys.argv[1:], "jax": os.environ.get("JAX_PLATFORMS", ""), "child": 0}
    if behaviour == "parent":
        entry["child"] = subprocess.Popen(["sleep", "600"]).pid
    if behaviour == "holder":  # of a file in shared memory, for its whole life
        with open(argument, "wb+") as file:
            file.truncate(4096)
            held = mmap.mmap(file.fileno(), 4096)
            entry["holds"] = len(held)
    with STARTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"{name} starts, behaviour {behaviour}", flush=True)
    BEHAVIOURS[behaviour](argument, stopping)
    print(f"{name} ends, {len(stopping)} signals", flush=True)


def serve(_argument: str, stopping: list[int]) -> None:
    while not stopping:
        time.sleep(0.01)
    if "--run" in sys.argv and sys.argv[0].endswith("learner/__main__.py"):
        summary(3)


def crash(status: str, _stopping: list[int]) -> None:
    print("\n".join(f"traceback line {index}" for index in range(20)), flush=True)
    sys.exit(int(status))


def crash_after(argument: str, _stopping: list[int]) -> None:
    wait_for(argument, [])
    crash("3", [])


def checkpoint(step: str) -> None:
    folder = Path(option("--run")) / "checkpoints" / step
    folder.mkdir(parents=True)
    (folder / "commit_success.txt").touch()  # as Orbax marks what is whole


def checkpoint_and_die(step: str, _stopping: list[int]) -> None:
    checkpoint(step)
    os.kill(os.getpid(), signal.SIGKILL)


def checkpoint_and_serve(step: str, stopping: list[int]) -> None:
    checkpoint(step)
    serve("", stopping)


def refuse(message: str, _stopping: list[int]) -> None:
    print(f"polyturn: error: {message}", file=sys.stderr)
    sys.exit(2)


def stubborn(_argument: str, _stopping: list[int]) -> None:
    while True:
        time.sleep(0.01)


def wait_for(argument: str, stopping: list[int]) -> None:
    """`actor-0:2 engine-0:1`: until these have started so often, or a signal."""
    wanted = [part.split(":") for part in argument.split()]
    while not stopping:
        names = [start["name"] for start in starts()]
        if all(names.count(name) >= int(count) for name, count in wanted):
            return
        time.sleep(0.01)


def finish(argument: str, stopping: list[int]) -> None:
    wait_for(argument, stopping)
    summary(30)


def summary(updates: int) -> None:
    rollouts = {"dispatched": 40, "trained": 30, "filtered": 4, "stale": 3, "failed": 2, "cancelled": 1}
    rows = [
        {"phase": "rl", "version": 9, "mode": "greedy", "domain": "frozenlake", "success": 0.9, "n": 128, "ci95": [0.83, 0.94]}
    ]
    values = {"updates": updates, "wall_seconds": 1.5, "rollouts": rollouts, "evals": rows, "lag": {"mean": 0.5, "max": 2}}
    (Path(option("--run")) / "summary.json").write_text(json.dumps(values))


def evaluate(rows: str, _stopping: list[int]) -> None:
    (Path(option("--run")) / "eval.json").write_text(json.dumps({"evals": json.loads(rows)}))


def report(argument: str, stopping: list[int]) -> None:
    """Answer Status like a learner until the named processes have started, then finish."""
    from common import wire
    from common.proto import rl_pb2, rl_pb2_grpc

    values = json.loads(SCRIPT.with_name("report.json").read_text())
    answered: list[int] = []

    class Learner(rl_pb2_grpc.LearnerServiceServicer):
        def Status(self, request, context):
            answered.append(1)
            return rl_pb2.StatusReply(report_json=json.dumps(values))

    server = wire.thread_server(2)
    rl_pb2_grpc.add_LearnerServiceServicer_to_server(Learner(), server)
    wire.bind(server, json.loads((Path(option("--run")) / "addresses.json").read_text())["learner"])
    server.start()
    wait_for(argument, stopping)
    while len(answered) < 2 and not stopping:
        time.sleep(0.01)
    server.stop(0).wait()
    summary(30)


BEHAVIOURS = {
    "serve": serve,
    "parent": serve,
    "holder": serve,
    "crash": crash,
    "crash_after": crash_after,
    "checkpoint_and_die": checkpoint_and_die,
    "checkpoint_and_serve": checkpoint_and_serve,
    "refuse": refuse,
    "stubborn": stubborn,
    "finish": finish,
    "report": report,
    "evaluate": evaluate,
    "done": lambda argument, stopping: None,
}
