"""Notes over the wire: repeated steps, replicas that share a folder, writers at the same time, a server that restarts."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from common import convert, wire
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc as pb_grpc
from common.tasks import SPLITS
from common.types import Status
from envserver.admission import build_catalog
from envserver.domains import load_domain
from envserver.notes import NoteFolder, NoteLimits, NotesError
from envserver.testing import serving
from tests.envserver.test_main import run_folder, start
from tests.envserver.test_memory import LIMITS, LIST, TASK, DeskDomain, act, call, remembering, texts, write

ROOT = Path(__file__).parents[2]


def served(folder):
    """A replica of a domain that keeps notes of TASK."""
    return serving(remembering(folder), build_catalog(DeskDomain(), dict.fromkeys(SPLITS, 1), 0))


def request(name, index, *calls):
    return pb.StepRequest(session_id=name, step_index=index, action=convert.action_to(act(*calls)))


def opening(name, task=TASK, with_reference=False):
    return pb.OpenRequest(session_id=name, task=convert.task_to(task), with_reference=with_reference)


async def step(replica, name, index, *calls):
    return convert.observation_from((await replica.stub.Step(request(name, index, *calls))).observation)


def kept(folder):
    return NoteFolder(folder, LIMITS, [TASK.id]).open(TASK.id).texts


async def test_a_repeated_step_writes_once(tmp_path):
    async with served(tmp_path) as replica:
        opened = await replica.stub.Open(opening("a"))
        assert '"write_note"' in opened.tools_json
        assert "list_notes" in opened.instructions
        await replica.stub.Open(opening("b"))
        for _ in range(3):
            observation = await step(replica, "a", 0, write("a", "1"), call("draw"))
            assert texts(observation) == ["Saved.", "Line 1 goes left."]
            assert observation.metrics == {"strokes": 1.0, "memory_writes": 1.0, "memory_reads": 0.0}
        assert (await step(replica, "a", 1, call("leave"))).status == Status.TERMINATED
        await step(replica, "b", 0, write("a", "2"), call("leave"))
        assert (await step(replica, "a", 1, call("leave"))).status == Status.TERMINATED  # its merge is not done again
        assert kept(tmp_path) == {"a": "2"}


async def test_replicas_share_what_is_kept(tmp_path):
    async with served(tmp_path) as one, served(tmp_path) as two:
        await one.stub.Open(opening("a"))
        await two.stub.Open(opening("b"))
        await step(one, "a", 0, write("x", "one"), write("y", "one"), call("leave"))
        assert texts(await step(two, "b", 0, LIST, write("y", "two"), call("leave")))[0] == "There are no notes."
        for name, replica in (("c", one), ("d", two)):
            await replica.stub.Open(opening(name))
            assert texts(await step(replica, name, 0, LIST, call("read_note", name="y"))) == ["x\ny", "two"]


async def test_a_session_that_is_closed_leaves_nothing(tmp_path):
    async with served(tmp_path) as replica:
        await replica.stub.Open(opening("a"))
        await step(replica, "a", 0, write(), call("draw"))
        await replica.stub.Close(pb.CloseRequest(session_id="a"))
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_holds_no_notes_fails_the_rollout_by_name(tmp_path):
    path = NoteFolder(tmp_path, LIMITS).path(TASK.id)
    async with served(tmp_path) as replica:
        await replica.stub.Open(opening("a"))
        path.write_text("{")
        for attempt in (replica.stub.Open(opening("b")), replica.stub.Step(request("a", 0, write(), call("leave")))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attempt
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert f"NotesError: {path} does not hold notes" in (caught.value.details() or "")
        assert len(replica.server.sessions) == 0
    assert path.read_text() == "{"


WRITER = """
import sys
from pathlib import Path
from envserver.notes import NoteFolder, NoteLimits
folder = NoteFolder(Path(sys.argv[1]), NoteLimits(1000, 8), ["t"])
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    notes = folder.open("t")
    notes.write_note(f"{sys.argv[2]}{number}", "x")
    folder.merge("t", notes)
"""


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], cwd=ROOT, **pipes) for name in "abc"]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 3
    for writer in writers:  # all of them before any is waited for
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    texts = NoteFolder(tmp_path, NoteLimits(1000, 8), ["t"]).open("t").texts
    assert set(texts) == {f"{name}{number}" for name in "abc" for number in range(40)}


def test_a_lock_that_nobody_gives_back_is_an_error_that_names_it(tmp_path):
    folder = NoteFolder(tmp_path, LIMITS, [TASK.id], lock_s=0.05)
    notes = folder.open(TASK.id)
    notes.write_note("a", "1")
    folder.merge(TASK.id, notes)
    (lock,) = tmp_path.glob(".lock-*")
    with open(lock, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NotesError, match=rf"{lock} has been locked by another process for 0\.05 s"):
            folder.merge(TASK.id, notes)
    folder.merge(TASK.id, notes)


def lake_session(stub, name, task, *calls, with_reference=False):
    """Open, one step, and close. The texts of the answers, and the status."""
    opened = stub.Open(opening(name, task, with_reference), wait_for_ready=True, timeout=60)
    observation = convert.observation_from(stub.Step(request(name, 0, *calls)).observation)
    for index, action in enumerate(opened.reference, 1):
        step = pb.StepRequest(session_id=name, step_index=index, action=action)
        observation = convert.observation_from(stub.Step(step).observation)
    stub.Close(pb.CloseRequest(session_id=name))
    return texts(observation), observation.status


def walk(task):
    """Calls that reach the goal."""
    return [each for action in load_domain("frozenlake").reference(task) for each in action.tool_calls]


def test_a_restarted_server_finds_the_notes_of_train_tasks(tmp_path):
    """The process: it keeps notes below the run's folder, of train tasks; admission and references leave none."""
    port = run_folder(tmp_path, extra='memory = "task"\nadmission = -1')
    for life in range(2):
        process = start(tmp_path)
        try:
            with wire.channel(f"127.0.0.1:{port}") as channel:
                stub = pb_grpc.EnvServiceStub(channel)
                listed = stub.ListTasks(pb.ListTasksRequest(split="train"), wait_for_ready=True, timeout=60).tasks
                train = convert.task_from(listed[0])
                held = convert.task_from(stub.ListTasks(pb.ListTasksRequest(split="heldout")).tasks[0])
                other = convert.task_from(listed[1])
                assert lake_session(stub, "r", other, call("list_notes"), with_reference=True)[1] == Status.TERMINATED
                assert (tmp_path / "memory").exists() == bool(life)
                for task, words in ((train, "plan" if life else "There are no notes."), (held, "There are no notes.")):
                    answers, status = lake_session(stub, f"{task.id}", task, LIST, write(), *walk(task))
                    assert (answers[:2], status) == ([words, "Saved."], Status.TERMINATED)
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0
        files = list((tmp_path / "memory").rglob("*.json"))
        assert [path.relative_to(tmp_path).parent.as_posix() for path in files] == ["memory/frozenlake"]
        assert files[0].name.startswith(f"{train.id}-")
