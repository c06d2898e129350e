"""Turn budgets by stage, and how well a whole domain does: both pure."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from common.config_tasks import CurriculumConfig
from learner.curriculum import Curriculum
from learner.domain_success import GROUPS, DomainSuccess, fell

SUCCESS = CurriculumConfig(kind="success", turns=[2, 4, 8], mastered=0.75, window=4)


def test_scaling_inter_rl_as_published():
    """WebArena: [8, 12, 15] turns, a stage more every 80 updates."""
    curriculum = Curriculum(CurriculumConfig(kind="stages", preset="webarena"))
    stages = {update: curriculum.stage(update) for update in (0, 79, 80, 159, 160, 1000)}
    assert stages == {0: 1, 79: 1, 80: 2, 159: 2, 160: 3, 1000: 3}
    assert [curriculum.max_turns(stage, 30) for stage in (1, 2, 3, 0)] == [8, 12, 15, 30]
    assert [curriculum.max_turns(stage, 10) for stage in (1, 2, 3, 0)] == [8, 10, 10, 10]


def test_without_a_curriculum_there_is_one_budget():
    curriculum = Curriculum(CurriculumConfig())
    curriculum.record(0, True)
    assert (curriculum.stage(10**6), curriculum.max_turns(0, 7)) == (0, 7)


def test_a_stage_ends_when_the_newest_rollouts_master_it():
    curriculum = Curriculum(SUCCESS)  # 3 of the newest 4
    for success in (True, True, True):
        curriculum.record(1, success)
    assert curriculum.stage(0) == 1  # three are not four
    curriculum.record(1, False)
    assert curriculum.stage(0) == 2
    for _ in range(4):
        curriculum.record(1, True)  # opened before: says nothing of this budget
    curriculum.record(2, True)  # nor do the three of the stage before
    assert curriculum.stage(0) == 2
    for success in (False, False, True, True, True):
        curriculum.record(2, success)
    assert curriculum.stage(10**6) == 3
    for _ in range(4):
        curriculum.record(3, True)  # the last one is for ever
    assert curriculum.stage(0) == 3


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40), st.lists(st.booleans(), max_size=10))
def test_a_restored_curriculum_goes_on_and_stages_only_rise(first, later):
    one, two = Curriculum(SUCCESS), Curriculum(SUCCESS)
    for stage, success in first:
        before = one.stage(0)
        one.record(stage, success)
        assert before <= one.stage(0) <= before + 1
    two.restore(json.loads(json.dumps(one.state())))
    for success in later:
        one.record(one.stage(0), success)
        two.record(two.stage(0), success)
        assert one.stage(0) == two.stage(0)


def test_a_run_goes_on_with_fewer_stages_than_it_had():
    """Groups of a stage that is gone have the last budget, and so has the run itself; without stages it is in none."""
    shorter = Curriculum(CurriculumConfig(kind="success", turns=[2, 4]))
    assert shorter.max_turns(3, 30) == 4
    shorter.restore({"stage": 3, "window": [True]})
    assert shorter.state() == {"stage": 2, "window": [True]}
    none = Curriculum(CurriculumConfig())
    none.restore({"stage": 3, "window": []})
    assert none.state()["stage"] == 1


def test_stages_by_updates_look_at_no_success():
    curriculum = Curriculum(CurriculumConfig(kind="stages", turns=[2, 4, 8], every=5))
    for _ in range(1000):
        curriculum.record(1, True)
    assert curriculum.state() == {"stage": 1, "window": []}
    assert curriculum.stage(4) == 1


# ---- success of a domain ----------------------------------------------------------------------------------


def watch(outcomes, domain: DomainSuccess | None = None) -> list[int]:
    """Where a drop is told; groups of one."""
    domain = domain or DomainSuccess(1)
    return [index for index, success in enumerate(outcomes) if domain.record(success)]


HALF = [True, False] * 100


def test_a_drop_is_half_of_before_and_more_than_chance():
    """Before: 48 of 96 groups; now 6 or 7 of 32. Pooled 54/128: 3 * sqrt(.4219 * .5781 * (1/96 + 1/32)) = 0.302 < .5 - .1875;
    55/128: 0.303 > .5 - .21875 = 0.281. After 16 of 16, 15 in 32: pooled 31/48, 3 * sqrt(.6458 * .3542 * (1/16 + 1/32)) = 0.439 <
    1 - 15/32 = 0.531; 16 in 32 is no less than half."""
    assert fell(0.5, 96, 6 / 32)
    assert not fell(0.5, 96, 7 / 32)
    assert fell(1.0, 16, 15 / 32)
    assert not fell(1.0, 16, 16 / 32)
    assert not fell(0.0, 1000, 0.0)


def test_a_drop_is_told_once_and_again_after_a_recovery():
    outage, healthy = [False] * 40, [True, False] * 40
    first, second = watch([*HALF, *outage, *healthy, *outage])
    assert 200 < first < 240  # 200 outcomes of HALF
    assert 320 < second < 360


def test_the_outage_is_no_part_of_the_long_run():
    domain = DomainSuccess(1)
    assert len(watch([*HALF, *[False] * 5000], domain)) == 1
    assert abs(domain.long_run - 0.5) < 0.05
    domain.record(True)
    again = DomainSuccess(1)
    again.restore(json.loads(json.dumps(domain.state())))
    assert again.newest == domain.newest == 1 / 32
    assert watch([False] * 200, again) == []  # it was told before the restart
    assert len(watch([*HALF, *[False] * 200], again)) == 1


def test_slow_decline_and_a_bad_domain_are_no_drop():
    """Success 1/10 in the long run: 3 * sqrt(0.09 / 32) = 0.16 is more than all of it."""
    assert watch([*[index % 10 == 0 for index in range(500)], *[False] * 200]) == []
    assert watch([False] * 500) == []
    assert watch([True] * 20 + [False] * 43) == []  # 31 have left the window of 32: too little is known of before


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 3))
def test_drops_and_recoveries_alternate_in_any_history(outcomes, group_size):
    """Against the definition: what was told is what `dropped` became true at, with a full window, at less than half of before."""
    domain = DomainSuccess(group_size)
    for index, success in enumerate(outcomes):
        before = domain.dropped
        told = domain.record(success)
        assert told == (domain.dropped and not before)
        window = outcomes[: index + 1][-GROUPS * group_size :]
        assert domain.newest == (sum(window) / len(window) if len(window) == GROUPS * group_size else 0.0)
        if told:
            assert domain.newest < domain.long_run / 2
        again = DomainSuccess(group_size)
        again.restore(json.loads(json.dumps(domain.state())))
        assert (again.state(), again.newest) == (domain.state(), domain.newest)
