"""Notes beside an environment: answers in the order of calls, and what is kept for whom."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Action, Message, Observation, Status
from envserver.domains import load_domain
from envserver.env import Env, EnvMisuse
from envserver.memory import WithMemory
from envserver.notes import NoteFolder
from envserver.testing import DomainConformance, without_clock
from tests.envserver.desk import LIMITS, LIST, NAMES, READ, TASK, DeskDomain, Flat, act, call, remembering, started, texts, write

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
