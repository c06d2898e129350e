"""Which groups train: published formulas by hand, and what the ledger makes of the choice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Task
from learner.ledger import Ledger
from learner.rollouts import Kind, Origin, State
from learner.selection import Selection, deviation, mass, mass_of_code
from tests.control.scripted import rules

TASK = Task("toy", "t", 0, {})

# Four rollouts each: variances (ddof 1) 0, 1/4, 1/3, 1/4, 0; deviations 0, .5, .57735, .5, 0, together 1.57735.
GROUPS = [[0.0] * 4, [1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 0], [1.0] * 4]
DEVIATIONS = [deviation(rewards) for rewards in GROUPS]


def test_the_deviation_of_rewards():
    assert pytest.approx([0, 0.5, (1 / 3) ** 0.5, 0.5, 0]) == DEVIATIONS
    assert deviation([0.1] * 3) == deviation([7.0]) == 0.0  # exactly


@pytest.mark.parametrize(("share", "kept"), [(0.3, [2]), (0.39, [2]), (0.6, [1, 2]), (0.9, [1, 2, 3])])
def test_ragen2_as_in_the_paper(share, kept):
    """Of 5/6, the sum of variances: 0.3 is 1/4 < 1/3; 0.39 is 0.325 (of deviations it would take two: 0.615 > 0.577);
    0.6 is 1/2 < 1/3 + 1/4, the older of two equal ones; 0.9 is 3/4 < 5/6."""
    assert Selection("mass", share).chosen(GROUPS, 5) == kept


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.9, [1, 2, 3]),  # 0.9 * 1.57735 - 0.01 = 1.4096 > 0.57735 + 0.5
        (0.69, [1, 2, 3]),  # 0.69 * 1.57735 - 0.01 = 1.07837 > 1.07735
        (0.685, [1, 2]),  # 0.685 * 1.57735 - 0.01 = 1.07048; without the slack 1.08048 would be above 1.07735
        (1.0, [1, 2, 3]),  # off: all that take part
    ],
)
def test_ragen2_as_in_the_code_linear(share, kept):
    assert Selection("mass", share, "linear").chosen(GROUPS, 5) == kept


def test_ragen2_as_in_the_code_softmax():
    """exp: 1, 1.64872, 1.78132, 1.64872, 1; sum 7.07877. In falling order 0.25164, 0.48455, 0.71746, 0.85873, 1: of 0/1 rewards,
    0.9 keeps everything. Ten times the rewards: exp of the distance to the highest 1, e^-.7735 = .4614 twice, e^-5.7735 = .0031
    twice; sum 1.9290: 0.5184, 0.7576, 0.9968."""
    assert Selection("mass", 0.9, "softmax", True).chosen(GROUPS, 5) == [0, 1, 2, 3, 4]
    assert Selection("mass", 0.71, "softmax", True).chosen(GROUPS, 5) == [1, 2, 3]
    assert Selection("mass", 0.48, "softmax", True).chosen(GROUPS, 5) == [1, 2]
    assert Selection("mass", 0.9, "softmax").chosen(GROUPS, 5) == [1, 2, 3]
    tenfold = [[10 * reward for reward in rewards] for rewards in GROUPS]
    assert Selection("mass", 0.9, "softmax", True).chosen(tenfold, 5) == [1, 2, 3]
    assert Selection("mass", 0.75, "softmax", True).chosen(tenfold, 5) == [1, 2]


def test_ragen2_over_given_deviations():
    """.5 .3 .15 .05 0, sum 1: the linear form wants .89 and stops at .5 + .3 + .15; with softmax all five are needed: of 1.649,
    1.350, 1.162, 1.051, 1, the powers of e, four are .839. The first two have nine tenths of the variances, .365 in all."""
    deviations = [0.5, 0.3, 0.15, 0.05, 0.0]
    assert mass_of_code(deviations, 0.9, "linear", False) == [0, 1, 2]
    assert mass_of_code(deviations, 0.9, "softmax", True) == [0, 1, 2, 3, 4]
    assert mass([0.25, 0.5, 0.25], 0.5) == [1]  # reached exactly, in binary fractions
    assert mass([d * d for d in deviations], 0.9) == [0, 1]  # .34 > .9 * .365 = .3285


def test_without_any_spread_nothing_is_chosen_but_by_the_softmax_over_all():
    flat = [GROUPS[0], GROUPS[4]]
    for form, include_zero in (("paper", False), ("linear", False), ("linear", True), ("softmax", False)):
        assert Selection("mass", 0.9, form, include_zero).chosen(flat, 2) == []
    assert mass_of_code([0.0, 0.0], 0.9, "softmax", True) == [0, 1]
    assert mass_of_code(DEVIATIONS, 1.0, "linear", True) == [0, 1, 2, 3, 4]  # off
    assert mass([0.1, 0.2, 0.3, 0.0], 1.0) == [2, 1, 0]  # 0.3 + 0.2 + 0.1 is less than 0.1 + 0.2 + 0.3, in floating point


def test_starpo_s_trains_the_share_with_the_highest_deviation():
    selection = Selection("top_std", 0.25)
    assert selection.candidates(2) == 8
    wide = [0.0, 2.0]  # deviation 1.41421
    drawn = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], wide, [0.0, 1.0], [0.5, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert selection.chosen(drawn, 2) == [1, 3]  # the widest, and the oldest of three at 0.70711
    assert selection.chosen(drawn, 4) == [1, 3, 4, 7]


def test_dapo_keeps_what_has_some_but_not_all_correct():
    selection = Selection("signal")
    assert [selection.fruitless(rewards) for rewards in GROUPS] == [True, False, False, False, True]
    assert not Selection().fruitless(GROUPS[0])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0.01, 1))
def test_the_mass_is_reached_by_no_fewer_groups(scores, share):
    """Against the definition: the shortest prefix, by falling score, that reaches the threshold."""
    kept, ordered = mass(scores, share), sorted(scores, reverse=True)
    shortest = next((n for n in range(len(scores) + 1) if sum(ordered[:n]) >= share * sum(scores)), len(scores))
    assert [scores[index] for index in kept] == ordered[: len(kept)]
    assert len(kept) == min(shortest, sum(score > 0 for score in scores))


# ---- in the ledger ------------------------------------------------------------------------------------------


def ledger_with(selection: Selection, **changes) -> Ledger:
    ledger = Ledger(rules(selection=selection, **changes), 1)
    ledger.published(1, 0)
    return ledger


def fill(ledger: Ledger, *groups: list[float], kind: Kind = Kind.RL, version: int = 1) -> list[str]:
    """Open groups and deliver their rewards; their ids."""
    ids = []
    for rewards in groups:
        group = ledger.open(kind, TASK)
        ids.append(group.id)
        for rollout, reward in zip(ledger.lease("a", len(rewards), kind, 0.0), rewards, strict=True):
            ledger.delivered(rollout.id, (Origin(version, "main"),), ("f", 0), reward)
    return ids


def test_a_group_without_signal_makes_room_at_once():
    ledger = ledger_with(Selection("signal"))  # capacity (1 + 1) * 2
    fill(ledger, [0.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    assert ledger.reasons(Kind.RL) == {"filtered": {"no_signal": 4}}
    assert (ledger.capacity(Kind.RL), ledger.fruitless, len(ledger.groups)) == (3, 2, 1)
    assert ledger.take(Kind.RL) == []  # one of two
    (_, last) = fill(ledger, [0.0, 0.0], [1.0, 0.0])
    assert [group.id for group in ledger.take(Kind.RL)] == ["1-g000001", last]
    assert ledger.fruitless == 0
    ledger.commit()
    counts = ledger.counts(Kind.RL)
    assert (counts["dispatched"], counts["trained"], counts["filtered"], counts["open"]) == (10, 4, 6, 0)


def test_a_stale_members_reward_still_makes_a_signal():
    ledger = ledger_with(Selection("signal"), max_lag=0, groups_per_update=1)
    group = ledger.open(Kind.RL, TASK)
    one, two = ledger.lease("a", 2, Kind.RL, 0.0)
    ledger.delivered(one.id, (Origin(1, "main"),), ("f", 0), 1.0)
    ledger.update = 1
    ledger.published(2, 1)
    ledger.purge()
    assert one.state is State.STALE
    ledger.delivered(two.id, (Origin(2, "main"),), ("f", 0), 0.0)
    assert group.rewards == [1.0, 0.0]
    assert ledger.take(Kind.RL) == [group]


def test_starpo_s_draws_more_groups_than_it_trains():
    ledger = ledger_with(Selection("top_std", 0.5), updates=2)
    assert (ledger.need(Kind.RL), ledger.capacity(Kind.RL)) == (4, 8)  # 2 / 0.5, and (1 + 1) * 4
    ids = fill(ledger, [0.0, 1.0], [0.0, 0.0], [0.0, 2.0])
    assert ledger.take(Kind.RL) == []
    fill(ledger, [1.0, 1.0], [0.0, 5.0])  # the fifth is for the next update
    assert [group.id for group in ledger.take(Kind.RL)] == [ids[0], ids[2]]
    assert ledger.reasons(Kind.RL) == {"filtered": {"low_spread": 4}}
    ledger.commit()
    assert ledger.capacity(Kind.RL) == 3  # one update is left: 4, one of which waits


def test_ragen2_trains_fewer_groups_and_an_empty_choice_is_no_update():
    ledger = ledger_with(Selection("mass", 0.5))
    (wide, _) = fill(ledger, [0.0, 2.0], [0.0, 1.0])
    assert [group.id for group in ledger.take(Kind.RL)] == [wide]  # variance 2 of 2.5
    ledger.commit()
    fill(ledger, [1.0, 1.0], [0.0, 0.0])
    assert ledger.take(Kind.RL) == []
    assert ledger.reasons(Kind.RL) == {"filtered": {"low_spread": 2, "no_spread": 4}}
    assert (ledger.fruitless, ledger.update, ledger.capacity(Kind.RL)) == (2, 1, 4)


@pytest.mark.parametrize("name", ["signal", "top_std", "mass"])
def test_reference_solutions_are_not_selected(name):
    ledger = ledger_with(Selection(name, 0.5), warm_updates=1, warm_rollouts=2)
    fill(ledger, [1.0], [1.0], kind=Kind.WARM)
    assert len(ledger.take(Kind.WARM)) == 2


def test_rewards_and_what_was_filtered_in_a_row_survive_a_restart():
    ledger = ledger_with(Selection("mass", 0.5))
    fill(ledger, [1.0, 1.0], [0.0, 0.0])
    ledger.take(Kind.RL)
    fill(ledger, [0.0, 2.0], [0.0, 1.0])
    again = Ledger(ledger.rules, 2)
    again.restore(json.loads(json.dumps(ledger.state())))
    assert again.fruitless == 2
    assert [group.rewards for group in again.take(Kind.RL)] == [[0.0, 2.0]]
