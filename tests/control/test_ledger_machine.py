"""The ledger under arbitrary histories: balance, capacity and shares of it, lag, one place per rollout, and it always comes to
an end, also when a domain does not answer any more."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.types import Task
from learner.ledger import Ledger
from learner.rollouts import OPEN, Kind, Origin, Rollout, Standing, State
from learner.selection import ALL, Selection
from tests.control.scripted import rules

DEAD = "b"  # the domain that may not answer
DOMAINS = [{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 4.0}, {"a": 5.0, "b": 1.0, "c": 1.0}]
TRAINING = (Kind.RL, Kind.WARM)
picks = st.integers(0, 10**6)


class LedgerMachine(RuleBasedStateMachine):
    """Keeps its own book of what was dispatched and what became of it, and compares."""

    @initialize(
        on_stale=st.sampled_from(["mask", "drop", "restart"]),
        take=st.sampled_from(["fixed", "drain"]),
        max_lag=st.integers(0, 2),
        stale_max_lag=st.integers(0, 3),
        attempts=st.integers(1, 3),
        warm=st.booleans(),
        selection=st.sampled_from([ALL, Selection("signal"), Selection("top_std", 0.5), Selection("mass", 0.9)]),
        weights=st.sampled_from(DOMAINS),
    )
    def begin(self, on_stale, take, max_lag, stale_max_lag, attempts, warm, selection, weights):
        self.numbers = rules(
            on_stale=on_stale,
            take=take if selection.name in ("all", "signal") else "fixed",
            selection=selection,
            max_lag=max_lag,
            stale_max_lag=stale_max_lag,
            max_attempts=attempts,
            updates=6,
            warm_updates=2 * warm,
            warm_rollouts=2,
            weights=weights,
        )
        self.ledger = Ledger(self.numbers, 1)
        self.dead = self.locked = False
        self.lent = False  # whether a domain may ever have had more than its share
        self.version, self.now, self.warm = 1, 0.0, warm
        self.dispatched: dict[Kind, set[str]] = {kind: set() for kind in Kind}
        self.stored: set[tuple[str, int]] = set()  # (rollout, attempt) that was accepted with a score
        self.trained: set[str] = set()
        self.batch: list[str] = []
        self.ledger.published(1, 0)
        self.saved: tuple = ()

    # ---- what actors and time do ------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def lease(self, count):
        kind = Kind.WARM if self.warm else Kind.RL
        leased = self.ledger.lease("a", count, kind, self.now)
        while len(leased) < count and (domain := next(self.ledger.to_open(kind), "")):
            group = self.ledger.open(kind, Task(domain, "t", 0, {}))
            assert not (self.locked and kind is Kind.RL and domain == DEAD)
            self.dispatched[kind] |= {r.id for r in group.rollouts}
            leased += self.ledger.lease("a", count - len(leased), kind, self.now)
        assert len({r.id for r in leased}) == len(leased) <= count
        assert all(1 <= r.tries <= self.numbers.max_attempts for r in leased)

    def leased(self, pick: int) -> Rollout | None:
        out = [r for r in self.ledger.rollouts(*Kind) if r.state is State.LEASED and not (self.dead and self.domain(r) == DEAD)]
        return out[pick % len(out)] if out else None

    def domain(self, rollout: Rollout) -> str:
        return self.ledger.find(rollout.id)[0].task.domain

    @rule(dead=st.booleans())
    def domain_dies_or_returns(self, dead):
        self.dead = dead

    @rule(locked=st.booleans())
    def domain_is_locked(self, locked):
        self.locked = locked and len(self.numbers.weights) > 1
        self.lent |= self.locked
        self.ledger.shares[Kind.RL].locked = {DEAD} if self.locked else ()

    @rule()
    def give_up(self):
        if not self.batch:
            found = self.ledger.give_up(Kind.WARM if self.warm else Kind.RL)
            assert set(found) < set(self.numbers.weights)
            self.lent |= bool(found)

    @rule(pick=picks, old=st.integers(0, 3), pool=st.sampled_from(["main", "stale"]), reward=st.sampled_from([0.0, 1.0]))
    def deliver(self, pick, old, pool="main", reward=-1.0):
        """Without a reward: such that members of a group differ."""
        rollout = self.leased(pick)
        if rollout is None:
            return
        warm = self.ledger.find(rollout.id)[0].kind is Kind.WARM
        origins = () if warm else tuple({Origin(max(1, self.version - old), pool), Origin(self.version, "main")})
        assert self.ledger.standing(rollout.id, rollout.attempt) is Standing.EXPECTED
        key = (rollout.id, rollout.attempt)
        assert key not in self.stored
        self.stored.add(key)
        self.ledger.delivered(rollout.id, origins, ("f", 0), reward if reward >= 0 else float(rollout.member))
        assert self.ledger.standing(*key) is Standing.DUPLICATE

    @rule(old=st.integers(0, 2), pool=st.sampled_from(["main", "stale"]))
    def deliver_everything(self, old, pool="main"):
        self.lease(100)
        while self.leased(0):
            self.deliver(0, old, pool)

    @rule(pick=picks)
    def deliver_again(self, pick):
        if self.stored:
            key = sorted(self.stored)[pick % len(self.stored)]
            assert self.ledger.standing(*key) in (Standing.DUPLICATE, Standing.SUPERSEDED)

    @rule(pick=picks)
    def fail(self, pick):
        rollout = self.leased(pick)
        if rollout is not None:
            self.ledger.failed(rollout.id, "env_lost")

    @rule(pick=picks)
    def renew(self, pick):
        rollout = self.leased(pick)
        if rollout is not None:
            assert self.ledger.renew("a", [(rollout.id, rollout.attempt)], self.now) == []
            assert self.ledger.renew("b", [(rollout.id, rollout.attempt)], self.now) == [(rollout.id, rollout.attempt)]

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @rule()
    def evaluate(self):
        group = self.ledger.open(Kind.EVAL, Task("a", "t", 0, {}), "eval")
        self.dispatched[Kind.EVAL] |= {r.id for r in group.rollouts}
        self.ledger.lease("a", 1, Kind.EVAL, self.now)

    @rule(kind=st.sampled_from(list(Kind)), pick=picks)
    def cancel(self, kind, pick):
        if pick % 5 and not self.batch:
            return  # seldom: it undoes what the other rules have built up
        self.ledger.cancel(kind)
        assert all(r.state is State.TRAINING or r.state not in OPEN for r in self.ledger.rollouts(kind))

    # ---- what the training loop does -----------------------------------------------------------------------

    @rule()
    def take(self):
        kind = Kind.WARM if self.warm else Kind.RL
        if self.batch:
            return
        self.purge()
        held, seats = self.ledger.held(kind), self.ledger.shares[kind].seats(self.ledger.need(kind))
        groups = self.ledger.take(kind)
        least = {"top_std": self.numbers.groups_per_update, "mass": 1}.get(self.numbers.selection.name, self.ledger.need(kind))
        assert groups == [] or len(groups) >= (self.ledger.need(kind) if self.warm else least)
        assert len(groups) <= self.ledger.need(kind) or self.numbers.take == "drain"
        assert [g.ordinal for g in groups] == sorted(g.ordinal for g in groups)
        members = [r for g in groups for r in g.rollouts if r.state is State.TRAINING]
        for rollout in members:
            assert (rollout.id, rollout.answered) in self.stored
            if kind is Kind.RL:
                assert self.over(rollout) <= 0
        if groups and not self.lent and self.numbers.selection.name == "all":  # whoever had groups for its seats has them
            mine = Counter(g.task.domain for g in groups)
            assert all(mine[name] >= min(n, held[name].open) for name, n in seats.items() if name in held)
        if kind is Kind.RL:
            assert all(g.kind is Kind.RL and len(g.scored) >= 2 for g in groups)
            if self.numbers.selection.name in ("signal", "mass"):
                assert all(len(set(g.rewards)) > 1 for g in groups)
        self.batch = [r.id for r in members]

    def over(self, rollout: Rollout) -> int:
        """By how many updates its tokens pass the bounds of their pools: all of them (`mask`), or one."""
        bounds = {"main": self.numbers.max_lag, "stale": self.numbers.stale_max_lag}
        lags = [self.ledger.lag(version) - bounds[pool] for version, pool in rollout.origins]
        return (min if self.numbers.on_stale == "mask" else max)(lags)

    def purge(self):
        """Only what is over-age in its pool leaves."""
        young = [r for r in self.ledger.rollouts(Kind.RL) if r.state is State.WAITING and self.over(r) <= 0]
        self.ledger.purge()
        assert all(r.state is State.WAITING for r in young)

    @rule(skip=st.booleans())
    def finish_update(self, skip):
        if not self.batch:
            return
        if skip:
            assert self.ledger.abandon("skipped") == len(self.batch)
        else:
            assert self.ledger.commit() == len(self.batch)
            assert not self.trained & set(self.batch)  # nothing is trained twice
            self.trained |= set(self.batch)
            if not self.warm:
                self.version += 1
                self.ledger.published(self.version, self.ledger.update)
        self.purge()
        self.batch = []

    @rule(old=st.integers(0, 2), count=st.integers(1, 3), last=st.sampled_from(["commit", "abandon", "leave"]))
    def updates(self, old, count, last):
        """The usual course of things, so that histories get somewhere."""
        for i in range(count):
            self.deliver_everything(old)
            self.take()
            if last == "leave" and i == count - 1:
                break  # the update is still running when the next rule comes
            self.finish_update(last == "abandon" and i == 0)
            if self.warm and self.ledger.warm_update == self.numbers.warm_updates:
                self.start_rl()

    @rule()
    def start_rl(self):
        if not self.batch:
            self.warm = False
            self.ledger.cancel(Kind.WARM)

    @rule()
    def checkpoint(self):
        book = ({k: set(v) for k, v in self.dispatched.items()}, set(self.stored), set(self.trained), self.version, self.warm)
        self.saved = (json.dumps(self.ledger.state()), book)

    @rule(pick=picks)
    def restart(self, pick):
        """Kill and resume: everything is as it was, but what was out is out no more."""
        if not self.saved or pick % 3:
            return
        text, (dispatched, stored, trained, version, warm) = self.saved
        self.ledger = Ledger(self.numbers, self.ledger.incarnation + 1)
        self.ledger.restore(json.loads(text))
        self.ledger.shares[Kind.RL].locked = {DEAD} if self.locked else ()
        self.dispatched = {k: set(v) for k, v in dispatched.items()}
        self.stored, self.trained, self.version, self.warm = set(stored), set(trained), version, warm
        self.batch = []
        states = {r.state for r in self.ledger.rollouts(*Kind)}
        assert not states & {State.LEASED, State.TRAINING}

    # ---- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def balances(self):
        for kind in Kind:
            counts = self.ledger.counts(kind)
            assert counts.pop("dispatched") == len(self.dispatched[kind]) == sum(counts.values())
        assert self.ledger.counts(*TRAINING)["trained"] == len(self.trained)

    @invariant()
    def within_capacity(self):
        """In all, and of each domain. Rounding gives and takes less than a group per domain; what a domain lends to others is
        never more than all of the capacity."""
        numbers, weights = self.numbers, self.numbers.weights
        self.lent |= any(shares.spent.total() for shares in self.ledger.shares.values()) and len(weights) > 1
        bounds = {
            Kind.RL: (numbers.max_lag + 1, numbers.updates - self.ledger.update, numbers.candidates),
            Kind.WARM: (2, numbers.warm_updates - self.ledger.warm_update, numbers.warm_rollouts),
        }
        for kind, (most, left, need) in bounds.items():
            mine = Counter(g.task.domain for g in self.ledger.groups.values() if g.kind is kind)
            assert mine.total() <= min(most, left) * need + self.lent * most * need
            for name, n in mine.items():
                share = weights[name] / sum(weights.values()) * most * need + len(weights)
                assert n <= most * need if self.lent else n < share

    @invariant()
    def one_place_each(self):
        ids = [r.id for r in self.ledger.rollouts(*Kind)]
        assert len(ids) == len(set(ids))
        assert not set(ids) & {i for i in self.ledger._finished if self.ledger.holds(i)}
        assert all(any(r.state in OPEN for r in g.rollouts) for g in self.ledger.groups.values())
        assert {r.id for r in self.ledger.rollouts(*Kind) if r.state is State.TRAINING} == set(self.batch)

    def teardown(self):
        """Liveness: from any state, cooperative actors bring the run to its last update, also when one of several domains hangs:
        then time stands still for its leases."""
        if not hasattr(self, "ledger"):
            return
        self.finish_update(False)
        self.dead &= len(self.numbers.weights) > 1
        for _ in range(300):
            if self.warm and self.ledger.warm_update == self.numbers.warm_updates:
                self.start_rl()
            if self.ledger.update == self.numbers.updates:
                break
            self.time_passes(0.0 if self.dead else 20.0)
            self.lease(100)
            while self.leased(0):
                self.deliver(0, 0)
            self.take()
            if not self.batch:
                self.give_up()
            self.finish_update(False)
        assert self.ledger.update == self.numbers.updates
        self.ledger.cancel(*Kind)
        assert self.ledger.counts(*Kind)["open"] == 0
        assert self.ledger.groups == {}


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase
