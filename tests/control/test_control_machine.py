"""Ledger, inbox, sampler and their lock together, through thousands of random events: actors that answer, answer twice, late or
wrongly, die and come back; updates that are made, skipped or never end; kills, resumes and rollbacks.

After every event the books balance. Now and then everybody cooperates for a while, but at times for one of the two domains,
which does not answer then: the next update must come about."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.convert import trajectory_bytes
from common.types import Assignment, Trajectory
from learner.batch import Batch
from learner.control import Control
from learner.rollouts import Kind, State
from tests.control.scripted import Clock, EventLog, engine, failed, hand_in, make_control, publish, step, trajectory

EVENTS = 3_500  # in each of three histories
COOPERATE_EVERY = 250
MAX_LAG = 2
ACTORS = ("a", "b", "c")
DOMAINS = [
    {"name": name, "weight": weight, "train_tasks": 6, "heldout_tasks": 4} for name, weight in (("one", 2.0), ("two", 1.0))
]
WAIT_S = 6.0  # for a domain


@dataclass
class Book:
    """What a timeline has seen; a resume goes back to the book of its checkpoint."""

    version: int = 0
    dispatched: set[str] = field(default_factory=set)
    scored: dict[str, bytes] = field(default_factory=dict)  # RL rollouts whose delivery was stored; again: the newest
    recorded: int = 0  # scored deliveries that the sampler heard of
    trained: set[str] = field(default_factory=set)


@dataclass
class World:
    """The learner, and actors that remember everything that they were ever asked."""

    folder: Path
    on_stale: str
    chance: random.Random
    clock: Clock = field(default_factory=Clock)
    events: EventLog = field(default_factory=EventLog)
    book: Book = field(default_factory=Book)
    incarnation: int = 0
    newest: int = 0  # version, of all timelines
    first: int = 0  # version of this incarnation
    update_of: dict[int, int] = field(default_factory=dict)  # version -> updates behind it, as this timeline has it
    held: dict[str, list[tuple[int, Assignment]]] = field(default_factory=lambda: {name: [] for name in ACTORS})
    forgotten: list[tuple[int, Assignment]] = field(default_factory=list)  # of actors that died, or lost their lease
    sent: list[tuple[int, Trajectory]] = field(default_factory=list)
    checkpoints: list[tuple[str, Book, dict[int, int]]] = field(default_factory=list)
    running: Batch | None = None
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self.start()

    # ---- the learner ---------------------------------------------------------------------------------------

    def start(self, state: str = "") -> None:
        self.incarnation += 1
        learner = {"updates": 100_000, "max_lag": MAX_LAG, "on_stale": self.on_stale, "domain_wait_s": WAIT_S}
        self.control: Control = make_control(
            self.folder, self.clock, self.events, self.incarnation, learner=learner, domains=DOMAINS
        )
        self.running = None
        if state:
            self.control.restore(json.loads(state))
        self.first = self.newest + 1
        self.publish()
        self.control.start_rl()

    def publish(self) -> None:
        """Versions never repeat, not even after a rollback."""
        self.newest += 1
        self.book.version = self.newest
        self.update_of[self.book.version] = self.control.ledger.update
        publish(self.control, self.book.version, self.control.ledger.update)
        self.control.set_engines([engine(self.book.version)])

    def take(self) -> None:
        if self.running is None:
            self.running = self.control.take(0)
            if self.running is not None:
                self.check_batch(self.running)

    def check_batch(self, batch: Batch) -> None:
        """It holds what was delivered, nothing twice, and exactly the tokens within the bound are trained."""
        assert len(batch.groups) == 2
        for found in batch.trajectories:
            assert trajectory_bytes(found) == self.book.scored[found.rollout_id]
            assert found.rollout_id not in self.book.trained
            (made,), (live,) = found.steps, batch.live[found.rollout_id]
            runs = [max(run.start * (run.start <= index) for run in made.versions) for index in range(len(live))]
            version = {run.start: run.version for run in made.versions}
            young = [self.control.ledger.update - self.update_of[version[start]] <= MAX_LAG for start in runs]
            stale = not (any(young) if self.on_stale == "mask" else all(young))  # its reward counts in its group, no more
            assert live.tolist() == [False] * len(live) if stale else live.tolist() == young
        members = [[any(x.any() for x in batch.live[r.rollout_id]) for r in group] for group in batch.groups]
        assert all(any(group) for group in members)

    def end_update(self, made: bool) -> None:
        if self.running is None:
            return
        batch, self.running = self.running, None
        if not made:
            self.control.abandon(batch, "skipped")
            return
        self.control.commit(batch)
        self.book.trained |= {name for name, live in batch.live.items() if any(mask.any() for mask in live)}
        self.publish()

    def checkpoint(self) -> None:
        if self.running is None:  # as the loop does: between two updates
            state = json.dumps(self.control.state())
            self.checkpoints = [*self.checkpoints[-1:], (state, deepcopy(self.book), dict(self.update_of))]
            self.control.committed(json.loads(state))

    def crash(self, back: int) -> None:
        """Kill and resume from a checkpoint, the newest or the one before; without one the run starts anew."""
        if not self.checkpoints:
            return
        self.checkpoints = self.checkpoints[: max(1, len(self.checkpoints) - back)]
        state, book, known = self.checkpoints[-1]
        self.book, self.update_of = deepcopy(book), dict(known)
        self.rollbacks += 1
        self.start(state)

    # ---- actors --------------------------------------------------------------------------------------------

    def lease(self, actor: str, count: int) -> None:
        for asked in self.control.lease(actor, count).assignments:
            self.held[actor].append((self.incarnation, asked))
            self.book.dispatched.add(asked.rollout_id)

    def renew(self, actor: str) -> None:
        keys = [(asked.rollout_id, asked.attempt) for born, asked in self.held[actor] if born == self.incarnation]
        stop = set(self.control.renew(actor, keys, [], {}))
        for entry in [entry for entry in self.held[actor] if (entry[1].rollout_id, entry[1].attempt) in stop]:
            self.held[actor].remove(entry)
            self.forgotten.append(entry)

    def answer(self, asked: Assignment) -> Trajectory:
        """Sampled by versions that this learner has had served lately, sometimes by two of them."""
        known = sorted(version for version in self.update_of if version >= self.first)[-4:]
        first, second = sorted(self.chance.choices(known, k=2))
        runs = [(0, first)] if first == second else [(0, first), (1, second)]
        return trajectory(asked, steps=(step([3, 4], runs, float(self.chance.random() < 0.5)),))

    def deliver(self, born: int, asked: Assignment, made: Trajectory) -> str:
        status = hand_in(self.control, made, born)
        self.sent.append((born, made))
        if status == "STORED" and made.steps:
            assert born == self.incarnation
            self.book.scored[asked.rollout_id] = trajectory_bytes(made)
            self.book.recorded += 1
        return status

    def deliver_one(self, actor: str, fails: bool = False) -> None:
        if self.held[actor]:
            born, asked = self.held[actor].pop(self.chance.randrange(len(self.held[actor])))
            status = self.deliver(born, asked, failed(asked) if fails else self.answer(asked))
            assert status in ("STORED", "SUPERSEDED") if born == self.incarnation else status == "SUPERSEDED"

    def deliver_late(self) -> None:
        if self.forgotten:
            born, asked = self.forgotten.pop(self.chance.randrange(len(self.forgotten)))
            status = self.deliver(born, asked, self.answer(asked))
            assert status in ("STORED", "SUPERSEDED")  # stored: the lease had expired, and nobody else has it yet
            assert status == "SUPERSEDED" or born == self.incarnation

    def send_again(self) -> None:
        if self.sent:
            born, made = self.chance.choice(self.sent[-50:])
            assert hand_in(self.control, made, born) in ("DUPLICATE", "SUPERSEDED")

    def send_nonsense(self, actor: str) -> None:
        """A record that breaks a rule is refused, and its rollout is tried again."""
        if self.held[actor]:
            born, asked = self.held[actor].pop()
            made = trajectory(asked, steps=(step([3, 4], [(0, 10**6)]),))
            assert self.deliver(born, asked, made) in ("REFUSED", "SUPERSEDED")

    def die(self, actor: str) -> None:
        self.forgotten += self.held[actor]
        self.held[actor] = []

    # ---- histories -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One random event."""
        actor, chance = self.chance.choice(ACTORS), self.chance
        events = {
            lambda: self.lease(actor, chance.randint(1, 6)): 12,
            lambda: self.deliver_one(actor): 20,
            lambda: self.deliver_one(actor, fails=True): 2,
            lambda: self.send_nonsense(actor): 1,
            lambda: self.send_again(): 2,
            lambda: self.deliver_late(): 2,
            lambda: self.die(actor): 1,
            lambda: self.renew(actor): 6,
            lambda: self.pass_time(chance.uniform(0, 8)): 4,
            lambda: self.take(): 8,
            lambda: self.end_update(made=True): 7,
            lambda: self.end_update(made=False): 1,
            lambda: self.control.evaluate("rl", self.book.version, stop=lambda: True): 1,
            lambda: self.checkpoint(): 3,
            lambda: self.crash(back=0): 0.5,
            lambda: self.crash(back=1): 0.3,
        }
        chance.choices(list(events), list(events.values()))[0]()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.control.lease("idle", 0)  # looks at the clock

    def cooperate(self, dead: str = "") -> None:
        """All actors work, nobody dies: an update comes about within a few leases' time, although rollouts of the domain `dead`
        go on and on."""
        before = self.control.ledger.update
        for _ in range(12):
            self.end_update(made=True)
            if self.control.ledger.update > before:
                return
            self.pass_time(3.0)
            for actor in ACTORS:
                self.renew(actor)
                self.lease(actor, 100)
                held, self.held[actor] = self.held[actor], []
                for born, asked in held:
                    if asked.task.domain == dead:
                        self.held[actor].append((born, asked))
                    else:
                        self.deliver(born, asked, trajectory(asked, version=self.book.version))
            self.take()
        raise AssertionError(f"no update: {self.control.status()['sentence']}")

    # ---- what always holds ---------------------------------------------------------------------------------

    def check(self) -> None:
        counts = self.control.counts(Kind.RL)
        assert counts.pop("dispatched") == sum(counts.values())
        assert counts["trained"] == len(self.book.trained)
        ids = [rollout.id for rollout in self.control.ledger.rollouts(Kind.RL)]
        assert len(ids) == len(set(ids))
        assert not self.book.trained & {r.id for r in self.control.ledger.rollouts(Kind.RL) if r.state is not State.TRAINED}
        groups = [group for group in self.control.ledger.groups.values() if group.kind is Kind.RL]
        domains = Counter(group.task.domain for group in groups)
        assert max(domains.values(), default=0) <= (MAX_LAG + 1) * 2  # what domains lend to others is not more than that
        numbers = [task.n for domain in self.control.dispatch.sampler.statistics.values() for task in domain.values()]
        assert sum(numbers) == self.book.recorded
        for rollout in self.control.ledger.rollouts(Kind.RL):
            if rollout.state is State.WAITING:
                assert self.control.delivered.inbox.read(rollout.place) == self.book.scored[rollout.id]


def history(world: World) -> Iterator[None]:
    for number in range(EVENTS):
        world.step()
        world.check()
        if number % COOPERATE_EVERY == COOPERATE_EVERY - 1:
            world.cooperate(world.chance.choice(["", "one", "two"]))
            world.check()
        yield


@pytest.mark.parametrize("on_stale", ["mask", "drop", "restart"])
def test_the_books_balance_through_thousands_of_events(tmp_path: Path, on_stale: str) -> None:
    world = World(tmp_path, on_stale, random.Random(on_stale))
    for _ in history(world):
        pass
    assert world.control.ledger.update > EVENTS / 100
    assert world.rollbacks > EVENTS / 200
    outcomes = world.control.counts(Kind.RL)
    assert min(outcomes["trained"], outcomes["failed"], outcomes["filtered"], outcomes["stale"]) > 0
    assert {event["domain"] for event in world.events.of("domain_late")} == {"one", "two"}
    world.control.finish()
    assert world.control.counts()["open"] == 0
