"""Samplers that weigh tasks: their formulas by hand, draws by weight, and exact continuation from a saved state."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config_tasks import TasksConfig
from learner.sampler import TaskSampler
from learner.weighing import Alignment, SumTree, Variance, variance_weight
from tests.control.scripted import make_tasks

VARIANCE = TasksConfig(sampler="variance", decay=0.5, floor=0.05)
LIMR = TasksConfig(sampler="limr", visits=2, floor=0.1)


def make(config: TasksConfig, count: int = 8, group_size: int = 2) -> TaskSampler:
    return TaskSampler({"toy": make_tasks("toy", "train", count)}, 3, config, group_size)


def draw(sampler: TaskSampler, count: int) -> list[str]:
    return [task.id for task in (sampler.next("toy") for _ in range(count))]


def weights_of(tree: SumTree, count: int) -> np.ndarray:
    """Of the first `count` indices: the leaves."""
    return np.array(tree._nodes[tree._size : tree._size + count])


def play(sampler: TaskSampler, groups: int, solve, group_size: int = 2) -> list[int]:
    """Draw a task per group and record its rollouts; `solve(index, member)` says whether one succeeds. Returns the indices."""
    drawn = []
    for _ in range(groups):
        task = sampler.next("toy")
        drawn.append(task.seed)
        for member in range(group_size):
            sampler.record(task, solve(task.seed, member))
    return drawn


# ---- the tree ---------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=20)


@given(WEIGHTS, st.data())
def test_a_changed_tree_is_the_tree_of_the_changed_weights(weights, data):
    tree = SumTree(np.ones(len(weights)))
    for index in data.draw(st.permutations(range(len(weights)))):
        tree.set(index, weights[index])
    assert tree._nodes == SumTree(np.array(weights))._nodes
    assert weights_of(tree, len(weights)).tolist() == weights


@given(WEIGHTS)
def test_every_index_is_found_on_its_share_of_the_unit_interval(weights):
    """The borders of a slow definition: index i has [sum(w[:i]), sum(w[:i + 1])) / sum(w)."""
    tree, ends = SumTree(np.array(weights)), np.cumsum(weights) / sum(weights)
    for index, (low, high) in enumerate(zip([0.0, *ends], ends, strict=False)):
        assert tree.find(low + 0.001 * (high - low)) == index
        assert tree.find(high - 0.001 * (high - low)) == index
    assert tree.find(np.nextafter(1.0, 0.0)) == len(weights) - 1


def test_a_share_begins_with_its_lower_border():
    """Sums of powers of two are exact."""
    tree = SumTree(np.array([0.25, 0.25, 0.5, 1.0]))
    assert [tree.find(border) for border in (0.0, 0.125, 0.25, 0.5)] == [0, 1, 2, 3]


def test_rounding_finds_no_task_behind_the_last():
    """Of eight leaves the last has no weight. What is left of the greatest number below 1 rounds up to all that the last two
    have."""
    weights = [0.0101, 0.0101, 0.6402847336702376, 0.0101, 0.5119513168468947, 0.0101, 0.488583807721338]
    assert SumTree(np.array(weights)).find(np.nextafter(1.0, 0.0)) == 6


# ---- variance ---------------------------------------------------------------------------------------------


def test_the_weight_of_a_task_by_hand():
    assert [variance_weight(p, 0.05) for p in (0.0, 0.25, 0.5, 1.0)] == [0.05, 0.75, 1.0, 0.05]  # 4 * .25 * .75, 4 * .5 * .5
    weigher = Variance(2, 0.5, 0.05)
    assert weights_of(weigher.tree, 2).tolist() == [1.0, 1.0]  # p = (0 + 1/2) / (0 + 1)
    weigher.record(0, True)
    assert weigher.success(0) == 1.5 / 2
    assert weights_of(weigher.tree, 2).tolist() == [0.75, 1.0]  # 4 * .75 * .25
    weigher.record(0, False)
    assert weigher.success(0) == (0.5 * 1 + 0 + 0.5) / (0.5 * 1 + 1 + 1)  # = 0.4
    assert weights_of(weigher.tree, 2).tolist() == [pytest.approx(4 * 0.4 * 0.6), 1.0]


def test_the_past_decays_once_per_group():
    """decay 0.5 with groups of 2: a group of failures leaves half of what 6 successes had weighed."""
    sampler = make(VARIANCE, count=1)
    task = sampler.next("toy")
    for _ in range(6):
        sampler.record(task, True)
    weigher = sampler._domains["toy"].weigher
    before = weigher._successes[0]
    for _ in range(2):
        sampler.record(task, False)
    assert weigher._successes[0] == pytest.approx(before / 2)


def test_draws_follow_the_weights():
    """Task 0 is always solved, task 1 never, task 2 one time in two: 0.1, 0.1 and 1 of 1.2; standard deviations of shares of
    6,000 draws below sqrt(.0833 * .9167 / 6000) = 0.0036 and sqrt(.8333 * .1667 / 6000) = 0.0048."""
    sampler = make(TasksConfig(sampler="variance", decay=0.95, floor=0.1), count=3)
    play(sampler, 200, lambda index, member: index == 0 or (index == 2 and member == 0))
    weigher = sampler._domains["toy"].weigher
    assert weights_of(weigher.tree, 2).tolist() == [0.1, 0.1]
    third = weights_of(weigher.tree, 3)[2]
    counts = Counter(draw(sampler, 6000))
    for index, weight, deviation in ((0, 0.1, 0.0036), (1, 0.1, 0.0036), (2, third, 0.0048)):
        assert abs(counts[f"train-{index}"] / 6000 - weight / (0.2 + third)) < 5 * deviation


def test_086_solved_tasks_are_drawn_on_and_a_regression_is_seen_within_two_visits():
    """100 tasks, groups of 8; the policy solves a third, and all of it after update 50 of 4 groups. With equal weights R = 2,000
    groups miss one of 100 tasks with a probability below 100 * 0.99 ** 2000 = 2e-7.

    Decayed, a task that is always solved has at most 1 / (1 - 0.8 ** (1/8)) = 36.35 rollouts: p = 36.85 / 37.35, weight 0.053.
    A group of 4 in 8 leaves 0.8 * 36.35 = 29.08 successes and adds about 3.63 of 7.27: p about 33.2 / 37.35, a weight of 0.39; a
    second one 0.61."""
    config = TasksConfig(sampler="variance", decay=0.8, floor=0.02)
    sampler = make(config, count=100, group_size=8)
    play(sampler, 4 * 50, lambda index, member: (index + member) % 3 == 0, 8)
    play(sampler, 6000, lambda *_: True, 8)
    assert len(set(play(sampler, 2000, lambda *_: True, 8))) == 100
    weigher = sampler._domains["toy"].weigher
    weights = weights_of(weigher.tree, 100)
    assert weights == pytest.approx(np.full(100, 0.053), abs=0.001)
    for expected in (0.39, 0.61):
        for member in range(8):
            weigher.record(7, member % 2 == 0)
        assert weights_of(weigher.tree, 100)[7] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("config", "solved"), [(VARIANCE, 2), (LIMR, 5)])
def test_086_where_every_task_is_hopeless_or_solved_all_weigh_the_same(config, solved):
    config = config.model_copy(update={"floor": 0.5})  # variance: 3.41 rollouts, p = 0.887, a weight of 0.4 without it
    sampler = make(config, count=5)
    play(sampler, 2000, lambda index, member: index < solved)
    assert set(weights_of(sampler._domains["toy"].weigher.tree, 5).tolist()) == {0.5}
    assert len(set(draw(sampler, 200))) == 5


# ---- LIMR -------------------------------------------------------------------------------------------------


def alignment(rewards: np.ndarray) -> np.ndarray:
    """LIMR's formula over the whole table [tasks, epochs]; NaN where a task was not seen."""
    average = np.nanmean(rewards, axis=0)
    out = []
    for row in rewards:
        seen = ~np.isnan(row)
        most = ((1 - average[seen]) ** 2).sum()
        out.append(1 - ((row[seen] - average[seen]) ** 2).sum() / most if most else 0.0)
    return np.array(out)


def run_epochs(weigher: Alignment, rewards: np.ndarray, group_size: int) -> None:
    """Rollouts that make up `rewards` [tasks, epochs], in multiples of 1/group_size."""
    for column in rewards.T:
        for index, reward in enumerate(column):
            for member in range(group_size):
                weigher.record(index, member < round(reward * group_size))


def test_alignment_by_hand():
    """Epoch means 1/3, 1/2, 2/3. Task 0: 1 - (1/9 + 0 + 1/9) / (4/9 + 1/4 + 1/9) = 1 - (8/36) / (29/36) = 21/29. Always solved:
    0. Never solved: 1 - (1/9 + 1/4 + 4/9) / (29/36) = 0."""
    rewards = np.array([[0.0, 0.5, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    weigher = Alignment(3, 2, LIMR)
    run_epochs(weigher, rewards, 2)
    assert weigher.scores().tolist() == pytest.approx([21 / 29, 0.0, 0.0])
    assert weights_of(weigher.tree, 3).tolist() == [1.0, 0.1, 0.1]  # above 0.6, and not
    assert alignment(rewards).tolist() == pytest.approx([21 / 29, 0.0, 0.0])


def test_alignment_over_four_epochs():
    """Means 1/4, 1/2, 5/8, 3/4 over tasks. Task 0: 1 - (1/16 + 0 + 9/64 + 1/16) / (9/16 + 1/4 + 9/64 + 1/16) = 1 - 17/65; never
    solved: 1 - 81/65, below 0."""
    rewards = np.array([[0, 0.5, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0.5, 0.5, 1]])
    weigher = Alignment(4, 2, LIMR)
    run_epochs(weigher, rewards, 2)
    assert weigher.scores().tolist() == pytest.approx([0.738462, 0.0, -0.246154, 0.861538], abs=1e-6)
    assert weights_of(weigher.tree, 4).tolist() == [1.0, 0.1, 0.1, 1.0]


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_alignment_summed_up_by_epochs_is_the_formula(tasks, epochs, data):
    table = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=epochs, max_size=epochs), min_size=tasks, max_size=tasks))
    rewards = np.array(table) / 4
    weigher = Alignment(tasks, 4, LIMR)
    run_epochs(weigher, rewards, 4)
    np.testing.assert_allclose(weigher.scores(), alignment(rewards), atol=1e-12)


def test_a_task_is_judged_after_so_many_epochs_in_which_it_was_seen():
    """Two tasks, groups of 2: 4 rollouts an epoch. Task 0 is always solved; task 1, at 1/2, is missed in the second epoch and
    judged after the third: 1 - 2 (1/2 - 3/4)^2 / (2 (1 - 3/4)^2) = 0."""
    weigher = Alignment(2, 2, LIMR)  # visits = 2
    both, one = [(0, True), (0, True), (1, True), (1, False)], [(0, True)] * 4
    for epoch, weights in ((both, [1.0, 1.0]), (one, [0.1, 1.0]), (both, [0.1, 0.1])):
        for index, success in epoch:
            weigher.record(index, success)
        assert weights_of(weigher.tree, 2).tolist() == weights
    assert weigher.scores().tolist() == [0.0, 0.0]


def test_the_mean_of_an_epoch_is_over_tasks_and_a_score_at_the_threshold_is_not_above_it():
    """Three rollouts of task 0 succeed, one of task 1 fails: the mean is 1/2, not 3/4, and both scores 1 - (1/2)^2 / (1/2)^2."""
    weigher = Alignment(2, 2, TasksConfig(sampler="limr", visits=2, floor=0.1, threshold=0.0))
    for index, success in 2 * ([(0, True)] * 3 + [(1, False)]):
        weigher.record(index, success)
    assert weigher.scores().tolist() == [0.0, 0.0]
    assert weights_of(weigher.tree, 2).tolist() == [0.1, 0.1]


# ---- any sampler ------------------------------------------------------------------------------------------

CONFIGS = st.sampled_from([TasksConfig(), VARIANCE, LIMR])


@given(CONFIGS, st.lists(st.booleans(), max_size=60))
@example(LIMR, [True, True, False, True] * 15)  # long enough for tasks to be judged
def test_a_restored_sampler_weighs_and_draws_as_the_first_would_have(config, outcomes):
    first, second = make(config), make(config)
    for success in outcomes:
        first.record(first.next("toy"), success)
    assert second.restore(json.loads(json.dumps(first.state()))) == []
    for _ in range(20):
        task, again = first.next("toy"), second.next("toy")
        assert task.id == again.id
        first.record(task, task.seed % 2 == 0)
        second.record(again, again.seed % 2 == 0)
    assert json.dumps(first.state()) == json.dumps(second.state())


@given(st.sampled_from([VARIANCE, LIMR]), st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=80))
def test_no_task_ever_has_probability_zero(config, outcomes):
    sampler = make(config)
    for index, success in outcomes:
        sampler.record(sampler._domains["toy"].tasks[index], success)
    weights = weights_of(sampler._domains["toy"].weigher.tree, 8)
    assert np.all((weights >= config.floor) & (weights <= 1))
    shares = weights / sampler._domains["toy"].weigher.tree._nodes[1]
    assert shares.sum() == pytest.approx(1)
    assert shares.min() >= config.floor / 8


def test_090_of_changed_tasks_the_known_ones_keep_their_weights():
    first, second = make(VARIANCE, count=8), make(VARIANCE, count=5)
    for task in first._domains["toy"].tasks[2:]:
        first.record(task, True)
    assert second.restore(json.loads(json.dumps(first.state()))) == ["toy"]
    assert weights_of(second._domains["toy"].weigher.tree, 5).tolist() == [1.0, 1.0, 0.75, 0.75, 0.75]


@pytest.mark.parametrize("config", [TasksConfig(), VARIANCE])
def test_references_are_drawn_once_per_epoch(config):
    single = make(config, count=8)
    for task in single._domains["toy"].tasks[:7]:
        for _ in range(20):
            single.record(task, True)
    assert sorted(single.next_uniform("toy").seed for _ in range(8)) == list(range(8))
