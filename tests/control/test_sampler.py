"""The uniform task sampler: epochs, weights, and going on after a restart."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tasks import fingerprint
from learner.sampler import TaskSampler, TaskStatistics
from tests.control.scripted import make_tasks


def make(count: int = 8, seed: int = 3, **weights: float) -> TaskSampler:
    weights = weights or {"toy": 1.0}
    return TaskSampler({name: make_tasks(name, "train", count) for name in weights}, weights, seed)


def draw(sampler: TaskSampler, count: int) -> list[str]:
    return [f"{task.domain}/{task.id}" for task in (sampler.next() for _ in range(count))]


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


def test_domains_share_by_weight():
    """4,000 draws at 3 : 1; the standard deviation of the share is sqrt(.75 * .25 / 4000) = 0.0068."""
    counts = Counter(name.split("/")[0] for name in draw(make(a=3.0, b=1.0), 4000))
    assert abs(counts["a"] / 4000 - 0.75) < 5 * 0.0068


@given(st.integers(0, 40))
def test_a_restored_sampler_draws_what_the_first_would_have_drawn(done):
    first, second = make(a=2.0, b=1.0), make(a=2.0, b=1.0)
    draw(first, done)
    assert second.restore(json.loads(json.dumps(first.state()))) == []
    assert draw(second, 30) == draw(first, 30)


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
    drawn = [first.next() for _ in range(50)]
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
        TaskSampler({"toy": []}, {"toy": 1.0}, 0)
