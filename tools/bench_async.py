"""What asynchrony brings, and how much of it is lost on the way: trained rollouts per second, against a barrier after each batch.

    python tools/bench_async.py [--updates 80]

Real: the control plane, its server, the calls of the training loop (take, commit, published), the actors' pool in a process of
its own, the wire, the record and its rules, the spool. In place of generation a rollout sleeps for as long as chance says, and
then has a turn of TOKENS tokens, sampled evenly over that time, each by the version that was served at its moment; in place of
an update the learner sleeps for as long as the SLOTS slots need on average for one batch. 8 groups of 8 rollouts make an update.

Arms: `sync`, a batch is dispatched when the update before it is done; `one_ahead`, when that update begins; `lag1`, `lag2`,
`lag4`, the ledger with learner.max_lag of so many updates. A rollout's duration depends on its seed alone, so that all arms play
the same rollouts. The ideal of an arm is a simulation by discrete events: the same control plane without a wire, on a clock that
moves from event to event. See docs/asynchrony.md for how to read the tables. Prints them and writes runs/bench/async.json;
with fewer updates than the default it writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import logging
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from actors.agents import Parts  # noqa: E402
from actors.chat import Chat, Context  # noqa: E402
from actors.engines import Engines  # noqa: E402
from actors.envs import Envs  # noqa: E402
from actors.history import Prompt  # noqa: E402
from actors.learner_client import Learner  # noqa: E402
from actors.places import PlaceRules  # noqa: E402
from actors.pool import Pool  # noqa: E402
from actors.summaries import Summaries  # noqa: E402
from actors.tape import Sampled, Tape  # noqa: E402
from actors.toolcalls.turns import Turn, TurnParser  # noqa: E402
from common.addresses import MAIN  # noqa: E402
from common.convert import trajectory_bytes  # noqa: E402
from common.record import token_versions  # noqa: E402
from common.seeds import derive_seed  # noqa: E402
from common.types import (  # noqa: E402
    Action,
    ActionKind,
    Assignment,
    ContextKind,
    Finish,
    Status,
    Trajectory,
    VersionRun,
    ids_array,
    spans_of,
)
from common.waits import Wait, Waits  # noqa: E402
from learner.assignments import Leased  # noqa: E402
from learner.batch import Batch  # noqa: E402
from learner.control import Control  # noqa: E402
from learner.rollouts import Kind, State  # noqa: E402
from tools import standins  # noqa: E402
from tools.bench_tokens import files_of  # noqa: E402
from tools.benchmarks import head, write  # noqa: E402

UPDATES = 80
SLOTS, GROUPS, GROUP_SIZE = 64, 8, 8
TOKENS = 32  # of a rollout
MEDIAN_S, SIGMA = 0.2, 1.0  # of the lognormal
ALPHA, CAP = 1.5, 50.0  # of the Pareto; CAP in medians
START_S = 60.0  # for the actor to begin, and to end
TAKE_S = 120.0  # for a batch: rollouts of 10 s are among the longest


# ---- chance --------------------------------------------------------------------------------------------------


def lognormal(u: float) -> float:
    return MEDIAN_S * math.exp(SIGMA * statistics.NormalDist().inv_cdf(u))


def pareto(u: float) -> float:
    least = MEDIAN_S / 2 ** (1 / ALPHA)
    return min(least * (1 - u) ** (-1 / ALPHA), CAP * MEDIAN_S)


def lognormal_mean() -> float:
    return MEDIAN_S * math.exp(SIGMA**2 / 2)


def pareto_mean() -> float:
    """∫ P(X > x) dx, from 0 to the cap."""
    least = MEDIAN_S / 2 ** (1 / ALPHA)
    return least + (least - least**ALPHA * (CAP * MEDIAN_S) ** (1 - ALPHA)) / (ALPHA - 1)


@dataclass(frozen=True)
class Durations:
    """Seconds of rollouts: the distribution's inverse, and its mean."""

    name: str
    quantile: Callable[[float], float]
    mean: float

    def of(self, seed: int) -> float:
        return self.quantile((derive_seed(seed, "duration") + 0.5) / 2**31)

    @property
    def update_s(self) -> float:
        return self.mean * GROUPS * GROUP_SIZE / SLOTS


TABLES = {d.name: d for d in (Durations("lognormal", lognormal, lognormal_mean()), Durations("pareto", pareto, pareto_mean()))}


# ---- arms ----------------------------------------------------------------------------------------------------


class OneAhead(Control):
    """The next batch is dispatched as a whole, when the one before it begins to train."""

    def lease(self, actor_id: str, capacity: int, patience_s: float = 0.0, there: Callable[[], bool] = lambda: True) -> Leased:
        with self._changed:
            until = time.monotonic() + patience_s
            while not (room := self._room()) and not self.no_more and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return super().lease(actor_id, min(capacity, room), patience_s if room else 0.0, there)

    def _room(self) -> int:
        """Rollouts of the next batch that nobody has yet."""
        ahead = [group for group in self.ledger.groups.values() if not group.any(State.TRAINING)]
        return GROUPS * GROUP_SIZE - sum(r.state is not State.PENDING for group in ahead for r in group.rollouts)


@dataclass(frozen=True)
class Arm:
    name: str
    max_lag: int
    kind: type[Control] = Control

    def control(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> Control:
        config = standins.config(
            {},
            algorithm={"group_size": GROUP_SIZE, "groups_per_update": GROUPS},
            learner={"updates": 10**9, "max_lag": self.max_lag, "lease_s": 600.0},
        )
        return standins.control_plane(config, folder, clock, self.kind)


ARMS = (Arm("sync", 0), Arm("one_ahead", 1, OneAhead), Arm("lag1", 1), Arm("lag2", 2), Arm("lag4", 4))


@dataclass
class Outcome:
    """Of one arm: real, or its ideal."""

    durations: Durations
    updates: int = 0
    rollouts: int = 0  # in updates
    live: int = 0  # of these, with a token in the loss
    played_s: float = 0.0  # of slots
    seconds: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)  # of tokens in the loss, in updates

    def add(self, batch: Batch) -> None:
        self.updates += 1
        for trajectory in batch.trajectories:
            (mask,) = batch.live[trajectory.rollout_id]
            self.rollouts += 1
            self.live += bool(mask.any())
            for version in token_versions(trajectory.steps[0])[mask].tolist():
                self.lags[batch.update - (version - 1)] += 1  # version 1 holds no update

    def end(self, control: Control, played_s: float, begun: float, now: float) -> None:
        playing = [now - r.leased_at for r in control.ledger.rollouts(Kind.RL) if r.state is State.LEASED]
        self.played_s, self.seconds = played_s + sum(playing), now - begun

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds

    @property
    def slots_idle(self) -> float:
        return 1 - self.played_s / self.seconds / SLOTS

    @property
    def learner_idle(self) -> float:
        return 1 - self.updates * self.durations.update_s / self.seconds

    @property
    def max_lag(self) -> int:
        return max(self.lags)


# ---- the rollouts ----------------------------------------------------------------------------------------------


def played(
    asked: Assignment,
    begun: float,
    seconds: float,
    served: Sequence[float] | np.ndarray,
    status: Status = Status.TERMINATED,
) -> Trajectory:
    """An answer to `asked` that was sampled from `begun` on for `seconds`. `served`: when versions 1, 2, ... began to be."""
    moments = begun + seconds * np.arange(1, TOKENS + 1) / TOKENS
    versions = np.searchsorted(served, moments, side="right")
    starts = [int(at) for at in np.flatnonzero(np.diff(versions, prepend=-1))]
    ids = np.random.default_rng(asked.sampling.seed).integers(0, standins.VOCABULARY.sampleable, TOKENS, np.int32)
    runs = [VersionRun(at, int(versions[at]), standins.ENGINE, MAIN) for at in starts]
    context = ids_array([1, 2, 3])
    prompt = Prompt(context, -1, 0, Context(context, spans_of([(len(context), ContextKind.TASK)])))
    tape = Tape(asked)
    sampled = Sampled(ids.tolist(), [-1.0] * TOKENS, runs, Finish.STOP)
    tape.append(prompt, sampled, Turn(Action(""), spans_of([(TOKENS, ActionKind.TEXT)]), "", 0), {"generate": seconds})
    tape.end(status)
    return tape.trajectory(standins.VOCABULARY)


# ---- the ideal -------------------------------------------------------------------------------------------------


def simulate(arm: Arm, durations: Durations, updates: int) -> Outcome:
    now, served, played_s, free, order = 0.0, [0.0], 0.0, SLOTS, count()
    events: list[tuple[float, int, tuple[Assignment, float] | None]] = []  # a rollout and its begin; None: an update
    batch: Batch | None = None
    out = Outcome(durations)
    with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
        control = arm.control(Path(folder), lambda: now)
        standins.publish(control, 1, 0)
        control.start_rl()
        while out.updates < updates or batch is not None:
            if batch is None and (batch := control.take(0.0)) is not None:
                out.add(batch)
                heapq.heappush(events, (now + durations.update_s, next(order), None))
            while free and (leased := control.lease("actor-0", free).assignments):
                free -= len(leased)
                for asked in leased:
                    heapq.heappush(events, (now + durations.of(asked.sampling.seed), next(order), (asked, now)))
            now, _, done = heapq.heappop(events)
            if done is not None:
                free, played_s = free + 1, played_s + now - done[1]
                answer = played(done[0], done[1], now - done[1], served)
                control.deliver(control.incarnation, (answer.rollout_id, answer.attempt), trajectory_bytes(answer))
            elif batch is not None:
                control.commit(batch)
                standins.publish(control, out.updates + 1, out.updates)
                served.append(now)
                batch = None
        out.end(control, played_s, 0.0, now)
    return out


# ---- the real thing --------------------------------------------------------------------------------------------


def act(address: str, table: str, served: Any, played_s: Any) -> None:
    """An actor process; `served` (times of versions, infinity until then) and `played_s` are shared with the learner."""
    times = np.frombuffer(served.get_obj())

    async def play(asked: Assignment, parts: Parts, wait: Wait) -> Trajectory:
        begun, seconds = time.monotonic(), TABLES[table].of(asked.sampling.seed)
        wait.set("engine.generate", standins.ENGINE)
        await asyncio.sleep(seconds)
        played_s.value += seconds
        return played(asked, begun, seconds, times)

    async def work() -> None:
        files = files_of(None)
        chat = Chat(files)
        parser = TurnParser(files.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)
        engines, envs, summaries = Engines(standins.VOCABULARY, 20.0, PlaceRules(SLOTS)), Envs({}), Summaries()
        learner = Learner(address, "actor-0")
        parts = Parts(chat, parser, standins.VOCABULARY, engines, envs, summaries, Waits())
        await Pool(learner, parts, SLOTS, play).run()
        for part in (engines, envs, summaries, learner):
            await part.close()

    logging.getLogger("actors").setLevel(logging.ERROR)  # what is cancelled at the end is no news
    asyncio.run(work())


def run(arm: Arm, durations: Durations, updates: int) -> Outcome:
    context = multiprocessing.get_context("spawn")
    served, played_s = context.Array("d", [math.inf] * (updates + 1)), context.Value("d", 0.0)
    out = Outcome(durations)
    with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
        control = arm.control(Path(folder))
        with standins.served(control) as address:
            actor = context.Process(target=act, args=(address, durations.name, served, played_s), daemon=True)
            actor.start()
            try:
                limit = time.monotonic() + START_S
                while not control.actors:  # its first lease: there is nothing yet
                    if time.monotonic() > limit or not actor.is_alive():
                        raise RuntimeError(f"the actor did not ask for work within {START_S:g} s")
                    time.sleep(0.01)
                begun = served[0] = time.monotonic()
                standins.publish(control, 1, 0)
                control.start_rl()
                while out.updates < updates:
                    update_once(control, out, served)
                out.end(control, played_s.value, begun, time.monotonic())
                control.finish()
            finally:
                actor.join(START_S)
                actor.kill()
    return out


def update_once(control: Control, out: Outcome, served: Any) -> None:
    if (batch := control.take(TAKE_S)) is None:
        raise RuntimeError(f"no batch in {TAKE_S:g} s: {control.status()['sentence']}")
    until = time.monotonic() + out.durations.update_s
    out.add(batch)
    time.sleep(max(0.0, until - time.monotonic()))
    control.commit(batch)
    standins.publish(control, out.updates + 1, out.updates)
    served[out.updates] = time.monotonic()


# ---- what comes out --------------------------------------------------------------------------------------------


def row(arm: Arm, real: Outcome, ideal: Outcome, sync: tuple[Outcome, Outcome]) -> dict[str, float]:
    """Measurements of one arm, by name without the arm's."""
    return {
        "rollouts_per_s": real.rate,
        "speedup": real.rate / sync[0].rate,
        "ideal_speedup": ideal.rate / sync[1].rate,
        "fraction_of_ideal": real.rate / ideal.rate,
        "slots_idle": real.slots_idle,
        "learner_idle": real.learner_idle,
        "share_live": real.live / real.rollouts,
        "mean_token_lag_trained": sum(lag * n for lag, n in real.lags.items()) / real.lags.total(),
        "max_token_lag_trained": real.max_lag,
    }


def measure(durations: Durations, updates: int) -> dict[str, dict[str, float]]:
    """Rows of one table, by arm."""
    ideals = {arm.name: simulate(arm, durations, updates) for arm in ARMS}
    reals = {arm.name: run(arm, durations, updates) for arm in ARMS}
    sync = reals["sync"], ideals["sync"]
    for arm in ARMS:
        shares = ", ".join(f"{lag}: {n / reals[arm.name].lags.total():.3f}" for lag, n in sorted(reals[arm.name].lags.items()))
        print(f"{durations.name} {arm.name}: lag of trained tokens {shares}", flush=True)
    return {arm.name: row(arm, reals[arm.name], ideals[arm.name], sync) for arm in ARMS}


def print_table(durations: Durations, rows: dict[str, dict[str, float]]) -> None:
    columns = list(rows["sync"])
    print(f"| {durations.name} | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for arm, values in rows.items():
        print(f"| {arm} | " + " | ".join(f"{value:.3f}" for value in values.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each arm")
    args = parser.parse_args()
    found: dict[str, float] = {}
    for durations in TABLES.values():
        rows = measure(durations, args.updates)
        print_table(durations, rows)
        suffix = "" if durations.name == "lognormal" else f"_{durations.name}"
        found |= {f"{name}_{arm}{suffix}": value for arm, values in rows.items() for name, value in values.items()}
    if args.updates >= UPDATES:
        write("async", found, head())


if __name__ == "__main__":
    main()
