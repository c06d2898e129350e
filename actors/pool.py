"""The rollouts of one actor process: leases work while slots are free, keeps leases alive, delivers results."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.agents import Parts
from actors.learner_client import CALL_S, Key, Learner, LearnerAway
from actors.rollout import run_rollout
from actors.tape import Tape
from common.types import Assignment, Trajectory
from common.waits import LEARNER, Wait

log = logging.getLogger("actors.pool")

RENEW_S = 2.0
LEASE_PAUSE_S = 0.005  # between two leases: slots that free together are leased together
LONGEST_PAUSE_S = 2.0

Play = Callable[[Assignment, Parts, Wait], Awaitable[Trajectory]]  # never raises but CancelledError


@dataclass(eq=False)
class Slot:
    """A rollout in flight, until its delivery is acknowledged."""

    assignment: Assignment
    incarnation: int  # of the learner that leased it
    task: asyncio.Task[None]


class Pool:
    """At most `slots` rollouts at once. `run` ends when the learner has no more work, or after `stop`. `play` is how a rollout is
    made: a pool leases, renews and delivers whatever its rollouts do meanwhile."""

    def __init__(self, learner: Learner, parts: Parts, slots: int, play: Play = run_rollout) -> None:
        self._learner = learner
        self._parts = parts
        self._slots = slots
        self._run_rollout = play
        self._running: dict[Key, Slot] = {}
        self._freed = asyncio.Event()
        self._stop = asyncio.Event()
        self._no_more = False
        self._incarnation = 0
        self._away = False  # the learner did not answer the last heartbeat
        self.outcomes: Counter[str] = Counter()  # how rollouts left this process

    def stop(self) -> None:
        """Lease nothing more, cancel what runs, return from `run`."""
        self._stop.set()

    async def run(self) -> None:
        loops = [
            asyncio.create_task(self._lease_loop()),
            asyncio.create_task(self._renew_loop()),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a loop that broke ends the process
        finally:
            for task in loops:
                task.cancel()
            for slot in self._running.values():
                slot.task.cancel()
            await asyncio.gather(*loops, *[slot.task for slot in self._running.values()], return_exceptions=True)

    async def _lease_loop(self) -> None:
        """Ends when there is no more work and nothing is running."""
        away = 0
        while not (self._no_more and not self._running):
            pause = LEASE_PAUSE_S
            free = self._slots - len(self._running)
            if free and not self._no_more:
                try:
                    pause = max(pause, await self._lease(free))
                    away = 0
                except LearnerAway as error:
                    if away == 0:
                        log.warning("no work: %s", error)
                    away += 1
                    pause = min(0.2 * 2**away, LONGEST_PAUSE_S)
                await asyncio.sleep(pause)
            else:
                self._freed.clear()
                await self._freed.wait()
                await asyncio.sleep(LEASE_PAUSE_S)

    async def _lease(self, free: int) -> float:
        """Start what the learner hands out; returns for how long to wait before asking again."""
        with self._parts.waits.wait(self._learner.actor_id, "lease", LEARNER, CALL_S, self._learner.address):
            leased = await self._learner.lease(free)
        self._incarnation = leased.incarnation
        self._no_more = leased.no_more
        self._parts.engines.places.update(leased.engines)
        for assignment in leased.assignments:
            self._start(assignment, leased.incarnation)
        return 0.0 if leased.assignments else min(leased.retry_after_s, LONGEST_PAUSE_S)

    def _start(self, assignment: Assignment, incarnation: int) -> None:
        key = (assignment.rollout_id, assignment.attempt)
        if key in self._running:
            return
        task = asyncio.create_task(self._play(assignment, incarnation))
        self._running[key] = Slot(assignment, incarnation, task)
        task.add_done_callback(lambda task: self._free(key, task))

    async def _play(self, assignment: Assignment, incarnation: int) -> None:
        with self._parts.waits.wait(assignment.rollout_id, "start", self._learner.actor_id, assignment.limits.deadline_s) as wait:
            trajectory = await self._run_rollout(assignment, self._parts, wait)
            try:
                word = await self._learner.deliver(trajectory, incarnation, wait)
            except ValueError as error:  # too large for the wire
                tape = Tape(assignment)
                tape.fail(f"delivery: {error}")
                word = await self._learner.deliver(tape.trajectory(self._parts.vocabulary), incarnation, wait)
        self.outcomes[word] += 1

    def _free(self, key: Key, task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        self._freed.set()
        if task.cancelled():
            self.outcomes["CANCELLED"] += 1
        elif error := task.exception():
            log.error("rollout %s attempt %d was lost: %r", *key, error, exc_info=error)
            self.outcomes["LOST"] += 1

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await asyncio.gather(self._parts.envs.renew(), self._renew())

    async def _renew(self) -> None:
        try:
            edges = [*self._parts.waits.edges(), *self._parts.envs.edges()]
            outcomes = {f"outcome/{word}": float(n) for word, n in self.outcomes.items()}
            renewed = await self._learner.renew(self._incarnation, list(self._running), edges, outcomes)
        except LearnerAway as error:
            if not self._away:
                log.warning("no heartbeat: %s", error)
            self._away = True
            return
        self._away = False
        self._parts.engines.places.update(renewed.engines)
        self._no_more = self._no_more or renewed.no_more
        self._freed.set()  # the lease loop looks again
        if self._incarnation and renewed.incarnation != self._incarnation:
            log.info("the learner restarted: incarnation %d, was %d", renewed.incarnation, self._incarnation)
        self._incarnation = renewed.incarnation
        for key in renewed.cancel:
            if slot := self._running.get(key):
                log.info("rollout %s attempt %d is cancelled by the learner", *key)
                slot.task.cancel()
