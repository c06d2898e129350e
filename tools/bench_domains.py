"""What several domains get of a run when one of them is slow, or does not answer at all: a simulation by discrete events.

    python tools/bench_domains.py [--updates 60]

Real: the control plane (ledger, shares, sampler, lag), on a clock that moves from event to event. In place of rollouts there are
durations: lognormal (sigma 0.5), in the mean 1 s in domain `fast` and 10 s in `slow`, tokens sampled evenly over
that time by the version that was served at each moment. 8 groups of 8 rollouts make an update, which takes 0.5 s; both domains
weigh the same; learner.max_lag is 2. Arms: how slow the other domain is (infinitely: it does not answer at all), the slots of all
actors (192: as many as rollouts may be open), learner.domain_wait_s.

Prints a table, see docs/tasks.md for how to read it; writes nothing.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from common.config import RunConfig  # noqa: E402
from common.convert import trajectory_bytes  # noqa: E402
from common.seeds import derive_seed  # noqa: E402
from common.types import Assignment, Status, Task  # noqa: E402
from learner.batch import Batch  # noqa: E402
from learner.control import Control  # noqa: E402
from tools import standins  # noqa: E402
from tools.bench_async import TOKENS, played  # noqa: E402

FAST, SLOW = "fast", "slow"
UPDATES, WARM_UP = 60, 20  # updates of an arm, and how many of them are not counted
GROUPS, GROUP_SIZE, MAX_LAG = 8, 8, 2
UPDATE_S, SIGMA, SLOWER = 0.5, 0.5, 10.0
HANGS_S = 240.0  # until a rollout of a domain that does not answer fails: twice limits.deadline_s
LIMIT_S = 3600.0  # an arm that has not made its updates by then is stuck
TICK_S = 0.5  # the learner looks up so often while it waits


@dataclass(frozen=True)
class Arm:
    wait_s: float
    slots: int
    slower: float  # infinite: no rollout of `slow` ends before it fails

    def control(self, folder: Path, clock: Callable[[], float]) -> Control:
        config = RunConfig.model_validate(
            {
                "domains": [{"name": FAST}, {"name": SLOW}],
                "algorithm": {"group_size": GROUP_SIZE, "groups_per_update": GROUPS},
                "learner": {"updates": 10**9, "max_lag": MAX_LAG, "lease_s": 600.0, "domain_wait_s": self.wait_s},
            }
        )
        splits = ("train", "heldout")
        tasks = {name: {s: [Task(name, f"{s}-{i}", i, {}) for i in range(128)] for s in splits} for name in (FAST, SLOW)}
        return Control(config, tasks, folder, 1, standins.VOCABULARY, lambda kind, detail: None, clock)

    def seconds(self, asked: Assignment) -> float:
        normal = statistics.NormalDist().inv_cdf((derive_seed(asked.sampling.seed, "duration") + 0.5) / 2**31)
        mean = self.slower if asked.task.domain == SLOW else 1.0
        return min(HANGS_S, mean * math.exp(SIGMA * normal - SIGMA**2 / 2))


ARMS = [Arm(wait_s, slots, slower) for slower in (SLOWER, math.inf) for slots in (192, 64) for wait_s in (0.0, 120.0)]


@dataclass
class Seen:
    """Of the updates that count."""

    updates: int = 0
    begun: float = 0.0
    seconds: float = 0.0
    groups: Counter[str] = field(default_factory=Counter)  # by domain, in batches
    tokens: Counter[str] = field(default_factory=Counter)  # of these
    live: Counter[str] = field(default_factory=Counter)  # of those, in the loss
    longest: float = 0.0  # that the learner waited for a batch, in all updates

    def add(self, batch: Batch) -> None:
        self.updates += 1
        for group in batch.groups:
            self.groups[group[0].task.domain] += 1
        for trajectory in batch.trajectories:
            (mask,) = batch.live[trajectory.rollout_id]
            self.tokens[trajectory.task.domain] += len(mask)
            self.live[trajectory.task.domain] += int(mask.sum())


def simulate(arm: Arm, updates: int) -> Seen:
    """What the updates after the first WARM_UP were made of."""
    now, served, free, order = 0.0, [0.0], arm.slots, count()
    events: list[tuple[float, int, tuple[Assignment, float] | None]] = [(0.0, -1, None)]  # a rollout and its begin; None: look
    out, batch, done, last, ends = Seen(), None, 0, 0.0, math.inf
    with tempfile.TemporaryDirectory(prefix="bench-domains-") as folder:
        control = arm.control(Path(folder), lambda: now)
        standins.publish(control, 1, 0)
        control.start_rl()
        while done < updates and now < LIMIT_S:
            now, _, ended = heapq.heappop(events)
            if ended is not None:
                free += 1
                status = Status.FAILED if now - ended[1] >= HANGS_S else Status.TERMINATED
                answer = played(ended[0], ended[1], now - ended[1], served, status)
                control.deliver(control.incarnation, (answer.rollout_id, answer.attempt), trajectory_bytes(answer))
            if batch is not None and now >= ends:
                control.commit(batch)
                done, batch, last = done + 1, None, now
                standins.publish(control, done + 1, done)
                served.append(now)
            if batch is None and (batch := control.take(0.0)) is not None:
                ends = now + UPDATE_S
                out.longest = max(out.longest, now - last)
                if done >= WARM_UP:
                    out.add(batch)
                else:
                    out.begun = now
            while free and (leased := control.lease("actor-0", free).assignments):
                free -= len(leased)
                for asked in leased:
                    heapq.heappush(events, (now + arm.seconds(asked), next(order), (asked, now)))
            if not any(event[2] is None for event in events):
                heapq.heappush(events, (ends if batch is not None else now + TICK_S, next(order), None))
        out.seconds = now - out.begun
        return out


def row(arm: Arm, seen: Seen) -> str:
    rate = {name: seen.live[name] / seen.seconds / (TOKENS * GROUP_SIZE) for name in (FAST, SLOW)}
    cells = [
        f"{arm.slower:g} s", arm.slots, f"{arm.wait_s:g} s", f"{60 * seen.updates / seen.seconds:.1f}",
        f"{seen.groups[SLOW] / max(1, sum(seen.groups.values())):.2f}",
        *(f"{seen.live[name] / max(1, seen.tokens[name]):.2f}" for name in (FAST, SLOW)),
        *(f"{rate[name]:.2f}" for name in (FAST, SLOW)), f"{seen.longest:.0f} s",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each arm")
    args = parser.parse_args()
    heads = "slow rollout", "slots", "waits", "updates/min", "share slow", "live fast", "live slow", "fast/s", "slow/s", "longest"
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for arm in ARMS:
        print(row(arm, simulate(arm, args.updates)), flush=True)


if __name__ == "__main__":
    main()
