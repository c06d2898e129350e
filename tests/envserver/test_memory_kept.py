"""Notes of a domain: what it says of them, what is kept for whom, and their files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DomainConfig
from common.tasks import SPLITS
from common.types import Task
from envserver.admission import build_catalog
from envserver.domains import load_domain
from envserver.env import Domain, DomainError
from envserver.memory import with_memory
from envserver.notes import NoteFolder
from envserver.toolenv import Tools
from tests.envserver.desk import (
    LIMITS,
    LIST,
    NAMES,
    TASK,
    Desk,
    DeskDomain,
    act,
    call,
    episode,
    remembering,
    started,
    texts,
    write,
)
from tests.envserver.fakes import Script

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
