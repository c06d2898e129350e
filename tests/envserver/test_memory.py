"""Notes beside an environment: answers in the order of calls, and what is kept for whom."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DomainConfig
from common.tasks import SPLITS
from common.types import Action, Message, Observation, Status, Task, ToolCall
from envserver.admission import build_catalog
from envserver.domains import load_domain
from envserver.env import Domain, DomainError, Env, EnvMisuse
from envserver.memory import MemoryEnv, WithMemory, with_memory
from envserver.notes import NoteFolder, NoteLimits, Notes
from envserver.testing import DomainConformance, play, without_clock
from envserver.toolenv import ToolEnv, ToolResult, Tools
from tests.envserver.fakes import Script

LIMITS = NoteLimits(notes=3, characters=8)
TASK = Task("desk", "desk-0", 0, {})
NAMES = ("write_note", "read_note", "list_notes", "delete_note")


def call(tool, /, error="", **arguments):
    return ToolCall("c", tool, arguments, error)


def act(*calls, text=""):
    """Calls with the ids "0", "1", ..."""
    return Action(text, tuple(dataclasses.replace(each, id=str(at)) for at, each in enumerate(calls)))


def write(name="plan", text="go left"):
    return call("write_note", name=name, text=text)


READ, LIST = call("read_note", name="plan"), call("list_notes")


def texts(observation):
    return [message.text for message in observation.messages]


class Desk(ToolEnv):
    """A pad that pays for each stroke, and a door. Counts its steps and the actions without a call."""

    def begin(self, task):
        self.strokes = self.steps = self.silent = 0
        return "A desk."

    def step(self, action):
        observation = super().step(action)
        self.steps += 1
        return observation

    def no_call(self, text):
        self.silent += 1
        return ToolResult("Do something.", reward=-0.5)

    def draw(self, to: Literal["left", "right"] = "left") -> ToolResult:
        """Draw a line."""
        self.strokes += 1
        return ToolResult(f"Line {self.strokes} goes {to}.", reward=0.25)

    def leave(self) -> ToolResult:
        """Leave."""
        return ToolResult("Bye.", reward=1.0, done=True)

    def breaks(self) -> str:
        """Break."""
        raise OSError("disk full")

    tools = Tools(draw, leave, breaks)

    def metrics(self):
        return {"strokes": float(self.strokes)}

    def state_key(self):
        return b"%d" % self.strokes


class Flat(Desk):
    """Slow definition of a desk with notes: one environment that has all the tools itself."""

    def begin(self, task):
        self.notes = Notes(LIMITS, {})
        return super().begin(task)

    def write_note(self, name: str, text: str) -> str:
        """Write."""
        return self.notes.write_note(name, text)

    def read_note(self, name: str) -> str:
        """Read."""
        return self.notes.read_note(name)

    def list_notes(self) -> str:
        """List."""
        return self.notes.list_notes()

    def delete_note(self, name: str) -> str:
        """Delete."""
        return self.notes.delete_note(name)

    tools = Tools(Desk.draw, Desk.leave, Desk.breaks, write_note, read_note, list_notes, delete_note)

    def metrics(self):
        counts = {"memory_writes": float(self.notes.writes), "memory_reads": float(self.notes.reads)}
        return super().metrics() | counts


class DeskDomain(Domain):
    name, tools, template, blocking = "desk", Desk.tools.schemas, "Sit down.", False

    def __init__(self, make=Desk, tools=Desk.tools.schemas):
        super().__init__()
        self.make, self.tools = make, tools

    def tasks(self, split, n):
        return [Task("desk", f"{split}-{at}", at, {}) for at in range(n)]

    def make_env(self):
        return self.make()


def remembering(folder, tasks=(TASK.id,), inner=None, limits=LIMITS):
    return WithMemory(inner or DeskDomain(), NoteFolder(folder, limits, tasks))


def started(domain=None, task=TASK):
    env = (domain or WithMemory(DeskDomain(), NoteFolder(Path(), LIMITS))).make_env()
    assert isinstance(env, MemoryEnv)
    env.reset(task)
    return env


def episode(domain, *actions, task=TASK):
    """Play to the end, by the door; the observations."""
    return play(domain, task, [*actions, act(call("leave"))])


# ---- the conformance suite ----------------------------------------------------------------------------------------------


class Remembering(DomainConformance):
    """With notes among the calls, of a kind whose answers do not depend on what earlier episodes kept."""

    domain: str

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "notes"

    def actions(self, domain, task):
        notes = [act(write()), act(call("no_such_tool"), READ, write("b")), act(call("read_note", name="none"), READ)]
        first, *rest = super().actions(domain, task)
        return [first, *rest[:3], *notes, *rest[3:]]


class WithinRollouts(Remembering):
    def make_domain(self):
        return WithMemory(load_domain(self.domain), NoteFolder(self.folder, LIMITS))


class AcrossRollouts(Remembering):
    def make_domain(self):
        domain = load_domain(self.domain)
        return remembering(self.folder, {task.id for task in domain.tasks("train", 64)}, domain)


class TestFrozenLakeWithinRollouts(WithinRollouts):
    domain = "frozenlake"


class TestFrozenLakeAcrossRollouts(AcrossRollouts):
    domain = "frozenlake"


class TestArithmeticWithinRollouts(WithinRollouts):
    domain = "arithmetic"


class TestArithmeticAcrossRollouts(AcrossRollouts):
    domain = "arithmetic"


# ---- notes beside the tools of an environment ---------------------------------------------------------------------------

CALLS = st.one_of(
    st.sampled_from([call("draw"), call("draw", to="right"), call("draw", to="up"), call("leave"), READ, LIST, LIST]),
    st.builds(write, st.sampled_from(["plan", "b", " b ", "c", "d", ""]), st.sampled_from(["x", "y" * 8, "y" * 9, " "])),
    st.builds(lambda name: call("delete_note", name=name), st.sampled_from(["plan", "b", "e"])),
    st.builds(lambda name, error: call(name, error=error), st.sampled_from(["", "fly", *NAMES]), st.sampled_from(["", "bad"])),
)


@given(st.lists(st.lists(CALLS, max_size=5), max_size=5))
def test_it_answers_as_one_environment_with_all_the_tools_would(turns):
    """Messages, outcomes, ids, rewards, ends and metrics, for any mixture of calls, right and wrong."""
    mixed, flat = started(), Flat()
    flat.reset(TASK)
    for calls in turns:
        answers = []
        for env in (mixed, flat):
            try:
                answers.append(without_clock(env.step(act(*calls))))
            except EnvMisuse as error:
                answers.append(str(error))
        assert answers[0] == answers[1]


def test_calls_of_both_are_answered_in_order_and_the_environment_steps_once():
    env = started()
    observation = env.step(act(write(), call("draw"), READ, call("draw", to="right"), LIST, text="hm"))
    assert [message.tool_call_id for message in observation.messages] == ["0", "1", "2", "3", "4"]
    assert texts(observation) == ["Saved.", "Line 1 goes left.", "go left", "Line 2 goes right.", "plan"]
    assert [outcome.name for outcome in observation.tool_outcomes] == ["write_note", "draw", "read_note", "draw", "list_notes"]
    assert all(outcome.ok and outcome.seconds >= 0 for outcome in observation.tool_outcomes)
    assert (observation.reward, observation.state_key, observation.status) == (0.5, b"2", Status.RUNNING)
    assert observation.metrics == {"strokes": 2.0, "memory_writes": 1.0, "memory_reads": 2.0}
    assert env.inner.steps == 1


def test_calls_of_notes_alone_do_not_step_the_environment():
    env = started()
    env.step(act(call("draw")))
    observation = env.step(act(write(), READ))
    assert (env.inner.steps, env.inner.silent, env.inner.strokes) == (1, 0, 1)
    assert (observation.reward, observation.state_key, observation.status) == (0.0, b"1", Status.RUNNING)
    assert observation.metrics == {"strokes": 1.0, "memory_writes": 1.0, "memory_reads": 1.0}
    assert len(observation.messages) == len(observation.tool_outcomes) == 2


def test_an_action_without_a_call_is_the_environments():
    env = started()
    observation = env.step(Action("hm"))
    assert (texts(observation), observation.reward, env.inner.silent) == (["Do something."], -0.5, 1)
    assert observation.metrics["memory_writes"] == 0


def test_what_stands_behind_the_end_is_not_executed(tmp_path):
    env = started(remembering(tmp_path))
    observation = env.step(act(write("a"), call("leave"), write("b"), call("draw"), write("c")))
    over = "Not executed: the episode is over."
    assert texts(observation) == ["Saved.", "Bye.", over, over, over]
    assert [outcome.ok for outcome in observation.tool_outcomes] == [True, True, False, False, False]
    assert (observation.status, observation.reward, env.inner.strokes) == (Status.TERMINATED, 1.0, 0)
    assert NoteFolder(tmp_path, LIMITS, [TASK.id]).open(TASK.id).texts == {"a": "go left"}
    with pytest.raises(EnvMisuse, match="over"):
        env.step(act(LIST))


def test_an_environment_is_single_use_for_notes_too():
    env = WithMemory(DeskDomain(), NoteFolder(Path(), LIMITS)).make_env()
    with pytest.raises(EnvMisuse, match="new"):
        env.step(act(LIST))
    env.reset(TASK)
    with pytest.raises(EnvMisuse, match="reset was called before"):
        env.reset(TASK)
    env.close()


def test_a_tool_that_nobody_has_is_answered_with_all_that_there_are():
    env = started()
    names = "draw, leave, breaks, write_note, read_note, list_notes, delete_note"
    assert texts(env.step(act(call("fly")))) == [f"Error: there is no tool 'fly'; tools: {names}"]
    assert env.inner.steps == 0
    assert texts(env.step(act(call("fly", error="not JSON")))) == ["Error: not JSON"]  # whatever it was meant to be
    assert env.inner.steps == 1


def test_an_exception_of_the_environment_stays_one():
    with pytest.raises(OSError, match="disk full"):
        started().step(act(write(), call("breaks")))


class Bare(Env):
    """Not a ToolEnv: no outcomes, a message more than calls; ends after two steps."""

    def reset(self, task):
        self.left = 2
        self.closed = 0
        return Observation((Message("user", "Hello."),), 0.5, Status.RUNNING, {"left": 2.0})

    def step(self, action):
        self.left -= 1
        messages = [Message("tool", f"did {each.name}", each.id) for each in action.tool_calls]
        status = Status.RUNNING if self.left else Status.TRUNCATED
        return Observation((*messages, Message("user", f"{action.text}{self.left}")), 0.25, status, {"left": float(self.left)})

    def close(self):
        self.closed += 1


def test_any_environment_can_have_notes():
    domain = WithMemory(DeskDomain(Bare), NoteFolder(Path(), LIMITS))
    env = domain.make_env()
    opened = env.reset(TASK)
    assert (texts(opened), opened.reward) == (["Hello."], 0.5)
    assert opened.metrics == {"left": 2.0, "memory_writes": 0.0, "memory_reads": 0.0}
    with pytest.raises(EnvMisuse, match="reset was called before"):
        env.reset(TASK)
    first = env.step(act(LIST, call("draw"), text="so "))
    assert texts(first) == ["There are no notes.", "did draw", "so 1"]
    assert [outcome.name for outcome in first.tool_outcomes] == ["list_notes"]
    last = env.step(act(write("a"), call("draw"), write("b"), call("draw"), write("c")))
    assert texts(last) == ["Saved.", "did draw", "Saved.", "did draw", "Not executed: the episode is over.", "0"]
    assert (last.status, last.reward) == (Status.TRUNCATED, 0.25)
    env.close()
    assert env.inner.closed == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (write(""), "a note's name is one line of 1 to 64 characters"),
        (write(" \n "), "a note's name is one line of 1 to 64 characters"),
        (write("a\nb"), "a note's name is one line of 1 to 64 characters"),
        (write("n" * 65), "a note's name is one line of 1 to 64 characters"),
        (write("\ud800"), "a note's name is one line of 1 to 64 characters"),
        (write(text=" "), "the text is empty; delete_note removes a note"),
        (write(text="x" * 9), "the text has 9 characters, a note has at most 8"),
        (write("fourth"), "there are 3 notes, at most 3 are kept; replace or delete one"),
        (call("read_note", name="d"), "there is no note of that name; notes: a, b, c"),
        (call("delete_note", name="d"), "there is no note of that name; notes: a, b, c"),
        (call("write_note", name="a"), "write_note needs the argument text"),
        (call("list_notes", all=True), "list_notes has no argument 'all'; arguments: none"),
        (call("write_note", error="Expecting ','"), "Expecting ','"),
    ],
)
def test_mistakes_are_observations_and_change_nothing(wrong, words):
    env = started()
    env.step(act(write("a", "1"), write("b", "2"), write("c", "3")))
    observation = env.step(act(wrong))
    assert texts(observation) == [f"Error: {words}"]
    assert [(outcome.ok, outcome.error) for outcome in observation.tool_outcomes] == [(False, words)]
    assert observation.metrics == {"strokes": 0.0, "memory_writes": 3.0, "memory_reads": 0.0}
    assert env._notes.texts == {"a": "1", "b": "2", "c": "3"}


def test_notes_are_replaced_read_listed_and_deleted():
    env = started()
    steps = [
        (write("a", "x" * 8), "Saved."),
        (write("n" * 64, "2"), "Saved."),
        (write(7, 8), "Saved."),  # numbers are text, as for every tool
        (write(" a ", "3"), "Saved."),  # replaces, also when all places are taken, and stands last
        (LIST, f"{'n' * 64}\n7\na"),
        (call("read_note", name="a"), "3"),
        (call("delete_note", name="7"), "Deleted."),
        (write("d", "half \ud800"), "Saved."),
        (call("read_note", name="d"), "half ?"),
        (LIST, f"{'n' * 64}\na\nd"),
    ]
    for each, answer in steps:
        assert texts(env.step(act(each))) == [answer]
    assert env.step(act(LIST)).metrics == {"strokes": 0.0, "memory_writes": 6.0, "memory_reads": 5.0}


# ---- the domain ---------------------------------------------------------------------------------------------------------


def configured(**keys):
    return DomainConfig(name="desk", **keys)


def test_off_is_the_domain_itself(tmp_path):
    domain = DeskDomain()
    assert with_memory(domain, configured(), tmp_path, ()) is domain


def test_tools_and_instructions_say_that_there_are_notes(tmp_path):
    inner = DeskDomain()
    domain = with_memory(inner, configured(memory="rollout", memory_notes=5, memory_characters=70), tmp_path, [TASK.id])
    assert [tool["function"]["name"] for tool in domain.tools] == ["draw", "leave", "breaks", *NAMES]
    assert domain.tools[3]["function"]["parameters"]["required"] == ["name", "text"]
    first, blank, second = domain.instructions.split("\n")
    assert (first, blank) == ("Sit down.", "")
    assert "up to 5 notes of 70 characters" in second
    assert "Later attempts" not in second
    assert all(name in second for name in NAMES)
    kept = with_memory(inner, configured(memory="task"), tmp_path, [TASK.id])
    assert "Later attempts at the same task" in kept.instructions
    assert (inner.instructions, len(inner.tools)) == ("Sit down.", 3)


def test_what_is_said_about_notes_can_be_replaced(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("Scribble: $notes x $characters, for $$0.\n")
    config = configured(memory="rollout", memory_instructions=str(path))
    assert with_memory(DeskDomain(), config, tmp_path, ()).instructions == "Sit down.\n\nScribble: 16 x 1000, for $0."
    path.write_text("")
    assert with_memory(DeskDomain(), config, tmp_path, ()).instructions == "Sit down."
    path.write_text("$size")
    with pytest.raises(DomainError, match=r"memory_instructions: bad placeholder \('size'\); known: \$notes, \$characters"):
        with_memory(DeskDomain(), config, tmp_path, ())
    missing = configured(memory="rollout", memory_instructions=str(tmp_path / "none.txt"))
    with pytest.raises(DomainError, match=r"domains\.desk\.memory_instructions: cannot read .*none\.txt"):
        with_memory(DeskDomain(), missing, tmp_path, ())


def read_note(name: str) -> str:
    """Read sheet music."""
    return name


def test_domains_that_cannot_have_notes_are_refused(tmp_path):
    with pytest.raises(DomainError, match="'script' has no tools"):
        with_memory(Script(), configured(memory="rollout"), tmp_path, ())
    music = DeskDomain(tools=Tools(Desk.draw, read_note).schemas)
    with pytest.raises(DomainError, match="'desk' has a tool 'read_note' of its own"):
        with_memory(music, configured(memory="rollout"), tmp_path, ())


def test_files_are_no_work_for_the_event_loop(tmp_path):
    assert not with_memory(DeskDomain(), configured(memory="rollout"), tmp_path, [TASK.id]).blocking
    assert with_memory(DeskDomain(), configured(memory="task"), tmp_path, [TASK.id]).blocking


def test_memory_leaves_the_domains_context_policy_alone():
    inner = load_domain("frozenlake")
    assert remembering(Path(), inner=inner).context() == inner.context() != Domain.context(inner)


# ---- what is kept -------------------------------------------------------------------------------------------------------


def test_notes_are_kept_for_later_rollouts_of_the_task_when_they_shall_be(tmp_path):
    for memory, found in (("rollout", "There are no notes."), ("task", "plan")):
        domain = with_memory(DeskDomain(), configured(memory=memory), tmp_path / memory, [TASK.id])
        assert texts(episode(domain, act(write(), LIST))[1]) == ["Saved.", "plan"]
        again = with_memory(DeskDomain(), configured(memory=memory), tmp_path / memory, [TASK.id])  # a restarted server
        assert texts(episode(again, act(LIST))[1]) == [found]
        other = Task("desk", "desk-1", 0, {})
        assert texts(episode(again, act(LIST), task=other)[1]) == ["There are no notes."]
    assert not (tmp_path / "rollout").exists()
    assert [path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == ["task/memory/desk"]


def test_a_session_sees_a_snapshot_and_whoever_ends_last_wins_note_by_note(tmp_path):
    domain = remembering(tmp_path)
    episode(domain, act(write("a", "old"), write("b", "old"), write("c", "old")))
    one, two = started(domain), started(domain)
    one.step(act(write("a", "one"), call("delete_note", name="c")))
    two.step(act(write("a", "two"), write("b", "two")))
    one.step(act(call("leave")))
    assert texts(two.step(act(LIST, call("read_note", name="c")))) == ["c\na\nb", "old"]
    two.step(act(call("leave")))
    assert started(domain)._notes.texts == {"a": "two", "b": "two"}


def test_of_too_many_notes_the_newest_are_kept(tmp_path):
    domain = remembering(tmp_path)
    sessions = [started(domain) for _ in range(3)]
    for env, names in zip(sessions, ("abc", "d", "ce"), strict=True):
        env.step(act(*[write(name) for name in names], call("leave")))
    assert list(started(domain)._notes.texts) == ["d", "c", "e"]


OPS = st.tuples(st.sampled_from("abcde"), st.sampled_from(["write", "write", "delete"]))
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.one_of(OPS, st.just(("", "end")))), max_size=40)


@given(EVENTS)
def test_merging_is_what_its_slow_definition_says(tmp_path_factory, events):
    """Three sessions at a time, each reopened when it ends. A list of pairs, and a log of what each session did."""
    folder = NoteFolder(tmp_path_factory.mktemp("notes"), LIMITS, ["t"])
    kept: list[tuple[str, str]] = []
    sessions = [folder.open("t") for _ in range(3)]
    found, logs = [list(kept) for _ in sessions], [[] for _ in sessions]
    for number, (at, (name, what)) in enumerate(events):
        if what == "end":
            folder.merge("t", sessions[at])
            last = dict(logs[at])  # by name, what the session did to it last
            order = [each for each in dict.fromkeys(each for each, _ in reversed(logs[at])) if last[each]][::-1]
            gone = [each for each in last if last[each] or each in dict(found[at])]
            kept = [pair for pair in kept if pair[0] not in gone] + [(each, last[each]) for each in order]
            kept = kept[-LIMITS.notes :]
            assert list(folder.open("t").texts.items()) == kept
            sessions[at], found[at], logs[at] = folder.open("t"), list(kept), []
        elif what == "delete" and name in sessions[at].texts:
            sessions[at].delete_note(name)
            logs[at].append((name, ""))
        elif what == "write" and (name in sessions[at].texts or len(sessions[at].texts) < LIMITS.notes):
            sessions[at].write_note(name, f"{number}")
            logs[at].append((name, f"{number}"))


def test_a_session_that_wrote_nothing_leaves_the_file_alone(tmp_path):
    domain = remembering(tmp_path / "notes")
    episode(domain, act(LIST, write("a"), call("delete_note", name="a")))
    assert not (tmp_path / "notes").exists()


def test_a_session_that_is_closed_or_fails_before_the_end_leaves_nothing(tmp_path):
    domain = remembering(tmp_path / "notes")
    closed, failed = started(domain), started(domain)
    closed.step(act(write()))
    closed.close()
    with pytest.raises(OSError, match="disk full"):
        failed.step(act(write(), call("breaks")))
    failed.close()
    assert not (tmp_path / "notes").exists()


def test_tasks_that_are_not_for_training_find_no_notes_and_leave_none(tmp_path):
    held = Task("desk", "heldout-0", 0, {})
    episode(remembering(tmp_path, [held.id]), act(write()), task=held)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    observations = episode(remembering(tmp_path), act(LIST, write("b"), LIST), task=held)
    assert texts(observations[1]) == ["There are no notes.", "Saved.", "b"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_admission_with_notes_leaves_none(tmp_path):
    inner = load_domain("frozenlake")
    domain = remembering(tmp_path / "notes", {task.id for task in inner.tasks("train", 4)}, inner)
    assert not build_catalog(domain, dict.fromkeys(SPLITS, 4), -1).quarantined["train"]
    assert not (tmp_path / "notes").exists()


# ---- files --------------------------------------------------------------------------------------------------------------


def test_any_text_is_a_task_and_a_note(tmp_path):
    for task_id in ("a/b", "a_b", "..", "", "Ä" * 300, "a\x00b"):
        folder = NoteFolder(tmp_path / "notes", LIMITS, [task_id])
        notes = folder.open(task_id)
        assert notes.texts == {}
        notes.write_note("Ü ✓", '"\n\x00✓\ud800')  # half of a pair, which UTF-8 cannot write
        folder.merge(task_id, notes)
        assert folder.open(task_id).texts == {"Ü ✓": '"\n\x00✓?'}
    assert len(list((tmp_path / "notes").glob("*.json"))) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Invalid JSON"),
        (b'{"task": "t", "notes": [{"name": "a", "te', "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
        (b"[]", "should be an object"),
        (b'{"task": "t", "notes": [{"name": "a", "text": 3}]}', "notes.0.text"),
        (b'{"task": "t", "notes": [], "more": 1}', "more: Extra inputs"),
        (b'{"task": "u", "notes": []}', "of task 't'"),
        (b'{"task": "t", "notes": [{"name": "a", "text": "1"}, {"name": "a", "text": "2"}]}', "each name once"),
    ],
)
def test_a_file_that_holds_no_notes_is_named_and_never_overwritten(tmp_path, content, words):
    folder = NoteFolder(tmp_path, LIMITS, ["t"])
    notes = folder.open("t")
    notes.write_note("a", "1")
    path = folder.path("t")
    path.write_bytes(content)
    for attempt in (lambda: folder.open("t"), lambda: folder.merge("t", notes)):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert words in str(caught.value)
        assert "repair or remove it" in str(caught.value)
    assert path.read_bytes() == content
