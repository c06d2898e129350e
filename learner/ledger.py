"""The ledger: where every rollout is, and how many more may start. A pure state machine: no clock, no I/O, no locks.

One record per rollout (`learner/rollouts.py`); every size is a count over the records. At all times, per kind:
dispatched = open + trained + filtered + stale + failed + cancelled.

A group whose members all have an outcome is folded into totals (`learner/outcomes.py`). Its ids stay known for a while, to tell
a repeated delivery from a superseded one; older ids are recognised by the ordinal that they carry. With several domains,
`learner/shares.py` says whose group opens, is leased and is taken next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from common.seeds import derive_seed
from common.types import Task
from learner.outcomes import Outcomes
from learner.rollouts import OPEN, TRAINING, UNDELIVERED, Group, Kind, Origin, Rollout, Rules, Standing, State, born_as
from learner.shares import Held, Shares

FINISHED_MEMORY = 16_384  # ids of finished rollouts whose last answered attempt is remembered
VERSION_MEMORY = 4_096  # published versions whose update is remembered; older tokens are far beyond any lag
ATTEMPTS_PER_INCARNATION = 1_000  # attempt numbers of a lost timeline never meet those of the restored one
NEVER = -(10**9)  # the update of an unknown version: infinitely old


class Ledger:
    """All rollouts of a run. Times are seconds of whatever clock the caller uses."""

    def __init__(self, rules: Rules, incarnation: int) -> None:
        self.rules = rules
        self.incarnation = incarnation
        self.update = 0  # committed RL updates
        self.warm_update = 0  # committed supervised updates
        self.fruitless = 0  # groups that selection filtered since it last left some
        self.groups: dict[str, Group] = {}  # with at least one open member
        self._rollouts: dict[str, Rollout] = {}  # of those groups
        self._outcomes = Outcomes()  # of all other groups
        self.shares = {kind: Shares(rules.weights) for kind in TRAINING}
        self._finished: dict[str, int] = {}  # rollout id -> last answered attempt
        self._next: dict[Kind, int] = dict.fromkeys(Kind, 0)  # ordinal of the next group
        self._opened: Counter[tuple[Kind, str]] = Counter()  # groups so far, of a kind and a domain
        self._update_of: dict[int, int] = {}  # published version -> committed updates behind it

    # ---- versions and lag --------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[int, int]:
        """Published version -> number of committed updates it contains."""
        return self._update_of

    def published(self, version: int, update: int) -> None:
        self._update_of[version] = update
        while len(self._update_of) > VERSION_MEMORY:
            del self._update_of[min(self._update_of)]

    def lag(self, version: int) -> int:
        """Updates between the policy that sampled a token and the one that would train on it now."""
        return self.update - self._update_of.get(version, NEVER)

    def live(self, origin: Origin) -> bool:
        return self.lag(origin.version) <= self.rules.bound(origin.pool)

    def young(self, origins: Sequence[Origin]) -> bool:
        """Whether a rollout of such tokens may train: with `mask` one live token is enough, else none may be over age."""
        return (any if self.rules.on_stale == "mask" else all)(self.live(origin) for origin in origins)

    # ---- dispatch ----------------------------------------------------------------------------------------

    def batches(self, kind: Kind) -> int:
        """For how many updates groups may be open."""
        return self.rules.batches(kind, self.warm_update if kind is Kind.WARM else self.update)

    def need(self, kind: Kind) -> int:
        """How many closed groups an update is made from."""
        return self.rules.need(kind)

    def capacity(self, kind: Kind) -> int:
        """How many more groups may open: `(max_lag + 1) * candidates - |open groups|`, and never more open groups than the
        remaining updates need. Candidates are groups_per_update, or more where a selection chooses among more. Negative after a
        change of rules. Groups that nobody waits for are not counted, see `Shares.now`."""
        batches = self.batches(kind)  # first: it refuses evaluations
        return self.shares[kind].now(self.need(kind), batches, self.held(kind))[1]

    def to_open(self, kind: Kind) -> Iterator[str]:
        """Whose group opens next, so that no domain has more than its share open, as long as there is room."""
        return self.shares[kind].to_open(self.need(kind), self.batches(kind), self.held(kind))

    def held(self, kind: Kind) -> dict[str, Held]:
        """Domain -> its groups."""
        mine = [group for group in self.groups.values() if group.kind is kind]
        groups = Counter(group.task.domain for group in mine)
        ready = Counter(group.task.domain for group in mine if group.ready)
        return {name: Held(n, ready[name]) for name, n in groups.items()}

    def open(self, kind: Kind, task: Task, *seed_parts: int | str, stage: int = 0) -> Group:
        """A new group with its fixed plan. Seeds come from kind, how many groups the domain had, and member, or from `seed_parts`
        and the member; not from the incarnation, so that a resumed run asks for what an uninterrupted one would have asked for,
        and not from when other domains opened theirs."""
        ordinal = self._next[kind]
        self._next[kind] += 1
        alone = len(self.rules.weights) == 1
        parts = seed_parts or (kind.value, *(() if alone else (task.domain,)), self._opened[kind, task.domain])
        self._opened[kind, task.domain] += 1
        seeds = [derive_seed(self.rules.seed, *parts, member) for member in range(self.rules.members(kind))]
        group = Group.planned(self.incarnation, kind, ordinal, task, stage, seeds)
        self.groups[group.id] = group
        self._rollouts.update((r.id, r) for r in group.rollouts)
        return group

    def lease(self, actor: str, count: int, kind: Kind, now: float) -> list[Rollout]:
        """Up to `count` pending rollouts of `kind`, as new attempts of `actor`: domains in turn, of each its oldest group
        first. A late domain does not fill the slots of actors: it has as many as one group needs."""
        pending, leased = self._undelivered(kind, count)
        shares = self.shares.get(kind, self.shares[Kind.RL])
        for name in shares.late & set(pending) if kind in TRAINING else ():
            del pending[name][max(0, self.rules.members(kind) - leased[name]) :]
        chosen = shares.fair(pending, leased, count)
        for rollout in chosen:
            rollout.attempt = max(rollout.attempt, self._attempt_floor(rollout.id)) + 1
            rollout.tries += 1
            rollout.state, rollout.actor = State.LEASED, actor
            rollout.leased_at, rollout.expires = now, now + self.rules.lease_s
        return chosen

    def _undelivered(self, kind: Kind, count: int) -> tuple[dict[str, list[Rollout]], Counter[str]]:
        """Domain -> pending rollouts, and how many are leased. A single domain takes no turns: its first `count` will do."""
        pending, leased = defaultdict(list), Counter()
        for group in self.groups.values() if count > 0 else ():
            if group.kind is kind:
                name = group.task.domain
                pending[name] += [r for r in group.rollouts if r.state is State.PENDING]
                leased[name] += sum(r.state is State.LEASED for r in group.rollouts)
                if len(self.rules.weights) == 1 and len(pending[name]) >= count:
                    break
        return pending, leased

    def renew(self, actor: str, keys: list[tuple[str, int]], now: float) -> list[tuple[str, int]]:
        """Extend the leases of `keys` = (rollout id, attempt); returns those that the actor must stop."""
        stop = []
        for rollout_id, attempt in keys:
            rollout = self._rollouts.get(rollout_id)
            if rollout is None or rollout.attempt != attempt:
                stop.append((rollout_id, attempt))
            elif rollout.answered == attempt:
                continue  # delivered: the acknowledgement is on its way
            elif rollout.state is State.PENDING or (rollout.state is State.LEASED and rollout.actor == actor):
                # Pending: the lease expired, but nobody else has it yet, so its work is not lost.
                rollout.state, rollout.actor, rollout.expires = State.LEASED, actor, now + self.rules.lease_s
            else:
                stop.append((rollout_id, attempt))
        return stop

    def expire(self, now: float) -> list[Rollout]:
        """End the leases of silent actors: pending again, or failed when out of attempts."""
        expired = [r for r in self._rollouts.values() if r.state is State.LEASED and r.expires <= now]
        for rollout in expired:
            self._retry(rollout, State.FAILED, "lease_expired")
        return expired

    def cancel(self, *kinds: Kind) -> int:
        """Cancel what is open and not in the running update; returns how many."""
        count = 0
        for group in [g for g in self.groups.values() if g.kind in kinds]:
            for rollout in group.rollouts:
                if rollout.state in OPEN and rollout.state is not State.TRAINING:
                    rollout.state = State.CANCELLED
                    count += 1
            self._settle(group)
        return count

    # ---- deliveries --------------------------------------------------------------------------------------

    def standing(self, rollout_id: str, attempt: int) -> Standing:
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            if rollout_id in self._finished:
                return Standing.DUPLICATE if self._finished[rollout_id] == attempt else Standing.SUPERSEDED
            return Standing.SUPERSEDED if self._was_dispatched(rollout_id) else Standing.UNKNOWN
        if attempt < 1 or attempt > rollout.attempt:
            return Standing.UNKNOWN
        if attempt == rollout.answered:
            return Standing.DUPLICATE
        # Pending: its lease expired, but the work arrives before anybody else began it again.
        wanted = attempt == rollout.attempt and rollout.state in UNDELIVERED
        return Standing.EXPECTED if wanted else Standing.SUPERSEDED

    def find(self, rollout_id: str) -> tuple[Group, Rollout]:
        """Raises KeyError when the rollout's group is not open."""
        rollout = self._rollouts[rollout_id]
        return self.groups[rollout.group_id], rollout

    def holds(self, rollout_id: str) -> bool:
        return rollout_id in self._rollouts

    def delivered(self, rollout_id: str, origins: tuple[Origin, ...], place: tuple[str, int], reward: float = 0.0) -> Rollout:
        """A scored trajectory arrived and stands at `place`. Its standing was EXPECTED."""
        group, rollout = self.find(rollout_id)
        rollout.answered, rollout.origins, rollout.place, rollout.reason = rollout.attempt, origins, place, ""
        rollout.reward = reward
        rollout.state = State.EVALUATED if group.kind is Kind.EVAL else State.WAITING
        self._settle(group)
        return rollout

    def failed(self, rollout_id: str, reason: str) -> Rollout:
        """The attempt came to nothing (infrastructure, or a broken rule). Its standing was EXPECTED."""
        _, rollout = self.find(rollout_id)
        rollout.answered = rollout.attempt
        self._retry(rollout, State.FAILED, reason)
        return rollout

    # ---- updates -----------------------------------------------------------------------------------------

    def purge(self) -> list[Rollout]:
        """Give over-age waiting rollouts their outcome; returns them. `mask`: stale without a live token. `drop`: stale with
        one over-age token. `restart`: a new attempt with one over-age token, stale when out of attempts."""
        touched = []
        waiting = [(g, r) for g in self.groups.values() if g.kind is Kind.RL for r in g.rollouts if r.state is State.WAITING]
        for group, rollout in waiting:
            if self.young(rollout.origins):
                continue
            touched.append(rollout)
            if self.rules.on_stale == "restart":
                self._retry(rollout, State.STALE, "lag")
            else:
                rollout.state, rollout.reason = State.STALE, "lag"
                self._settle(group)
        return touched

    def ready(self, kind: Kind) -> list[Group]:
        """Closed groups with something to train on, oldest dispatch first."""
        groups = [group for group in self.groups.values() if group.kind is kind and group.ready]
        return sorted(groups, key=lambda group: group.ordinal)

    def missing(self, kind: Kind) -> dict[str, int]:
        """Domain -> open groups that the next batch waits for, besides being full."""
        return self.shares[kind].missing(self.need(kind), self.held(kind))

    def give_up(self, kind: Kind) -> list[str]:
        """Do not wait any longer for the domains whose groups are missing; returns them."""
        return self.shares[kind].give_up(self.need(kind), self.held(kind))

    def take(self, kind: Kind) -> list[Group]:
        """The groups of the next update, now in training; empty while there are too few, while a domain's seats are not filled
        that has groups open for them, or when selection leaves none. `fixed`: of exactly as many as an update needs, the oldest
        of each domain. `drain`: everything complete. Raises RuntimeError while an update is running."""
        if any(group.any(State.TRAINING) for group in self.groups.values()):
            raise RuntimeError("take() while an update is running: commit() or abandon() it first")
        self.purge()
        taken = self.ready(kind)
        if len(taken) < self.need(kind) or self.missing(kind):
            return []
        if self.rules.take == "fixed" or kind is Kind.WARM:
            taken = self.shares[kind].filled(self.need(kind), taken)
        if kind is Kind.RL:
            taken = self._select(taken)
        for group in taken:
            group.move(State.WAITING, State.TRAINING)
        self.shares[kind].spent.clear()
        return taken

    def commit(self) -> int:
        """The optimizer step happened: its rollouts are trained; returns how many. What waits is older now: purge()."""
        kinds = {group.kind for group in self.groups.values() if group.any(State.TRAINING)}
        for kind in kinds:
            self.shares[kind].made(self.need(kind))
        self.update += Kind.RL in kinds
        self.warm_update += Kind.WARM in kinds
        return self._end_training(State.TRAINED, "")

    def abandon(self, reason: str) -> int:
        """The step was skipped: its rollouts are filtered, the policy is as old as before."""
        count = self._end_training(State.FILTERED, reason)
        for shares in self.shares.values():
            shares.spent.clear()  # the batch is still to be made, of others
        return count

    # ---- counts ------------------------------------------------------------------------------------------

    def counts(self, *kinds: Kind, domain: str = "") -> dict[str, int]:
        """Rollouts {dispatched, open, trained, filtered, stale, failed, cancelled} of `kinds`, of one domain or of all."""
        return self._outcomes.counts(self.groups.values(), kinds, domain)

    def reasons(self, *kinds: Kind) -> dict[str, dict[str, int]]:
        """Outcome -> reason -> rollouts."""
        return self._outcomes.reasons(self.groups.values(), kinds)

    def rollouts(self, *kinds: Kind) -> Iterator[Rollout]:
        """Records of open groups."""
        return (r for g in self.groups.values() if g.kind in kinds for r in g.rollouts)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but the memory of finished ids, as JSON."""
        return {
            "incarnation": self.incarnation,
            "update": self.update,
            "warm_update": self.warm_update,
            "fruitless": self.fruitless,
            "next": {kind.value: ordinal for kind, ordinal in self._next.items()},
            "versions": list(self._update_of.items()),
            "opened": [[kind.value, domain, n] for (kind, domain), n in self._opened.items()],
            "shares": {kind.value: shares.state() for kind, shares in self.shares.items()},
            "totals": self._outcomes.state(),
            "groups": [group.to_json() for group in self.groups.values()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint of an earlier incarnation: what was delivered waits (their bytes are in the spool), what was
        leased is pending for a new attempt, what was being evaluated is cancelled."""
        self.update, self.warm_update = state["update"], state["warm_update"]
        self.fruitless = state.get("fruitless", 0)
        self._next = {Kind(kind): ordinal for kind, ordinal in state["next"].items()}
        self._update_of = dict(state["versions"])
        self._outcomes.restore(state["totals"])
        (alone, *others) = self.rules.weights
        of_one = [[kind, alone, ordinal] for kind, ordinal in state["next"].items() if not others]
        self._opened = Counter({(Kind(k), domain): n for k, domain, n in state.get("opened", of_one)})
        for kind, saved in state.get("shares", {}).items():
            self.shares[Kind(kind)].restore(saved)
        self.groups = {group.id: group for group in map(Group.from_json, state["groups"])}
        self._rollouts = {r.id: r for group in self.groups.values() for r in group.rollouts}
        for rollout in self._rollouts.values():
            if rollout.state is State.TRAINING:
                rollout.state = State.WAITING
            elif rollout.state in UNDELIVERED:
                self._reissue(rollout)
        self.cancel(Kind.EVAL)

    def lost(self, rollout_id: str) -> None:
        """The bytes of a delivered rollout are gone: it is issued again, unless it was stale already."""
        rollout = self._rollouts[rollout_id]
        if rollout.state is State.WAITING:
            self._reissue(rollout)

    # ---- the transitions that everything above shares ----------------------------------------------------

    def _retry(self, rollout: Rollout, otherwise: State, reason: str) -> None:
        """Pending again while attempts are left, else `otherwise`."""
        rollout.reason = reason
        if rollout.tries < self.rules.max_attempts:
            rollout.state = State.PENDING
        else:
            rollout.state = otherwise
        self._settle(self.groups[rollout.group_id])

    def _reissue(self, rollout: Rollout) -> None:
        """Pending, as a new attempt that the rollout does not pay for."""
        rollout.tries -= rollout.state is not State.PENDING
        rollout.attempt = max(rollout.attempt, self._attempt_floor(rollout.id))
        rollout.state, rollout.origins = State.PENDING, ()

    def _end_training(self, outcome: State, reason: str) -> int:
        count = 0
        for group in [g for g in self.groups.values() if g.any(State.TRAINING)]:
            count += group.move(State.TRAINING, outcome, reason)
            self._settle(group)
        return count

    def _select(self, candidates: list[Group]) -> list[Group]:
        """Those that train; the others are filtered."""
        chosen = self.rules.selection.chosen([group.rewards for group in candidates], self.rules.groups_per_update)
        for index in sorted(set(range(len(candidates))) - set(chosen)):
            candidates[index].move(State.WAITING, State.FILTERED, "low_spread" if chosen else "no_spread")
            self._settle(candidates[index])
        self.fruitless = 0 if chosen else self.fruitless + len(candidates)
        return [candidates[index] for index in chosen]

    def _settle(self, group: Group) -> None:
        """Filter a closed group that is too small to compare, or that selection cannot use; fold a group without open members
        into the totals."""
        if group.closed and len(group.rollouts) > 1 and len(group.scored) < 2:
            group.move(State.WAITING, State.FILTERED, "small_group")
        elif group.ready and group.kind is Kind.RL and self.rules.selection.fruitless(group.rewards):
            group.move(State.WAITING, State.FILTERED, "no_signal")
            self.fruitless += 1
        if group.kind in self.shares:
            self.shares[group.kind].heard(group)
        if any(r.state in OPEN for r in group.rollouts):
            return
        del self.groups[group.id]
        self._outcomes.fold(group)
        for rollout in group.rollouts:
            del self._rollouts[rollout.id]
            self._finished[rollout.id] = rollout.answered
        while len(self._finished) > FINISHED_MEMORY:
            del self._finished[next(iter(self._finished))]

    def _attempt_floor(self, rollout_id: str) -> int:
        """Attempt numbers up to this one belong to a lost timeline."""
        born, _, _ = born_as(rollout_id)
        return 0 if born == self.incarnation else (self.incarnation - 1) * ATTEMPTS_PER_INCARNATION

    def _was_dispatched(self, rollout_id: str) -> bool:
        born, kind, ordinal = born_as(rollout_id)
        return 0 < born < self.incarnation or (born == self.incarnation and ordinal < self._next[kind])
