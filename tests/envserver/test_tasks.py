"""Splits, drawing, task files, options, the table of domains."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tasks import fingerprint
from common.types import Task
from envserver.domains import DOMAINS, Row, check_installed, load_domain
from envserver.env import DomainError
from envserver.tasks import draw, read_tasks, split_of


def test_split_of_a_content_never_changes():
    """Pinned: a change moves tasks between train and held-out of every run that was ever made."""
    pinned = {"": "train", "4:": "train", "4:b2": "heldout", "2 + 3": "heldout"}
    assert {text: split_of(text) for text in pinned} == pinned


def test_drawn_tasks_are_distinct_in_both_splits_and_in_the_order_of_their_seeds():
    def make(seed):
        return str(seed % 40), {"x": seed % 40}

    train, heldout = draw("d", "train", 10, make), draw("d", "heldout", 10, make)
    assert len({task.payload["x"] for task in train + heldout}) == 20
    assert [task.seed for task in train] == sorted(task.seed for task in train)
    assert all(task.id == f"d-{task.seed}" for task in train + heldout)


@given(st.integers(1, 20), st.integers(1, 20))
def test_more_tasks_begin_with_the_same_tasks(few, more):
    def make(seed):
        return str(seed), seed

    few, more = sorted((few, more))
    assert fingerprint(draw("d", "heldout", more, make)[:few]) == fingerprint(draw("d", "heldout", few, make))


def test_too_few_distinct_tasks_is_one_clear_line():
    with pytest.raises(DomainError, match=r"only \d train tasks .* lower train_tasks \(now 9\)"):
        draw("d", "train", 9, lambda seed: (str(seed % 10), {}))


def test_seeds_without_a_task_are_skipped():
    tasks = draw("d", "train", 3, lambda seed: (str(seed), {}) if seed % 7 == 0 else None)
    assert all(task.seed % 7 == 0 for task in tasks)


def test_fingerprint_changes_with_ids_seeds_payloads_and_order():
    a, b = Task("d", "a", 0, {"x": 1, "y": 2}), Task("d", "b", 0, {})
    prints = {
        fingerprint(tasks)
        for tasks in ([a, b], [b, a], [a], [Task("d", "a", 1, {"x": 1, "y": 2}), b], [Task("d", "a", 0, {"x": 1}), b])
    }
    assert len(prints) == 5
    assert fingerprint([Task("d", "a", 0, {"y": 2, "x": 1}), b]) == fingerprint([a, b])


GOOD = [{"split": "train", "id": "a", "payload": {"v": 1}}, {"split": "heldout", "id": "b", "seed": 5, "payload": {"v": 2}}]


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def content(payload):
    if "v" not in payload:
        raise ValueError("payload has no v")
    return str(payload["v"])


def test_tasks_from_a_file(tmp_path):
    separator = '{"split": "train", "id": "u", "payload": {"v": "a\u2028b"}}'  # legal inside a JSON string, and no end of a line
    tasks = read_tasks(write_lines(tmp_path / "t.jsonl", GOOD[0], "", GOOD[1], separator, ""), "d", content)
    assert [(task.domain, task.id, task.seed, task.payload) for split in ("train", "heldout") for task in tasks[split]] == [
        ("d", "a", 0, {"v": 1}),
        ("d", "u", 0, {"v": "a\u2028b"}),
        ("d", "b", 5, {"v": 2}),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"split": "train", ', "t.jsonl:3: not JSON: .* at column"),
        ({"split": "test", "id": "c", "payload": {"v": 3}}, "t.jsonl:3: split: "),
        ({"split": "train", "id": "c"}, "t.jsonl:3: payload: Field required"),
        ({"split": "train", "id": "c", "payload": {"v": 3}, "sed": 1}, "t.jsonl:3: sed: "),
        ({"split": "train", "id": "a", "payload": {"v": 3}}, "t.jsonl:3: id 'a' stands twice"),
        ({"split": "train", "id": "c", "payload": {"v": 2}}, "t.jsonl:3: task 'c' is in both splits"),
        ({"split": "train", "id": "c", "payload": {}}, "t.jsonl:3: payload has no v"),
        ('{"split": "train", "id": "c", "payload": {"v": NaN}}', "t.jsonl:3: NaN is not JSON"),
        ("[1]", "t.jsonl:3: the line: "),
    ],
)
def test_a_bad_line_of_a_task_file_is_named_with_its_number(tmp_path, line, words):
    with pytest.raises(DomainError, match=words) as caught:
        read_tasks(write_lines(tmp_path / "t.jsonl", *GOOD, line), "d", content)
    assert "\n" not in str(caught.value)


def test_a_task_file_needs_both_splits_and_must_exist(tmp_path):
    with pytest.raises(DomainError, match="no task of split 'heldout'"):
        read_tasks(write_lines(tmp_path / "t.jsonl", GOOD[0]), "d", content)
    with pytest.raises(DomainError, match=r"none\.jsonl"):
        read_tasks(str(tmp_path / "none.jsonl"), "d", content)


def test_unknown_domain_and_missing_extra_are_one_line_with_the_fix():
    with pytest.raises(DomainError, match="unknown domain 'frozen'; known domains: arithmetic, frozenlake"):
        load_domain("frozen")
    table = {"frozenlake": Row(DOMAINS["frozenlake"].load, "no_such_package")}
    with pytest.raises(
        DomainError, match=r"domain 'frozenlake' needs no_such_package: run `make setup`, or pip install -e '.\[frozenlake\]'"
    ):
        check_installed("frozenlake", table)
    assert check_installed("plain", {"plain": Row(DOMAINS["frozenlake"].load)}).package == ""  # it needs nothing more


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"siz": 4}, "domain 'frozenlake': unknown option 'siz'; did you mean 'size'?"),
        ({"colour": 4}, "unknown option 'colour'; known options: size, hole_probability, draw, tasks_file"),
        ({"size": 40}, "option size = 40: Input should be less than or equal to 9"),
        ({"hole_probability": "much"}, "option hole_probability = 'much': "),
    ],
)
def test_wrong_options_name_the_field_and_the_fix(options, words):
    with pytest.raises(DomainError) as caught:
        load_domain("frozenlake", options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_instructions_can_be_replaced_and_name_options(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("A lake of $size x $size. It costs $$5.\n")
    assert load_domain("frozenlake", {"size": 5}, str(path)).instructions == "A lake of 5 x 5. It costs $5."
    path.write_text("A lake of $sise")
    with pytest.raises(DomainError, match=r"bad placeholder \('sise'\); known: \$size, "):
        load_domain("frozenlake", {}, str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(DomainError, match="not UTF-8"):
        load_domain("frozenlake", {}, str(path))
    with pytest.raises(DomainError, match=r"domains\.frozenlake\.instructions: cannot read .*: No such file"):
        load_domain("frozenlake", {}, str(tmp_path / "none.txt"))
