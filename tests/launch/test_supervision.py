"""The launcher as a real process over fake programs: clean ends, crashes, signals, and nothing left behind."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.stage import DEADLINE_S, until

ALL = ("env-frozenlake-0", "engine-0", "learner", "actor-0")
ALL_UP = "finish " + " ".join(f"{name}:1" for name in ALL)


def test_a_clean_end(stage):
    stage.play({"learner": [ALL_UP]})
    ended = stage.local("--seed=7")
    assert (ended.code, ended.err) == (0, "")
    assert "done after" in ended.out
    assert "restarts: none" in ended.out
    assert "40 dispatched, 30 trained, 4 filtered, 3 stale, 2 failed, 1 cancelled" in ended.out
    assert "frozenlake 0.900 [0.830, 0.940] greedy, n 128" in ended.out
    for name in ALL:
        log = (stage.run / "logs" / f"{name}.log").read_text()
        signals = 0 if name == "learner" else 1
        assert f"{name} ends, {signals} signals" in log  # asked to end, and did so by itself
    assert {start["jax"] for start in stage.starts()} <= {"cpu", ""}
    assert stage.events()[-1] == {**stage.events()[-1], "kind": "finished", "status": 0, "restarts": {}}


def test_the_folder_and_the_command_lines(stage):
    stage.play({"learner": [f"{ALL_UP} actor-1:1"]})
    stage.local("--seed=7", "--actors.count=2")
    assert "seed = 7" in (stage.run / "config.toml").read_text()
    addresses = json.loads((stage.run / "addresses.json").read_text())
    ports = {addresses["learner"].rpartition(":")[2], addresses["envs"]["frozenlake"][0].rpartition(":")[2]}
    engine = addresses["engines"][0]
    assert (engine["name"], engine["pool"]) == ("engine-0", "main")
    assert engine["url"].startswith("http://127.0.0.1:")
    assert len(ports | {engine["url"].rpartition(":")[2]}) == 3
    model = json.loads((stage.run / "model" / "config.json").read_text())
    assert (model["vocab_size"], model["eos_token_id"], model["torch_dtype"]) == (4, 3, "float32")  # a, b, c, <|im_end|>
    assert (stage.run / "model" / "tokenizer.json").exists()
    arguments = {start["name"]: start["argv"] for start in stage.starts()}
    assert arguments["learner"] == ["--run", str(stage.run)]
    assert arguments["env-frozenlake-0"] == ["--run", str(stage.run), "--domain", "frozenlake", "--replica", "0"]
    assert {"actor-0", "actor-1"} <= set(arguments)
    flags = dict(zip(arguments["engine-0"][::2], arguments["engine-0"][1::2], strict=True))
    assert flags["--port"] == engine["url"].rpartition(":")[2]
    assert (flags["--load-format"], flags["--widths"], flags["--dtype"]) == ("dummy", "128,192,256,320", "float32")


def test_a_crash_is_shown_and_restarted(stage):
    stage.play({"actor-0": ["crash 3", "serve"], "learner": ["finish actor-0:2"]})
    ended = stage.local()
    assert ended.code == 0
    assert "actor-0 exited with status 3; restart 1 of 3 in 0.0 s" in ended.out
    assert "  | traceback line 19" in ended.out
    assert "  | traceback line 8\n" in ended.out  # the last twelve: 8 to 19
    assert "traceback line 7\n" not in ended.out
    assert "restarts: actor-0 1" in ended.out
    assert [event["count"] for event in stage.events() if event["kind"] == "restart"] == [1]


def test_a_crash_loop_gives_up(stage):
    stage.play({"engine-0": ["crash 1"], "learner": ["serve"]})
    ended = stage.local()
    assert ended.code == 1
    assert len(stage.started("engine-0")) == 4  # the first start and three restarts
    assert "ended: engine-0 exited with status 1, 4 times" in ended.out
    assert "learner ends, 1 signals" in (stage.run / "logs" / "learner.log").read_text()


def test_exit_status_2_ends_the_run_with_its_line(stage):
    stage.play({"env-frozenlake-0": ["refuse domains.0.options.sise: unknown option; did you mean 'size'?"]})
    ended = stage.local()
    assert ended.code == 2
    assert ended.err == "polyturn: error: domains.0.options.sise: unknown option; did you mean 'size'?\n"
    assert len(stage.started("env-frozenlake-0")) == 1


def test_exit_status_2_without_a_line_shows_the_log(stage):
    stage.play({"engine-0": ["crash 2"]})
    ended = stage.local()
    assert ended.code == 2
    assert "engine-0 refused to go on; see" in ended.err
    assert "traceback line 19" in ended.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_learner_first(stage, number, code):
    process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    process.send_signal(number)
    ended = stage.finish(process)
    assert ended.code == code
    assert "updates         3" in ended.out  # the summary that the learner wrote on its way out
    assert f"stopped by {number.name}" in ended.out
    order = [event["process"] for event in stage.events() if event["kind"] == "ended"]
    assert order[0] == "learner"
    assert sorted(order) == sorted(ALL)


def test_a_second_signal_kills(stage):
    stage.play({"learner": ["stubborn"]})
    process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    process.send_signal(signal.SIGINT)
    until(lambda: any(event["kind"] == "stopping" for event in stage.events()), "the launcher to react")
    process.send_signal(signal.SIGINT)
    ended = stage.finish(process)
    assert ended.code == 130
    assert "learner: second signal: killed" in ended.out


def test_a_stubborn_process_is_killed(stage):
    stage.play({"learner": [ALL_UP], "actor-0": ["stubborn"]})
    ended = stage.local()
    assert ended.code == 0
    assert "actor-0: did not stop in 1 s: killed" in ended.out


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_programs_leave_in_shared_memory_is_removed(stage):
    """SGLang servers do."""
    file = Path("/dev/shm") / f"polyturn-test-{os.getpid()}"
    stage.play({"learner": [ALL_UP], "engine-0": [f"holder {file}"]})
    try:
        assert stage.local().code == 0
        assert stage.started("engine-0")[0]["holds"] == 4096
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_kill_9_of_a_child_takes_its_children_and_restarts_it(stage):
    stage.play({"env-frozenlake-0": ["parent", "serve"], "learner": ["finish env-frozenlake-0:2"]})
    process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    victim = stage.started("env-frozenlake-0")[0]
    psutil.Process(victim["pid"]).kill()
    ended = stage.finish(process)
    assert ended.code == 0
    assert "env-frozenlake-0 was killed by SIGKILL; restart 1 of 3" in ended.out


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")
def test_kill_9_of_the_launcher_leaves_nothing(stage):
    process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    process.kill()
    stage.finish(process)
    until(lambda: not stage.alive(), "the kernel to end the programs")


def test_a_learner_without_a_checkpoint_starts_over_a_bounded_number_of_times(stage):
    stage.play({"learner": ["crash 1"]})
    ended = stage.local()
    assert ended.code == 1
    assert "from the beginning: there is no checkpoint yet" in ended.out
    assert [start["argv"][2:] for start in stage.started("learner")] == [[], [], [], []]


def test_a_learner_with_a_checkpoint_resumes(stage):
    stage.play({"learner": ["checkpoint_and_die 10", "finish"]})
    ended = stage.local()
    assert ended.code == 0
    assert "learner was killed by SIGKILL; restart 1 of 3 in 0.0 s from the newest checkpoint" in ended.out
    assert [start["argv"][2:] for start in stage.started("learner")] == [[], ["--resume"]]


def test_a_learner_that_never_answers_is_restarted(stage):
    """Frozen, say. One that answers is left alone, however long it takes."""
    stage.play({"learner": ["checkpoint_and_serve 10", "finish"]})
    ended = stage.local("--learner.give_up_s=0.5")
    assert ended.code == 0
    assert "learner has not answered for 0.5 s: killed\nlearner was killed by SIGKILL; restart 1 of 3" in ended.out
    assert [start["argv"][2:] for start in stage.started("learner")] == [[], ["--resume"]]
    assert [event["seconds"] for event in stage.events() if event["kind"] == "silent"] == [0.5]


def test_an_actor_that_ends_by_itself_is_no_crash(stage):
    stage.play({"actor-0": ["done"], "learner": ["finish actor-0:6"]})
    ended = stage.local()
    assert (ended.code, "restarts: none" in ended.out) == (0, True)


def test_a_learner_that_was_asked_to_end_by_somebody_else_goes_on(stage):
    """Only the launcher ends a run: its learner alone, when it is told to end, has not made all its updates."""
    stage.play({"learner": ["crash 143", "finish"]})
    ended = stage.local()
    assert ended.code == 0
    assert "learner exited with status 143; restart 1 of 3" in ended.out


def test_output_that_nobody_reads_stops_no_run(stage):
    stage.play({"actor-0": ["crash 3", "serve"], "learner": ["finish actor-0:2"]})
    process = stage.start("local", str(stage.config))
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr.read() == ""
    assert (stage.run / "summary.json").exists()


@contextlib.contextmanager
def hangup(handler):
    """What a child inherits; below nohup it is SIG_IGN."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_stops_like_sigterm_and_nohup_prevents_it(stage):
    with hangup(signal.SIG_DFL):  # whatever the tests themselves were started with
        process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    process.send_signal(signal.SIGHUP)
    ended = stage.finish(process)
    assert (ended.code, "stopped by SIGHUP" in ended.out) == (129, True)
    stage.play({"learner": ["finish actor-0:2"], "actor-0": ["crash_after env-frozenlake-0:2", "serve"]})
    with hangup(signal.SIG_IGN):
        process = stage.start("local", str(stage.config), "--overwrite")
    stage.wait_started(*ALL)
    process.send_signal(signal.SIGHUP)
    os.kill(stage.started("env-frozenlake-0")[0]["pid"], signal.SIGKILL)  # now it may end
    assert stage.finish(process).code == 0


def test_progress_as_plain_lines(stage):
    report = {"phase": "rl", "update": 12, "updates": 30, "success": {"frozenlake": 0.625}, "tokens_per_s": 3120.4}
    report |= {"lag": {"mean": 0.4, "max": 2}, "rollouts": {"dispatched": 512, "trained": 384, "open": 128}}
    report |= {"evals": [{"phase": "warm", "domain": "frozenlake", "success": 0.5, "n": 128, "mode": "greedy", "version": 1}]}
    (stage.folder / "report.json").write_text(json.dumps(report))
    stage.play({"learner": ["report " + " ".join(f"{name}:1" for name in ALL)]})
    ended = stage.local()
    assert ended.code == 0
    line = "update 12/30 rl · frozenlake 0.625 · lag 0.40 mean, 2 max · 3,120 tokens/s · 512 dispatched, 128 open, 384 trained"
    assert ended.out.splitlines().count(line) == 1
    assert ended.out.splitlines().count("eval warm: frozenlake 0.500 greedy, n 128, version 1") == 1


def test_a_terminal_gets_the_live_table(stage):
    report = {"phase": "rl", "update": 12, "updates": 30, "success": {"frozenlake": 0.625}}
    (stage.folder / "report.json").write_text(json.dumps(report))
    stage.play({"learner": ["report actor-0:2"], "actor-0": ["crash 3", "serve"]})
    ours, theirs = os.openpty()
    process = stage.start("local", str(stage.config), stdout=theirs)
    os.close(theirs)
    shown = b""
    while chunk := read_terminal(ours):
        shown += chunk
    os.close(ours)
    ended = stage.finish(process)
    assert (ended.code, ended.err) == (0, "")
    text = shown.decode()
    assert "update 12/30" in text
    assert "frozenlake 0.625" in text
    assert "actor-0 exited with status 3; restart 1 of 3" in text
    assert "done after" in text


def test_every_wait_is_shown_when_s_is_typed_and_the_terminal_is_as_before_afterwards(stage):
    """The table has room for six of them; Ctrl-C stays what it is."""
    lines = [f"wait number {n}" for n in range(1, 9)]
    (stage.folder / "report.json").write_text(json.dumps({"phase": "rl", "update": 2, "updates": 30, "stall": lines}))
    stage.play({"learner": ["report never:1"]})
    process = stage.in_terminal("local", str(stage.config))
    shown = ""

    def show(wanted: str) -> None:
        nonlocal shown
        while wanted not in shown:
            chunk = os.read(process.stdout.fileno(), 65536)
            assert chunk, shown
            shown += chunk.decode(errors="replace")

    show("wait number 6")
    assert "wait number 7" not in shown
    os.write(process.stdin.fileno(), b"xs")
    show("wait number 8")
    os.write(process.stdin.fileno(), b"\x03")
    show("status 130")
    show(" echo ")
    assert "-icanon" not in shown.partition("status 130")[2]
    stage.finish(process)


def read_terminal(terminal: int) -> bytes:
    """What was written to it; nothing once the other side is closed (Linux answers EIO)."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_status_of_a_running_and_an_ended_run(stage):
    report = {"phase": "rl", "update": 2, "updates": 30, "sentence": "The learner waits for 3 groups of frozenlake."}
    (stage.folder / "report.json").write_text(json.dumps(report))
    stage.play({"learner": ["report never:1"]})
    process = stage.start("local", str(stage.config))
    stage.wait_started(*ALL)
    until(lambda: "waits for 3 groups" in stage.launch("status", "demo").out, "the status to be answered")
    stopped = stage.started("learner")[0]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    said = stage.launch("status", "demo")
    os.kill(stopped, signal.SIGCONT)
    assert said.code == 0
    assert said.out.startswith(f"{stage.run} is running; its learner does not answer (it starts, compiles, restarts or hangs)")
    assert f"learner (process {stopped}) is stopped (SIGSTOP); its log is " in said.out
    assert "actor-0 (process " in said.out
    process.terminate()
    assert stage.finish(process).code == 143
    ended = stage.launch("status", "demo")
    assert ended.code == 0
    assert "has finished; no checkpoint" in ended.out
    assert "process" not in ended.out
