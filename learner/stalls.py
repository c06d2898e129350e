"""Why the learner waits: the wait-for graph over all processes, followed from the learner to whoever keeps it waiting.

Nodes are the learner, its publishers, rollouts, engines, env replicas and sessions in them; an `Edge` says that one waits for
another. The learner's own are in its register `Waits`, actors tell theirs with each heartbeat, those of env servers included.
Everything here is called with the control plane's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.addresses import EVAL, MAIN
from common.waits import LEARNER, Edge, engines_of, session_name
from learner.assignments import fresh, held_out_pool, serves
from learner.rollouts import UNDELIVERED, Kind, Rollout, State

if TYPE_CHECKING:
    from learner.control import Control

SILENT_S = 5.0  # heartbeats and looks come every second or two: who has said nothing for so long is silent
FOLLOWED_S = 1.0  # a publisher's wait that is shorter keeps nobody waiting
ACTORS, WRITER = "actors", "publisher"
TOLD = 20  # late waits that one event lists
SHOWN = 100  # edges of a report or an event, longest first


def publisher_of(engine: str) -> str:
    """The thread that brings weights to `engine`, in edges."""
    return f"publisher of {engine}"


# ---- the graph -----------------------------------------------------------------------------------------------


def told(control: Control, now: float, late: bool = False) -> list[tuple[str, Edge]]:
    """What actors said last, and who said it; `late`: only what is past its deadline. An engine that has answered the learner
    since is not silent."""
    return [
        (name, e._replace(seconds=e.seconds + age, silent=min(e.silent + age, control.waits.silence(e.on))))
        for name, actor in control.actors.items()
        for age in [now - actor.seen]
        for e in actor.edges
        if not late or 0 < e.deadline < e.seconds + age
    ]


def own_wait(control: Control, now: float) -> Edge | None:
    """What the training loop waits for; None while it computes."""
    if control.running is not None or control.waiting is None:
        return next((edge for edge in control.waits.edges() if edge.owner == LEARNER), None)
    edge = control.waiting.edge(now, now)
    rollouts, blocked = wanted(control)
    leased = [rollout for rollout in rollouts if rollout.state is State.LEASED]
    if leased:
        return edge._replace(on=min(leased, key=lambda rollout: rollout.leased_at).id)
    if blocked:
        pool = held_out_pool(control.engines) if edge.name == "evaluate" else MAIN
        return edge._replace(on=engines_of(pool), why=blocked)
    if not control.actors:
        return edge._replace(on=ACTORS, why="no actor has called")
    return edge._replace(on=ACTORS, why=f"{len(rollouts)} rollouts are pending, no actor has taken them")


def wanted(control: Control) -> tuple[list[Rollout], str]:
    """The undelivered rollouts that the learner waits for, and why none can be handed out."""
    ledger = control.ledger
    if control.waiting is not None and control.waiting.name == "evaluate":
        version = control.evaluation.version
        blocked = "" if serves(control.engines, version) else f"no engine serves version {version}"
        rollouts = list(ledger.rollouts(Kind.EVAL))
    else:
        kind = control.kind
        blocked = "" if kind is Kind.WARM or fresh(control.engines, ledger) else "no engine has young enough weights"
        groups = [group for group in ledger.groups.values() if group.kind is kind and not group.closed]
        missing = ledger.missing(kind)  # by domain; without any, whichever comes first makes the batch full
        wanted_groups = [group for group in groups if group.task.domain in missing] or groups
        rollouts = [rollout for group in wanted_groups for rollout in group.rollouts]
    if blocked:
        rows = [f"{e.name} is {e.state} at version {e.version}{f' ({e.reason})' if e.reason else ''}" for e in control.engines]
        blocked = f"{blocked}: {'; '.join(rows) or 'there are no engines yet'}"
    return [rollout for rollout in rollouts if rollout.state in UNDELIVERED], blocked


class Graph:
    """All edges of one moment, and what they say."""

    def __init__(self, control: Control, now: float) -> None:
        self._control, self._now = control, now
        own = own_wait(control, now)
        mine = [edge for edge in control.waits.edges() if own is None or edge.number != own.number]
        theirs = told(control, now)
        self._own = [own] if own else []
        self._rest = sorted([*mine, *(edge for _, edge in theirs)], key=lambda edge: -edge.seconds)
        self._holders = {edge.owner: actor for actor, edge in theirs}  # who said what an owner waits for
        self._path = self._follow() if own else []

    @property
    def edges(self) -> list[Edge]:
        """The learner's own wait first, then the longest."""
        return self._own + self._rest

    def _follow(self) -> list[Edge]:
        """From the learner's wait to the end: each edge begins where the one before leads to."""
        first: dict[str, Edge] = {}
        for edge in self._rest:
            first.setdefault(edge.owner, edge)  # the longest of each
        path, seen = list(self._own), {LEARNER}
        while (following := self._next(path[-1], first)) is not None and following.owner not in seen:
            seen.add(following.owner)
            path.append(following)
        return path

    def _next(self, edge: Edge, first: dict[str, Edge]) -> Edge | None:
        control, now = self._control, self._now
        if control.ledger.holds(edge.on):
            _, rollout = control.ledger.find(edge.on)
            actor = control.actors.get(rollout.actor)
            silent = now - (actor.seen if actor else rollout.leased_at)
            if edge.on in first and silent < SILENT_S:
                return first[edge.on]
            return Edge(edge.on, "lease", rollout.actor, "", now - rollout.leased_at, 0.0, silent)
        if control.ledger.holds(edge.owner) and edge.silent < SILENT_S:
            _, rollout = control.ledger.find(edge.owner)
            inside = first.get(f"{edge.on}/{session_name(rollout.id, rollout.attempt)}")
            if inside is not None:
                return inside
        engines = [e for e in control.engines if edge.on in (e.name, engines_of(e.pool))]
        found = [first[name] for e in engines if (name := publisher_of(e.name)) in first]
        found += [first[WRITER]] if WRITER in first and edge.on not in {e.name for e in engines} else []
        return max((e for e in found if e.seconds >= FOLLOWED_S), key=lambda e: e.seconds, default=None)

    # ---- in words --------------------------------------------------------------------------------------------

    @property
    def sentence(self) -> str:
        """The learner's."""
        control = self._control
        if (batch := control.running) is not None:
            what = "supervised update" if batch.kind is Kind.WARM else "update"
            return f"learner trains {what} {batch.update + 1} on {len(batch.groups)} groups"
        if not self._path:
            return f"learner is in phase {control.phase}"
        if control.waiting is None:
            return "; ".join(map(self._words, self._path))
        why = filter(None, (self._path[0].why, *map(self._words, self._path[1:])))
        return f"{_head(control)}: {'; '.join(why)}"

    def report(self) -> dict[str, Any]:
        """`waits`: the edges; `stall`: all in sentences, one a line, the root cause first, then the learner's, then the longest;
        `sentence`: the learner's."""
        root = [f"root cause: {self._root()}"] if self._path else []
        waits = [edge._asdict() for edge in self.edges[:SHOWN]]
        return {"sentence": self.sentence, "stall": [*root, self.sentence, *self._others()], "waits": waits}

    def _words(self, edge: Edge) -> str:
        if not self._control.ledger.holds(edge.owner):
            return f"{edge.owner} waits for {_what(edge)}"
        _, rollout = self._control.ledger.find(edge.owner)
        if edge.name == "lease":
            said = f"silent for {edge.silent:.0f} s" if edge.silent >= SILENT_S else f"for {edge.seconds:.1f} s"
            return f"rollout {edge.owner} is with {edge.on}, {said}"
        return f"rollout {edge.owner} on {rollout.actor} waits for {_what(edge)}"

    def _root(self) -> str:
        last = self._path[-1]
        if last.on == ACTORS or (last.why and last.on in (engines_of(MAIN), engines_of(EVAL))):
            return last.why
        said = f"{last.on} has been silent for {last.silent:.0f} s" if last.silent >= SILENT_S else self._words(last)
        waiting = sum(edge.on == last.on and self._control.ledger.holds(edge.owner) for edge in self._rest)
        return said + (f"; {waiting} rollouts wait for it" if waiting > 1 else "")

    def _others(self) -> list[str]:
        """A line for each kind of wait, by its longest. Rollouts of one actor that wait for the same are one line, and sessions
        of one env server."""
        groups: dict[tuple[str, str, str], list[Edge]] = {}
        for edge in self._rest:
            server, _, session = edge.owner.partition("/")
            holder = server if session else self._holders.get(edge.owner, edge.owner)
            groups.setdefault((holder, edge.name, edge.on), []).append(edge)
        lines = []
        for (holder, _, _), same in groups.items():
            first = same[0]
            kind = "" if holder == first.owner else "session" if "/" in first.owner else "rollout"
            if len(same) > 1:
                lines.append(f"{len(same)} {kind}s on {holder} wait for {_what(first)}")
            else:
                owner = f"rollout {first.owner} on {holder}" if kind == "rollout" else first.owner
                lines.append(f"{owner} waits for {_what(first)}")
        return lines


def _head(control: Control) -> str:
    ledger = control.ledger
    if control.waiting is not None and control.waiting.name == "evaluate":
        job = next((job for job in control.evaluation.jobs if job.rollouts), control.evaluation.jobs[-1])
        return f"learner waits for {len(job.rollouts)} of {job.total} held-out rollouts ({job.mode}, version {job.version})"
    kind, missing = control.kind, ledger.missing(control.kind)
    count = max(ledger.need(kind) - len(ledger.ready(kind)), sum(missing.values()))
    open_groups = {g.task.domain for g in ledger.groups.values() if g.kind is kind and not g.closed}
    late = ledger.shares[kind].late
    said = [f"{n} of {name}" for name, n in missing.items()] if len(missing) > 1 else [*missing] or sorted(open_groups - late)
    head = f"learner waits for {count} {'group' if count == 1 else 'groups'} of {', '.join(said) or 'any domain'}"
    if late:
        head += f" ({', '.join(sorted(late))} {'is' if len(late) == 1 else 'are'} late)"
    return f"{head} ({ledger.fruitless} were filtered for equal rewards since the last update)" if ledger.fruitless else head


def _what(edge: Edge) -> str:
    head = f"{edge.on} ({', '.join(filter(None, (edge.name, edge.why)))})"
    if edge.silent >= SILENT_S:
        return f"{head}, silent for {edge.silent:.0f} s"
    return f"{head} for {edge.seconds:.1f} s{f' of {edge.deadline:.0f} s' if edge.deadline else ''}"


# ---- deadlines -----------------------------------------------------------------------------------------------


class Lateness:
    """Which waits are past their deadlines: each is told once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, int]] = set()  # who said it, whose it is, its number

    def news(self, control: Control, now: float) -> dict[str, Any] | None:
        """The event `wait_past_deadline`, for the waits that have become late since the last call; None without any."""
        own = own_wait(control, now)
        edges = [*told(control, now, late=True), *((LEARNER, e) for e in [*([own] if own else []), *control.waits.edges()])]
        late = {(who, edge.owner, edge.number): edge for who, edge in edges if edge.late}
        news = [edge for key, edge in late.items() if key not in self._told]
        self._told = set(late)
        return past_deadline(control, news, now) if news else None


def past_deadline(control: Control, late: list[Edge], now: float) -> dict[str, Any]:
    """What the event says: the waits in question, and the graph that they are part of."""
    found = Graph(control, now).report()
    longest = sorted(late, key=lambda edge: -edge.seconds)[:TOLD]
    return {"count": len(late), "late": [edge._asdict() for edge in longest], "stall": found["stall"], "waits": found["waits"]}
