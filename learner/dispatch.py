"""What is tried next, and what of it trains: the sampler, the curriculum, locked domains and the selection of groups, around the
ledger. Called with the lock of `Control` held; `events` are told what changes and what is alarming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.config import RunConfig
from common.types import Task
from learner.curriculum import Curriculum
from learner.domain_success import DomainSuccess
from learner.ledger import Ledger
from learner.rollouts import Group, Kind, Rollout, State
from learner.sampler import TaskSampler

LAST_REFILL = 10  # times tasks.max_refills, then the run ends

Events = Callable[[str, dict[str, Any]], None]


class NothingToLearn(RuntimeError):
    """Selection has filtered so many groups, without one that could train, that going on makes no sense."""


class Dispatch:
    def __init__(self, config: RunConfig, tasks: Mapping[str, Sequence[Task]], ledger: Ledger, events: Events) -> None:
        """`tasks` by domain. Raises TasksError when a domain has none."""
        self._ledger, self._events = ledger, events
        size = config.algorithm.group_size
        self.sampler = TaskSampler(tasks, config.seed, config.tasks, size)
        self.curriculum = Curriculum(config.curriculum)
        self._limits = {domain.name: domain.limits.max_turns for domain in config.domains}
        self._success = {domain.name: DomainSuccess(size) for domain in config.domains}
        self.locked = {domain.name: dict(domain.unlock) for domain in config.domains if domain.unlock}  # what is still missing
        self._share_locked()
        self._wait_s = config.learner.domain_wait_s
        self._given_up = 0.0  # how long the learner had waited when it last gave a domain up
        self._stage = 0  # of the newest group
        self._alarmed = False  # that groups are filtered in a row

    # ---- groups open -------------------------------------------------------------------------------------

    def lease(self, actor: str, count: int, kind: Kind, now: float) -> list[Rollout]:
        """Up to `count` rollouts, of new groups where there is room."""
        leased = self._ledger.lease(actor, count, kind, now)
        missing, opened = count - len(leased), 0
        for domain in self._ledger.to_open(kind) if missing > 0 else ():
            opened += len(self._open(kind, domain).rollouts)
            if opened >= missing:
                break
        return leased + (self._ledger.lease(actor, missing, kind, now) if opened else [])  # most actors that wait find no room

    def _open(self, kind: Kind, domain: str) -> Group:
        if kind is Kind.WARM:
            return self._ledger.open(kind, self.sampler.next_uniform(domain))
        update = self._ledger.update
        if (stage := self.curriculum.stage(update)) != self._stage:
            turns = {name: self.curriculum.max_turns(stage, limit) for name, limit in self._limits.items()}
            self._events("curriculum_stage", {"stage": stage, "before": self._stage, "max_turns": turns, "update": update})
            self._stage = stage
        return self._ledger.open(kind, self.sampler.next(domain), stage=stage)

    def _share_locked(self) -> None:
        """The warm start takes all domains."""
        self._ledger.shares[Kind.RL].locked = set(self.locked)

    def max_turns(self, group: Group) -> int:
        """Of its rollouts: as it was when the group opened."""
        return self.curriculum.max_turns(group.stage, self._limits[group.task.domain])

    # ---- what comes of them ------------------------------------------------------------------------------

    def record(self, group: Group, success: bool) -> None:
        """A scored rollout of training by the policy, whatever becomes of it afterwards."""
        name = group.task.domain
        self.sampler.record(group.task, success)
        self.curriculum.record(group.stage, success)
        domain = self._success[name]
        if domain.record(success):
            why = (
                f"success in {name} fell from {domain.long_run:.2f} to {domain.newest:.2f} at once: is its env server all right?"
            )
            self._events("domain_success_dropped", {"alarm": why, "domain": name, "update": self._ledger.update})
        for other, needs in list(self.locked.items()):
            if domain.newest >= needs.get(name, 2.0):
                del needs[name]
            if not needs:
                del self.locked[other]
                self._share_locked()
                self._events("domain_unlocked", {"domain": other, "update": self._ledger.update})

    def expire(self, now: float) -> list[Rollout]:
        """End the leases of silent actors."""
        expired = self._ledger.expire(now)
        for actor in sorted({r.actor for r in expired}):
            mine = [r.id for r in expired if r.actor == actor]
            self._events("leases_expired", {"actor": actor, "rollouts": len(mine), "oldest": mine[0]})
        return expired

    def purge(self) -> None:
        """Give over-age rollouts their outcome."""
        stale = self._ledger.purge()
        if stale:
            again = sum(r.state is State.PENDING for r in stale)
            event = {"rollouts": len(stale), "again": again, "update": self._ledger.update, "oldest": stale[0].id}
            self._events("stale", event)

    def take(self, kind: Kind, waited: float = 0.0) -> list[Group]:
        """As `Ledger.take`, by a learner that has `waited` so many seconds for it. Raises NothingToLearn too."""
        before = self._ledger.fruitless
        self._give_up(kind, waited)
        groups = self._ledger.take(kind)
        count = self._ledger.fruitless
        if count > before:
            self._events("update_abandoned", {"update": self._ledger.update, "groups": count - before, "reason": "no_spread"})
        self._given_up *= not groups
        bound = self._ledger.rules.selection.max_refills * self._ledger.rules.groups_per_update
        if count < bound:
            self._alarmed = False
            return groups
        why = f"{count} groups in a row were filtered, because their rollouts had equal rewards: tasks are too easy or too hard"
        if not self._alarmed:
            self._alarmed = True
            self._events("nothing_to_learn", {"alarm": why, "update": self._ledger.update})
        if count >= LAST_REFILL * bound:
            raise NothingToLearn(f'{why}; choose other tasks, tasks.sampler = "variance" or tasks.select = "all"')
        return groups

    def _give_up(self, kind: Kind, waited: float) -> None:
        """The batch waits for domains for so long, then the others go on; as long again for the next that is missing."""
        self._given_up = min(self._given_up, waited)
        if waited - self._given_up < self._wait_s:
            return
        missing = self._ledger.missing(kind)
        for domain in self._ledger.give_up(kind):
            self._given_up = waited
            why = f"the batch has waited {self._wait_s:g} s for {domain}; until a group of it is complete, others take its place"
            event = {"alarm": why, "domain": domain, "groups": missing.get(domain, 0), "update": self._ledger.update}
            self._events("domain_late", event)

    # ---- checkpoints -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self.sampler.state() | {
            "curriculum": self.curriculum.state(),
            "stage": self._stage,
            "success": {name: domain.state() for name, domain in self._success.items()},
            "locked": {name: dict(needs) for name, needs in self.locked.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved."""
        for domain in self.sampler.restore(state):
            self._events("tasks_changed", {"domain": domain, "warning": "not the checkpoint's tasks: their order starts anew"})
        if "curriculum" not in state:  # of a version that had none of what follows
            return
        self.curriculum.restore(state["curriculum"])
        self._stage = state["stage"]
        for name, saved in state["success"].items():
            self._success[name].restore(saved)
        self.locked = {name: dict(needs) for name, needs in state["locked"].items()}
        self._share_locked()
