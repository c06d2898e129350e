"""041: a reward that is no number is no evidence. It leaves the group, the sampler's statistics and the loss, and is counted."""

from __future__ import annotations

import numpy as np
import pytest

from common.config_algorithm import AlgorithmConfig
from learner.credit import of_batch
from learner.examples import group_of
from tests.control.scripted import hand_in, lease, started, step, trajectory

FOUR = {"algorithm": {"group_size": 4, "groups_per_update": 1}}


def answer(control, asked, rewards):
    """Deliver a reward per member of one group; those that are refused come again, and are refused again. Their attempts."""
    attempts = []
    while asked:
        for one in asked:
            reward = rewards[int(one.rollout_id.rsplit("-", 1)[1])]
            status = hand_in(control, trajectory(one, steps=(step([3, 4], [(0, 1)], reward),)))
            assert status == ("STORED" if np.isfinite(reward) else "REFUSED")
            attempts.append(one.attempt)
        again = sum(not np.isfinite(reward) for reward in rewards) if attempts[-1] == 1 else 0
        asked = lease(control, again) if again else []
    return attempts


@pytest.mark.parametrize("invalid", [np.nan, np.inf, -np.inf])
def test_041_invalid_rewards_leave_the_group_and_the_statistics(tmp_path, invalid):
    """A task with 4 successes in 8; then 1, invalid, invalid, 0: 5 in 10, whose variance is .25 (as failures they would make it 5
    in 12, .243). Of the two that are left: ±1, with the population's std .5."""
    control, _, events = started(tmp_path, **FOUR)
    asked = lease(control, 4)
    for number in range(8):
        control.dispatch.sampler.record(asked[0].task, number % 2 == 0)
    assert answer(control, asked, [1.0, invalid, invalid, 0.0]) == [1, 1, 1, 1, 2, 2]
    numbers = control.dispatch.sampler.statistics["toy"][asked[0].task.id]
    assert (numbers.n, numbers.successes) == (10, 5)
    chance = numbers.successes / numbers.n
    assert chance * (1 - chance) == 0.25
    assert control.reasons()["failed"] == {"refused:finite_rewards": 2}
    assert len(events.of("rollout_failed")) == 4
    batch = control.take(0)
    assert batch is not None
    algorithm = AlgorithmConfig(std_ddof=0, group_size=4, groups_per_update=1, minibatches=1)
    (group,) = [group_of(list(own), batch.live, algorithm) for own in batch.groups]
    assert [rollout.trajectory.total_reward for rollout in group] == [1.0, 0.0]
    assert sum(int(mask.sum()) for rollout in group for mask in rollout.masks) == 4
    found = [parts[0].advantages[-1] for parts in of_batch([group], algorithm)[0]]
    np.testing.assert_allclose(found, [1, -1], atol=1e-5)


def test_041_a_group_of_invalid_rewards_is_no_update_and_its_place_is_free(tmp_path):
    control, _, _ = started(tmp_path, **FOUR)
    assert answer(control, lease(control, 4), [np.nan] * 4) == [1] * 4 + [2] * 4  # tried again before it is given up
    assert control.take(0) is None
    assert control.dispatch.sampler.statistics["toy"] == {}
    counts = control.counts()
    assert (counts["failed"], counts["trained"]) == (4, 0)
    assert len(lease(control, 4)) == 4  # others take their place
