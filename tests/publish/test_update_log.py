"""Metrics of an update's rollouts: golden numbers, totals and domains, and what one update leaves in the run's folder."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from common.types import ActionKind, ContextKind, Status, StepKind, Task, Trajectory, spans_of
from learner import update_log
from learner.batch import Batch, Lag
from learner.lengths import Lengths
from learner.rollouts import Kind
from tests import records
from tests.control.scripted import config

NUMBERS = count()


def rollout(
    rewards: list[float], actions: list[int], contexts: list[int], status: Status, counts: dict[str, float], domain: str = "a"
) -> Trajectory:
    """A step per entry."""
    steps = [
        records.step(
            list(range(1, context + 1)),
            list(range(1, action + 1)),
            reward=reward,
            context_spans=spans_of([(context, ContextKind.TASK)]),
            action_spans=spans_of([(action, ActionKind.TEXT)]),
        )
        for reward, action, context in zip(rewards, actions, contexts, strict=True)
    ]
    made = records.trajectory(*steps, status=status, metrics=counts | {"turns": float(len(steps))}, task=Task(domain, "t", 0, {}))
    return replace(made, rollout_id=f"{domain}-{next(NUMBERS)}")


CALLED = {"calls": 4.0, "calls_unparsed": 1.0, "calls_ok": 2.0, "calls_failed": 2.0, "call_turns": 2.0, "subagent_turns": 0.0}
SILENT = dict.fromkeys(CALLED, 0.0)
A = [  # a domain: a group of three with returns 1, 0, 0.5, and one of two with equal returns
    [
        rollout([0.0, 1.0], [3, 5], [10, 2], Status.TERMINATED, CALLED),
        rollout([0.0], [4], [10], Status.TRUNCATED, SILENT),
        rollout(
            [0.0, 0.5], [2, 2], [10, 4], Status.TERMINATED, CALLED | {"calls": 2.0, "calls_unparsed": 0.0, "call_turns": 1.0}
        ),
    ],
    [rollout([1.0], [6], [8], Status.TERMINATED, SILENT), rollout([1.0], [2], [8], Status.TRUNCATED, SILENT)],
]
B = [[rollout([0.25], [1], [1], Status.TERMINATED, SILENT, "b")]]  # another: one rollout, alone
OF_A = {
    "groups": 2.0,
    "success": 3 / 5,  # returns above 0.5
    "reward": 3.5 / 5,
    "turns": 7 / 5,
    "action_tokens": (8 + 4 + 4 + 6 + 2) / 5,
    "prompt_tokens": (12 + 10 + 14 + 8 + 8) / 5,
    "truncated": 2 / 5,
    "group_reward_std": ((1 / 6) ** 0.5 + 0.0) / 2,  # of 1, 0, 1/2: variance (1/4 + 1/4 + 0) / 3
    "groups_zero_std": 1 / 2,
    "calls": (4 + 2) / 5,
    "call_turns": (2 + 1) / 7,
    "calls_parsed": 1 - 1 / 6,
    "calls_ok": 4 / 8,
}
OF_B = {
    **{"groups": 1.0, "success": 0.0, "reward": 0.25, "turns": 1.0, "action_tokens": 1.0, "prompt_tokens": 1.0},
    **{"truncated": 0.0, "calls": 0.0, "call_turns": 0.0},  # no call, no group of more than one: nothing to say of them
}


def test_numbers_of_rollouts():
    assert update_log.of_rollouts(A) == pytest.approx(OF_A)
    assert update_log.of_rollouts(B) == pytest.approx(OF_B)
    assert update_log.of_rollouts([]) == {"groups": 0.0}


def test_summaries_are_no_turns_and_turns_of_sub_agents_may_call():
    made = rollout([0.0, 0.0, 1.0], [1, 1, 1], [1, 1, 1], Status.TERMINATED, {})
    kinds = (StepKind.ACT, StepKind.SUMMARY, StepKind.SUBAGENT)
    steps = tuple(replace(step, kind=kind) for step, kind in zip(made.steps, kinds, strict=True))
    counts = {"turns": 1.0, "subagent_turns": 1.0, "calls": 1.0, "call_turns": 1.0}
    found = update_log.of_rollouts([[replace(made, steps=steps, metrics=counts)]])
    assert (found["turns"], found["action_tokens"], found["call_turns"]) == (1.0, 3.0, 0.5)


class Folder:
    def __init__(self):
        self.rows, self.files, self.events = [], [], []

    def metrics(self, update, values):
        self.rows.append((update, values))

    def trajectories(self, update, rollouts, lags):
        self.files.append((update, [r.rollout_id for r in rollouts], lags))

    def event(self, kind, fields):
        self.events.append(kind)


class Ended:
    """A control plane as far as outcomes are asked for: domain -> (dispatched, open, failed)."""

    def __init__(self, **counts):
        self.lengths, self.of = Lengths(), counts

    def counts(self, *kinds, domain=""):
        assert kinds == (Kind.RL,)
        found = [n for name, n in self.of.items() if domain in ("", name)]
        return dict(zip(("dispatched", "open", "failed"), map(sum, zip(*found, strict=True)), strict=True))


def run_of(control, *domains, update=1):
    tables = [{"name": name, "train_tasks": 6, "heldout_tasks": 4} for name in domains]
    return SimpleNamespace(
        config=config(domains=tables), control=control, folder=Folder(), update=update, version=7, ended={},
        seconds=lambda: 3.0, publisher=SimpleNamespace(canaries={}), totals=SimpleNamespace(add=lambda *lags: None),
    )  # fmt: skip


def batch(groups):
    rollouts = [r for group in groups for r in group]
    lags = {r.rollout_id: n for n, r in enumerate(rollouts)}
    lag = Lag(10, 0.5, 2)
    return Batch(Kind.RL, 0, tuple(map(tuple, groups)), {}, lags, lag, Lag(0, 0.0, 0), 3, 10, {})


def test_with_several_domains_each_has_its_numbers_beside_the_totals():
    run = run_of(Ended(a=(20, 10, 4), b=(10, 8, 1)), "a", "b")
    update_log.record(run, batch([*A, *B]), {"entropy": 1.5})
    ((update, row),) = run.folder.rows
    assert (update, row["entropy"], row["lag_mean"], row["stale"], row["version"]) == (1, 1.5, 0.5, 3, 7)
    for name, value in OF_A.items():
        assert row[f"{name}/a"] == pytest.approx(value), name
    assert {name.removesuffix("/b") for name in row if name.endswith("/b")} == {*OF_B, "failed"}
    assert row["reward"] == pytest.approx(3.75 / 6)
    assert row["groups"] == 3
    assert (row["failed"], row["failed/a"], row["failed/b"]) == (5 / 12, 4 / 10, 1 / 2)
    assert run.folder.files == [(1, [r.rollout_id for group in [*A, *B] for r in group], [*range(6)])]
    run.update, run.control.of = 2, {"a": (24, 10, 4), "b": (10, 8, 1)}
    update_log.record(run, batch(A), {})
    _, row = run.folder.rows[1]
    assert (row["failed"], row["failed/a"]) == (0.0, 0.0)  # of the four that have ended since
    assert "failed/b" not in row
    assert row["groups/b"] == 0


def test_one_domain_has_the_totals_only_and_a_resumed_learner_no_share_of_failures_at_first():
    run = run_of(Ended(a=(20, 10, 4)), "a", update=8)
    update_log.record(run, batch(A), {})
    ((_, row),) = run.folder.rows
    assert not [name for name in row if name.endswith("/a")]
    assert row["success"] == pytest.approx(0.6)
    assert "failed" not in row
    assert run.folder.events == []
