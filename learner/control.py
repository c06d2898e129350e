"""The learner's control plane behind one lock: who works on what, what has arrived, what the next update trains on.

Actors reach it through `learner/service.py`; the training loop calls `take`, `commit`, `evaluate`. Nothing here waits for a
device, and every wait has a deadline and a name (`learner/stalls.py` says it in sentences). `events` and `clock` are
called with the lock held: they must not call back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import DomainConfig, RunConfig
from common.types import Assignment, EngineInfo, Source, Task, Trajectory
from common.validate import RecordError, Vocabulary, sampled_tokens
from common.waits import LEARNER, Edge, Wait, Waits
from learner import assignments, progress, stalls
from learner.assignments import EXPECTED, NOT_YET, Answer, FailureStreak, Leased
from learner.batch import Batch, build
from learner.delivered import Delivered
from learner.dispatch import Dispatch
from learner.evaluation import SPLIT, Evaluation, fixed_tasks, succeeded
from learner.ledger import Ledger
from learner.lengths import Lengths
from learner.progress import Actor, Rate
from learner.proofs import Proofs
from learner.rollouts import TRAINING, Group, Kind, Rollout, Rules, Standing, State
from learner.scores import Scores

TICK_S = 0.5  # how long a wait sleeps at most before it looks at leases again
POLL_S, IDLE_POLL_S = 0.1, 0.5  # an actor with free slots asks again so soon while there may be work, and while not

Events = Callable[[str, dict[str, Any]], None]
Stop = Callable[[], bool]
Key = tuple[str, int]  # rollout id, attempt


class Control:
    """Thread-safe."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Mapping[str, Mapping[str, Sequence[Task]]],
        folder: Path,
        incarnation: int,
        vocabulary: Vocabulary,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tasks` by domain and split ("train", "heldout"); `folder` of the run. Raises ValueError for missing tasks."""
        self.config, self.incarnation = config, incarnation
        self._vocabulary, self._events, self._clock = vocabulary, events, clock
        self._domains: dict[str, DomainConfig] = {domain.name: domain for domain in config.domains}
        train = {name: tasks[name]["train"] for name in self._domains}
        heldout = {name: tasks[name][SPLIT] for name in self._domains}
        self.evaluation = Evaluation(fixed_tasks(heldout, config.eval.tasks), Scores(folder), config.eval.samples)
        self.ledger = Ledger(Rules.of(config), incarnation)
        self.dispatch = Dispatch(config, train, self.ledger, events)
        self.delivered = Delivered(folder / "inbox", incarnation, config.checkpoint.keep, self.ledger)
        self._changed = threading.Condition(threading.RLock())
        self.engines: list[EngineInfo] = []
        self.actors: dict[str, Actor] = {}
        self.phase = "start"  # then "warm", "rl", "done"
        self.running: Batch | None = None  # the update that is being computed
        self.last: Batch | None = None
        self.deliveries: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(sampled=0, trained=0)  # of RL rollouts: scored by then, and in the loss
        self.rate = Rate()  # of sampled tokens
        self.lengths = Lengths()
        self.proofs = Proofs(clock)
        self.waits = Waits(clock)  # of the learner's other threads, and of what the main thread does between two updates
        self.waiting: Wait | None = None  # of the training loop, for rollouts
        self._lateness = stalls.Lateness()
        self._streak = FailureStreak(max(256, 4 * config.algorithm.groups_per_update * config.algorithm.group_size))
        self._next_tick = float("-inf")
        self.no_more = False

    # ---- the training loop -------------------------------------------------------------------------------

    def start_warm(self) -> None:
        self._enter("warm")

    def start_rl(self) -> None:  # reference rollouts that are still open are cancelled
        self._enter("rl", Kind.WARM)

    def finish(self) -> None:
        """Lease nothing any more; cancel all but the running update. A state to resume from is taken before."""
        with self._changed:
            self.no_more = True
            self._enter("done", *Kind)

    def set_engines(self, engines: list[EngineInfo]) -> None:
        with self._changed:
            self.engines = engines
            self._changed.notify_all()

    def published(self, version: int, update: int) -> None:
        """`version` holds the weights after `update` RL updates. Call it before an engine can serve the version: tokens
        of versions that are not known here are refused."""
        with self._changed:
            self.ledger.published(version, update)

    def take(self, timeout: float) -> Batch | None:
        """The next update's batch; None after `timeout` seconds or when the run has ended.

        Raises RuntimeError while a batch is out, EveryRolloutFails when rollouts do nothing but fail, NothingToLearn when
        selection leaves nothing of them.
        """
        with self._changed:
            deadline = self._clock() + timeout
            while True:
                self._tick()
                self.dispatch.purge()
                self._streak.check()
                groups = self.dispatch.take(self.kind, self._waited("take"))
                if groups:
                    self.waiting = None
                    self.running = self.last = build(groups, self.delivered.trajectories, self.ledger)
                    self._changed.notify_all()  # what was purged has left room
                    return self.running
                if not self._pause("take", deadline, self.config.learner.stall_s):
                    return None

    def commit(self, batch: Batch) -> None:
        """The optimizer step on `batch` happened."""
        with self._changed:
            self._return(batch)
            self.ledger.commit()
            if batch.kind is Kind.RL:
                self.tokens["trained"] += batch.live_tokens
                self.lengths.trained(batch.lengths)
            self.dispatch.purge()
            self._forget()

    def abandon(self, batch: Batch, reason: str) -> None:
        """The step on `batch` was skipped: its rollouts are filtered, and the update is still to be done."""
        with self._changed:
            self._return(batch)
            count = self.ledger.abandon(reason)
            self._events("update_abandoned", {"update": batch.update, "rollouts": count, "reason": reason})
            self._forget()

    def evaluate(
        self, label: str, version: int, modes: Sequence[str] = (), stop: Stop = lambda: False, weights: str = ""
    ) -> list[dict[str, Any]]:
        """Held-out success of `version` in each mode (those of the configuration by default); entries of summary.json. What was
        scored with the same `weights` (see `learner/scores.py`; "": whatever they are) is not done again.

        Returns by eval.deadline_s. Engines should be held at `version`. When something is not done by then, when `stop` says
        so or the run has ended, nothing is recorded and the result is empty. Raises EveryRolloutFails.
        """
        limit = self.config.eval.deadline_s
        with self._changed:
            kept = self.evaluation.start(self.ledger, label, version, modes or self.config.eval.modes, weights)
            deadline = self._clock() + limit
            while self.evaluation.open and not stop() and self._pause("evaluate", deadline, limit):
                self._tick()
            if late := self.evaluation.open:
                self._events("evaluation_incomplete", {"rollouts": len(late), **stalls.Graph(self, self._clock()).report()})
                self.ledger.cancel(Kind.EVAL)
            self.waiting = None
            results, failed = self.evaluation.finish()
            unknown = self.evaluation.unknown(results, version)
            self._events("evaluation", {"results": results, "failed": failed, "kept": kept} | unknown)
            return [] if late else results

    # ---- reports -----------------------------------------------------------------------------------------

    def counts(self, *kinds: Kind, domain: str = "") -> dict[str, int]:
        """Rollouts {dispatched, open, trained, filtered, stale, failed, cancelled} of training (or of `kinds`), of all domains or
        of one."""
        with self._changed:
            return self.ledger.counts(*(kinds or TRAINING), domain=domain)

    def reasons(self, *kinds: Kind) -> dict[str, dict[str, int]]:
        """Outcome -> reason -> rollouts."""
        with self._changed:
            return self.ledger.reasons(*(kinds or TRAINING))

    def status(self) -> dict[str, Any]:
        with self._changed:
            self._tick()  # a learner that waits for something else than rollouts is asked for its status all the same
            return progress.report(self, self._clock())

    # ---- checkpoints -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """This moment, as JSON. Delivered rollouts are named by their place in the spool, whose files are synced here, while
        actors go on."""
        with self._changed:
            state = {
                "ledger": self.ledger.state(),
                "sampler": self.dispatch.state(),
                "spool": self.delivered.files(),
                "evals": self.evaluation.results,
                "tokens": dict(self.tokens),
            }
        self.delivered.inbox.sync()
        return state

    def committed(self, state: dict[str, Any]) -> None:
        """A checkpoint with `state` is on disk: spool files that neither it, nor a kept one, nor an open rollout needs go."""
        with self._changed:
            self.delivered.committed(state["spool"])

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of an earlier incarnation, before any phase starts."""
        with self._changed:
            self.ledger.restore(state["ledger"])
            self.evaluation.results, self.tokens = list(state["evals"]), Counter(state["tokens"])
            self.dispatch.restore(state["sampler"])
            for name, reason in self.delivered.restore(state["spool"]).items():
                self._events("spool_lost", {"rollout": name, "reason": reason})
            waiting = len(self.delivered.trajectories)
            self._events("restored", {"update": self.ledger.update, "waiting": waiting, "rollouts": self.counts()})

    # ---- actors ------------------------------------------------------------------------------------------

    def lease(self, actor_id: str, capacity: int, patience_s: float = 0.0, there: Callable[[], bool] = lambda: True) -> Leased:
        """Work for `capacity` free slots; while there is none, wait for some, for `patience_s` and as long as the actor is
        `there`: what nobody hears of would have to expire."""
        with self._changed:
            deadline = self._clock() + patience_s
            chosen = self._lease(actor_id, capacity)
            while not (chosen or self.no_more) and (left := deadline - self._clock()) > 0:
                self._changed.wait(min(TICK_S, left))
                chosen = self._lease(actor_id, capacity if there() else 0)
            busy = self.phase in ("warm", "rl") or self.evaluation.open
            retry = 0.0 if patience_s or len(chosen) >= capacity > 0 else POLL_S if busy else IDLE_POLL_S
            return Leased([self._assignment(rollout) for rollout in chosen], retry, self.no_more)

    def renew(self, actor_id: str, running: list[Key], edges: list[Edge], metrics: dict[str, float]) -> list[Key]:
        """Extend leases; returns the rollouts that the actor must stop. `edges`: what they wait for."""
        with self._changed:
            now = self._clock()
            self.actors[actor_id] = Actor(now, len(running), edges, metrics)
            stop = self.ledger.renew(actor_id, running, now)
            self._tick()
            return stop

    def standing(self, incarnation: int, key: Key) -> Answer:
        """Whether a delivery of `key` is EXPECTED, and the answer when it is not."""
        with self._changed:
            if incarnation != self.incarnation:
                return self._answer("SUPERSEDED", f"leased by incarnation {incarnation}, this is {self.incarnation}")
            standing = self.ledger.standing(*key)
            if standing is Standing.EXPECTED:
                return EXPECTED
            if standing is Standing.UNKNOWN:
                return self._answer("REFUSED", f"unknown_rollout: {key[0]} attempt {key[1]} was never handed out")
            return self._answer(standing.value.upper())

    def deliver(self, incarnation: int, key: Key, data: bytes) -> Answer:
        """A whole message arrived. Raises OSError when the spool cannot be written: the actor sends it again."""
        trajectory: Trajectory | RecordError
        try:
            trajectory = assignments.read(data, key[0], self._vocabulary, self.ledger.versions)
        except RecordError as error:
            trajectory = error
        with self._changed:
            answer = self.standing(incarnation, key)  # again: reading took a while
            if answer is not EXPECTED:
                return answer
            group, rollout = self.ledger.find(key[0])
            try:
                if isinstance(trajectory, RecordError):
                    raise trajectory
                assignments.check_assignment(trajectory, self._assignment(rollout))
            except RecordError as error:
                self.delivered.inbox.quarantine(data)
                self._fail(rollout, f"refused:{error.rule}", error.detail)
                return self._answer("REFUSED", f"{error.rule}: {error.detail}")
            held = self.evaluation.version if group.kind is Kind.EVAL else 0
            reason, why = assignments.obstacle(trajectory, held, self.proofs, rollout.leased_at)
            if reason == NOT_YET:
                return self._answer("UNPROVEN", why)
            if group.kind is Kind.RL:
                self.lengths.played(sampled_tokens(trajectory.steps))
            if reason:
                self._fail(rollout, reason, why)
            else:
                self._store(trajectory, group, rollout, data)
            return self._answer("STORED")

    def _store(self, trajectory: Trajectory, group: Group, rollout: Rollout, data: bytes) -> None:
        place = ("", 0)
        if group.kind is Kind.EVAL:
            self.evaluation.scored(rollout.id, succeeded(trajectory))
        else:
            self._streak.count = 0
            place = self.delivered.keep(trajectory, data)
        self.ledger.delivered(rollout.id, assignments.origins_of(trajectory), place, trajectory.total_reward)
        if not self.ledger.holds(rollout.id):  # its group was filtered at once
            self._forget()
        tokens = sampled_tokens(trajectory.steps) if trajectory.source == Source.POLICY else 0
        self.rate.add(self._clock(), tokens)
        if group.kind is Kind.RL:
            self.tokens["sampled"] += tokens
            self.dispatch.record(group, succeeded(trajectory))
        if group.closed:
            self._changed.notify_all()

    def _fail(self, rollout: Rollout, reason: str, detail: str = "") -> None:
        event = {"rollout": rollout.id, "attempt": rollout.attempt, "actor": rollout.actor, "reason": reason, "detail": detail}
        self.ledger.failed(rollout.id, reason)
        self._events("rollout_failed", event | {"again": rollout.state is State.PENDING})
        self._given_up(rollout)

    def _given_up(self, rollout: Rollout) -> None:
        if rollout.state is State.FAILED:  # else it will be tried again
            if not self.evaluation.given_up(rollout.id):
                self._streak.add(rollout.reason)
            self._changed.notify_all()

    def _answer(self, status: str, reason: str = "") -> Answer:
        self.deliveries[status.lower()] += 1
        return Answer(status, reason)

    # ---- under the lock ----------------------------------------------------------------------------------

    def _enter(self, phase: str, *cancelled: Kind) -> None:
        with self._changed:
            self.phase = phase
            count = self.ledger.cancel(*cancelled)
            self._events("phase", {"phase": phase, "cancelled": count})
            self._changed.notify_all()

    def _tick(self) -> None:
        """What time alone brings about: leases of silent actors end."""
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        for rollout in self.dispatch.expire(now):
            self._given_up(rollout)
        self.actors = progress.remembered(self.actors, now)
        if late := self._lateness.news(self, now):
            self._events("wait_past_deadline", late)

    def _pause(self, name: str, deadline: float, limit: float) -> bool:
        """Wait for a change, a while at most; False when it is over: the deadline has passed or the run has ended."""
        now = self._clock()
        if self.waiting is None or self.waiting.name != name:
            self.waiting = Wait(LEARNER, limit, self._clock, name)
        if self.no_more or now >= deadline:
            return False
        self._changed.wait(min(TICK_S, deadline - now))
        return True

    def _waited(self, name: str) -> float:
        """Seconds since the training loop began to wait for what is called so."""
        now = self._clock()
        return self.waiting.edge(now, now).seconds if self.waiting is not None and self.waiting.name == name else 0.0

    def _return(self, batch: Batch) -> None:
        if batch is not self.running:
            raise RuntimeError("this batch is not the running update")
        self.running = None

    def _forget(self) -> None:
        """Let go of trajectories whose group has ended."""
        self.delivered.forget()
        self._changed.notify_all()

    def _lease(self, actor_id: str, capacity: int) -> list[Rollout]:
        """Held-out rollouts first, then training within capacity. Rollouts of the policy need a ready engine: for training
        one whose weights are young enough, for evaluation one with the version in question."""
        self._tick()
        now = self._clock()
        self.actors.setdefault(actor_id, Actor(now))  # `seen` stays: its waits are as old as its last heartbeat
        evaluated = self.evaluation.open and assignments.serves(self.engines, self.evaluation.version)
        chosen = self.ledger.lease(actor_id, capacity, Kind.EVAL, now) if evaluated else []
        if self.phase == "warm" or (self.phase == "rl" and assignments.fresh(self.engines, self.ledger)):
            chosen += self.dispatch.lease(actor_id, capacity - len(chosen), self.kind, now)
        return chosen

    def _assignment(self, rollout: Rollout) -> Assignment:
        group, _ = self.ledger.find(rollout.id)
        greedy = group.kind is Kind.EVAL and self.evaluation.mode_of(rollout.id) == "greedy"
        turns = self.dispatch.max_turns(group)
        return assignments.assignment(self.config, self._domains[group.task.domain], group, rollout, greedy, turns)

    @property
    def kind(self) -> Kind:
        """Of the rollouts that the present phase trains on."""
        return Kind.WARM if self.phase == "warm" else Kind.RL
