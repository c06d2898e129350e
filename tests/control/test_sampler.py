"""The uniform task sampler: epochs, and going on after a restart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tasks import fingerprint
from learner.sampler import TaskSampler, TaskStatistics
from tests.control.scripted import make_tasks


def make(count: int = 8, seed: int = 3, domains: tuple[str, ...] = ("toy",)) -> TaskSampler:
    return TaskSampler({name: make_tasks(name, "train", count) for name in domains}, seed)


def draw(sampler: TaskSampler, count: int, domain: str = "toy") -> list[str]:
    return [f"{task.domain}/{task.id}" for task in (sampler.next(domain) for _ in range(count))]


@given(st.integers(1, 12), st.integers(0, 100))
def test_every_epoch_has_every_task_once_in_its_own_order(count, seed):
    sampler = make(count, seed)
    epochs = [draw(sampler, count) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == count for epoch in epochs)
    if count > 6:
        assert epochs[0] != epochs[1]


def test_same_seed_same_draws_and_another_seed_others():
    assert draw(make(), 20) == draw(make(), 20)
    assert draw(make(), 20) != draw(make(seed=4), 20)


def test_what_a_domain_draws_does_not_depend_on_when_others_do():
    alone, together = make(domains=("a",)), make(domains=("b", "a"))
    mixed = [draw(together, 1, name) for name in "abbabaabbbaaabaabab"]
    assert [task for (task,) in mixed if task.startswith("a/")] == draw(alone, 10, "a")


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_restored_sampler_draws_what_the_first_would_have_drawn(a, b):
    first, second = make(domains=("a", "b")), make(domains=("a", "b"))
    draw(first, a, "a")
    draw(first, b, "b")
    assert second.restore(json.loads(json.dumps(first.state()))) == []
    assert [draw(second, 30, name) for name in "ab"] == [draw(first, 30, name) for name in "ab"]


def test_089_a_checkpoint_at_an_epoch_boundary_starts_the_next_epoch():
    """8 tasks, 4 an update, 3 epochs: saved after update 2, exactly 4 more updates of new epochs follow."""
    first = make(8)
    draw(first, 8)
    second = make(8)
    second.restore(first.state())
    rest = draw(second, 16)
    assert sorted(rest[:8]) == sorted(rest[8:]) == sorted(set(rest))
    assert len(set(rest)) == 8


def test_090_changed_tasks_start_anew_and_keep_the_statistics_of_known_ids():
    first = make(80)
    drawn = [first.next("toy") for _ in range(50)]
    for task in drawn[:50]:
        first.record(task, success=task.seed % 2 == 0)
    state = json.loads(json.dumps(first.state()))
    second = make(30)
    assert second.restore(state) == ["toy"]
    known = {task.id: TaskStatistics(1, int(task.seed % 2 == 0)) for task in drawn if task.seed < 30}
    assert second.statistics["toy"] == known
    assert draw(second, 30) == draw(make(30), 30)  # from the first index of the first epoch


def test_a_changed_payload_changes_the_fingerprint():
    a, b = make_tasks("toy", "train", 3), make_tasks("toy", "train", 3)
    assert fingerprint(a) == fingerprint(b)
    b[1].payload["n"] = 7
    assert fingerprint(a) != fingerprint(b)


def test_a_domain_without_tasks_is_refused():
    with pytest.raises(ValueError, match="'toy' lists no training tasks"):
        TaskSampler({"toy": []}, 0)
