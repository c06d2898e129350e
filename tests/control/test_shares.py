"""Several domains: who has how many seats and open groups, whose rollouts are leased, whom a batch waits for and for how long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import Task
from learner.ledger import Ledger
from learner.rollouts import Group, Kind, Origin, Rollout, State
from learner.selection import Selection
from learner.shares import Shares, apportion
from tests.control.scripted import rules

EQUAL = {"a": 1.0, "b": 1.0}
WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1)


# ---- whole numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "claims", "seats"),
    [
        (10, {"a": 4.3, "b": 3.3, "c": 2.4}, {"a": 4, "b": 3, "c": 3}),  # 9 whole ones; the largest remainder has the tenth
        (4, {"a": 4 / 3, "b": 4 / 3, "c": 4 / 3}, {"a": 2, "b": 1, "c": 1}),  # of equal remainders the first
        (3, {"a": 2.9, "b": -0.4, "c": 0.5}, {"a": 3, "b": 0, "c": 0}),
        (2, {"a": 1.8, "b": 1.1, "c": -0.9}, {"a": 1, "b": 1, "c": 0}),  # whole ones are 1, 1 and not -1
        (0, {"a": 0.0}, {"a": 0}),
        (5, {}, {}),
    ],
)
def test_apportion(total, claims, seats):
    assert apportion(total, claims) == seats


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 40), st.integers(1, 30), st.integers(1, 5))
def test_seats_sum_to_the_batch_and_over_time_to_the_weights(weights, before, need, batches):
    """After any number of batches every domain has what its weight is worth, but for less than one group (two domains), and less
    than the number of domains in any case; capacity is the seats of the batches that it is for."""
    shares, given_ = Shares(weights), Counter()
    for _ in range(before):
        seats = shares.seats(need)
        assert sum(seats.values()) == need
        given_.update(seats)
        shares.made(need)
    for name, weight in weights.items():
        off = abs(given_[name] - before * need * weight / sum(weights.values()))
        assert off < max(1, len(weights) - 1) + 1e-6
    ahead = shares.of_capacity(need, batches)
    assert sum(ahead.values()) == need * batches
    for _ in range(batches):
        ahead = {name: n - shares.seats(need)[name] for name, n in ahead.items()}
        shares.made(need)
    assert set(ahead.values()) == {0}


def test_a_weight_worth_less_than_a_group_has_one_now_and_then():
    """2 groups a batch, three equal domains: 2/3 of a group each."""
    shares, seen = Shares(dict.fromkeys("abc", 1.0)), []
    for _ in range(3):
        seen.append("".join(name for name, n in shares.seats(2).items() for _ in range(n)))
        shares.made(2)
    assert seen == ["ab", "ac", "bc"]


# ---- a ledger of several domains ---------------------------------------------------------------------------


@dataclass
class World:
    """A ledger, and actors that answer for domains that answer."""

    ledger: Ledger
    dead: set[str] = field(default_factory=set)
    rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by member; (0, 1) unless given
    kind: Kind = Kind.RL

    def fill(self) -> list[Group]:
        """Open all groups that may be open."""
        return [self.ledger.open(self.kind, Task(name, "t", 0, {})) for name in self.ledger.to_open(self.kind)]

    def play(self) -> None:
        """Lease everything and answer."""
        self.fill()
        for rollout in self.ledger.lease("actor", 1000, self.kind, 0.0):
            self.answer(rollout)

    def answer(self, rollout: Rollout) -> None:
        group, _ = self.ledger.find(rollout.id)
        if group.task.domain not in self.dead:
            reward = self.rewards.get(group.task.domain, (0.0, 1.0))[rollout.member]
            self.ledger.delivered(rollout.id, (Origin(1, "main"),), ("", 0), reward)

    def open(self) -> dict[str, int]:
        return dict(sorted((name, groups.open) for name, groups in self.ledger.held(self.kind).items()))

    def update(self) -> dict[str, int]:
        """Make an update, if there is a batch; its domains."""
        groups = self.ledger.take(self.kind)
        if groups:
            self.ledger.commit()
            self.ledger.published(1, self.ledger.update)  # nothing grows old here
        return dict(sorted(Counter(group.task.domain for group in groups).items()))


def world(weights: dict[str, float] = EQUAL, **changes) -> World:
    ledger = Ledger(rules(weights=weights, **changes), 1)
    ledger.published(1, 0)
    return World(ledger)


def test_open_groups_are_shared_by_weight():
    """(max_lag 1 + 1) * 4 = 8 groups at 3 : 1; domains open in turn."""
    w = world({"a": 3.0, "b": 1.0}, groups_per_update=4)
    assert "".join(group.task.domain for group in w.fill()) == "abaaabaa"
    assert w.open() == {"a": 6, "b": 2}


def test_a_fast_domain_neither_takes_the_seats_of_a_slow_one_nor_its_places():
    w = world(groups_per_update=4)
    w.dead = {"b"}
    w.play()
    assert (w.open(), w.update()) == ({"a": 4, "b": 4}, {})  # 4 of a are complete, and would make a batch
    assert w.ledger.missing(Kind.RL) == {"b": 2}
    for rollout in [r for r in w.ledger.rollouts(Kind.RL) if r.state is State.LEASED][:6]:  # three groups of b
        w.dead = set()
        w.answer(rollout)
    assert w.update() == {"a": 2, "b": 2}
    w.fill()
    assert w.open() == {"a": 4, "b": 4}


def test_leases_go_to_domains_in_turn():
    """Three slots in four are for a; what b has leased already counts."""
    w = world({"a": 3.0, "b": 1.0}, groups_per_update=4)
    w.fill()
    order = [w.ledger.find(r.id)[0].task.domain for r in w.ledger.lease("actor", 8, Kind.RL, 0.0)]
    assert "".join(order) == "aaabaaab"
    for rollout in list(w.ledger.rollouts(Kind.RL)):
        if rollout.state is State.LEASED and w.ledger.find(rollout.id)[0].task.domain == "a":
            w.answer(rollout)
    order = [w.ledger.find(r.id)[0].task.domain for r in w.ledger.lease("actor", 4, Kind.RL, 0.0)]
    assert "".join(order) == "aaaa"  # 12 rollouts in 16 are a's: 6 of them came back, 2 of b are out


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("weights", [EQUAL, {"a": 1.0, "b": 9.0}, dict.fromkeys("abc", 1.0)])
@pytest.mark.parametrize("take", ["fixed", "drain"])
def test_a_dead_domain_does_not_keep_the_others_from_full_batches(max_lag, weights, take):
    """b holds groups and nothing of it ever comes. Once given up, every batch is whole, to the last update; b tries one group."""
    w = world(weights, groups_per_update=4, max_lag=max_lag, take=take, updates=6)
    w.dead = {"b"}
    w.play()
    held = w.open()["b"]
    assert (w.update(), w.ledger.give_up(Kind.RL)) == ({}, ["b"])
    for _ in range(6):
        for _ in range(3):
            w.play()
        made = w.update()
        assert sum(made.values()) >= 4
        assert "b" not in made
    assert w.ledger.update == 6
    assert w.open() == {"b": held}
    w.ledger.cancel(*Kind)
    assert w.ledger.counts(*Kind)["open"] == 0


def test_a_domain_that_comes_back_has_its_seats_again():
    w = world(groups_per_update=4)
    w.dead = {"b"}
    w.play()
    w.ledger.give_up(Kind.RL)
    w.play()
    assert w.open() == {"a": 8, "b": 4}  # a has all of the capacity; what b holds is not counted
    assert w.update() == {"a": 4}
    w.fill()
    w.dead = set()
    for rollout in [r for r in w.ledger.rollouts(Kind.RL) if r.state is State.LEASED]:
        w.answer(rollout)
    assert w.ledger.shares[Kind.RL].late == set()
    assert w.fill() == []  # 12 are open, of 8 that may be
    for _ in range(3):
        w.play()
        assert w.update() == {"a": 2, "b": 2}
    w.fill()
    assert w.open() == {"a": 4, "b": 4}


def test_an_unlocked_domain_opens_groups_as_places_fall_free_and_is_not_waited_for_before():
    w = world(groups_per_update=4)
    w.ledger.shares[Kind.RL].locked = {"b"}
    w.play()
    assert w.open() == {"a": 8}
    w.ledger.shares[Kind.RL].locked = ()
    assert w.fill() == []
    assert w.update() == {"a": 4}
    w.play()
    assert w.open() == {"a": 4, "b": 4}
    assert w.update() == {"a": 2, "b": 2}


def test_a_late_domain_tries_one_group_and_takes_no_more_slots():
    w = world(groups_per_update=4, max_attempts=2)
    w.dead = {"b"}
    w.fill()
    for rollout in w.ledger.lease("actor", 8, Kind.RL, 0.0):  # half of the slots: 2 of the 4 groups of each
        w.answer(rollout)
    w.play()
    leased = [r for r in w.ledger.rollouts(Kind.RL) if r.state is State.LEASED]
    assert len(leased) == 8
    assert w.ledger.give_up(Kind.RL) == ["b"]
    for rollout in leased:
        w.ledger.failed(rollout.id, "env_lost")
    again = w.ledger.lease("actor", 1000, Kind.RL, 0.0)
    assert Counter(w.ledger.find(r.id)[0].task.domain for r in again) == {"b": 2}
    for _ in range(4):
        for rollout in again:
            w.ledger.failed(rollout.id, "env_lost")
        again = w.ledger.lease("actor", 1000, Kind.RL, 0.0)
    assert again == []
    assert [group.task.domain for group in w.fill() if group.task.domain == "b"] == ["b"]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_domain_without_signal_is_not_waited_for(max_lag):
    """All of b is solved: its groups are filtered as they close. They have had their turn; a fills the batch at once."""
    w = world(groups_per_update=4, max_lag=max_lag, selection=Selection("signal"))
    w.rewards = {"b": (1.0, 1.0)}
    for update in range(5):
        w.play()
        if not (made := w.update()):  # max_lag 0: a may open two more for those of b that came to nothing
            w.play()
            made = w.update()
        assert made == {"a": 4}, update
    assert w.ledger.shares[Kind.RL].late == set()
    w.rewards = {}
    w.play()
    w.update()
    w.play()
    assert w.update() == {"a": 2, "b": 2}


def test_a_domain_that_refuses_every_rollout_is_not_waited_for():
    w = world(groups_per_update=4, max_lag=0, max_attempts=1)
    w.fill()
    for _ in range(3):
        for rollout in w.ledger.lease("actor", 1000, Kind.RL, 0.0):
            if w.ledger.find(rollout.id)[0].task.domain == "b":
                w.ledger.failed(rollout.id, "env_lost")
            else:
                w.answer(rollout)
        w.fill()
    assert w.update() == {"a": 4}
    assert w.ledger.counts(Kind.RL, domain="b")["failed"] == 3 * 2 * 2
    assert w.ledger.counts(Kind.RL, domain="a") | {"dispatched": 0} == dict.fromkeys(w.ledger.counts(), 0) | {"trained": 8}


def test_nobody_is_given_up_when_all_are_missing():
    w = world(groups_per_update=4)
    w.dead = {"a", "b"}
    w.play()
    assert w.ledger.give_up(Kind.RL) == []
    w = world({"a": 1.0})
    w.dead = {"a"}
    w.play()
    assert w.ledger.give_up(Kind.RL) == []


def test_a_group_of_a_domain_without_a_seat_keeps_nobody_from_a_place():
    """One group a batch, two equal domains in turn; three updates. A group of b fails and has used b's seat; another one hangs.
    The last batch is a's, capacity is one group, and b holds it, without being missed."""
    w = world(groups_per_update=1, max_lag=1, updates=3, max_attempts=1)
    w.dead = {"b"}
    w.play()
    assert (w.open(), w.update()) == ({"a": 1, "b": 1}, {"a": 1})
    for rollout in [r for r in w.ledger.rollouts(Kind.RL) if r.state is State.LEASED]:
        w.ledger.failed(rollout.id, "env_lost")
    for name in ("b", "a"):
        w.ledger.open(Kind.RL, Task(name, "t", 0, {}))
    for rollout in w.ledger.lease("actor", 4, Kind.RL, 0.0):
        w.answer(rollout)
    assert w.update() == {"a": 1}
    assert (w.fill(), w.open(), w.update(), w.ledger.missing(Kind.RL)) == ([], {"b": 1}, {}, {})
    assert w.ledger.give_up(Kind.RL) == ["b"]
    w.play()
    assert w.update() == {"a": 1}


def test_reference_solutions_are_shared_and_wait_for_no_dead_domain_either():
    w = world({"a": 1.0, "b": 2.0}, warm_updates=2, warm_rollouts=3)
    w.kind = Kind.WARM
    w.fill()
    assert w.open() == {"a": 2, "b": 4}
    w.dead = {"b"}
    w.play()
    assert w.update() == {}
    assert w.ledger.give_up(Kind.WARM) == ["b"]
    w.play()
    assert [w.update(), w.play(), w.update()] == [{"a": 3}, None, {"a": 3}]
    assert w.ledger.warm_update == 2


def test_shares_are_what_they_were_after_a_resume():
    w = world(dict.fromkeys("abc", 1.0), groups_per_update=2, max_lag=1)
    w.dead = {"c"}
    w.play()
    assert w.update() == {"a": 1, "b": 1}  # c has its first seat in the next batch
    w.play()
    assert w.update() == {}
    assert w.ledger.give_up(Kind.RL) == ["c"]
    w.play()
    again = World(Ledger(w.ledger.rules, 2), w.dead)
    again.ledger.restore(json.loads(json.dumps(w.ledger.state())))
    again.ledger.published(1, again.ledger.update)
    assert again.ledger.shares[Kind.RL].state() == w.ledger.shares[Kind.RL].state()
    assert again.ledger.shares[Kind.RL].late == {"c"}
    seeds = []
    for one in (w, again):
        made = []
        for _ in range(4):
            one.play()
            made.append(one.update())
        seeds.append((made, [(g.task.domain, r.seed) for g in one.fill() for r in g.rollouts], one.ledger.counts(Kind.RL)))
    assert seeds[0] == seeds[1]


def test_seeds_of_a_domain_do_not_depend_on_when_others_open():
    first, second = world(), world({"a": 1.0, "b": 3.0})
    seeds = []
    for w in (first, second):
        groups = [group for group in w.fill() if group.task.domain == "b"]
        seeds.append([r.seed for group in groups for r in group.rollouts])
    assert len(seeds[0]) == 4
    assert seeds[1][:4] == seeds[0]
