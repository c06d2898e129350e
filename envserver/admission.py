"""Admission: a task is only listed when doing nothing pays nothing and the reference solution pays full marks.

A task that pays without an action teaches nothing, one that can never pay hides a broken grader; both look like ordinary
tasks to a learner. A crash of the grader is an error of its own, not a score of 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from common.tasks import SPLITS, fingerprint
from common.types import Action, Status, Task
from envserver.env import Domain, DomainError

log = logging.getLogger(__name__)

# What an agent says that does not try: nothing, then that it gives up. Both must pay 0.
NULL_ACTIONS = (Action(""), Action("I give up."), Action(""))
FULL_MARKS = 1.0
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """`kind` is "admitted", "pays_for_nothing", "cannot_pay" or "error"."""

    kind: str
    reason: str = ""


@dataclass(frozen=True)
class Catalog:
    """What a server lists, by split."""

    tasks: dict[str, list[Task]]
    quarantined: dict[str, dict[str, Verdict]]  # by task id
    fingerprints: dict[str, str]


def judge(domain: Domain, task: Task) -> Verdict:
    """Play the null agent and, where there is one, the reference solution."""
    try:
        null = _play(domain, task, NULL_ACTIONS)
        if abs(null) > TOLERANCE:
            return Verdict("pays_for_nothing", f"an agent that does nothing scores {null:g}, it must score 0")
        if domain.has_reference:
            score = _play(domain, task, domain.reference(task))
            if abs(score - FULL_MARKS) > TOLERANCE:
                return Verdict("cannot_pay", f"the reference solution scores {score:g}, it must score {FULL_MARKS:g}")
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {error}")
    return Verdict("admitted")


def _play(domain: Domain, task: Task, actions: Iterable[Action]) -> float:
    env = domain.make_env()
    try:
        observation = env.reset(task)
        total = observation.reward
        for action in actions:
            if observation.status != Status.RUNNING:
                break
            observation = env.step(action)
            total += observation.reward
        return total
    finally:
        env.close()


def admit(domain: Domain, tasks: list[Task], checks: int) -> tuple[list[Task], dict[str, Verdict]]:
    """The tasks to list, and verdicts of the others; the first `checks` tasks are judged, -1 means all of them."""
    judged = tasks if checks < 0 else tasks[:checks]
    verdicts = {task.id: judge(domain, task) for task in judged}
    quarantined = {task_id: verdict for task_id, verdict in verdicts.items() if verdict.kind != "admitted"}
    for task_id, verdict in quarantined.items():
        log.warning("task %s is quarantined: %s: %s", task_id, verdict.kind, verdict.reason)
    return [task for task in tasks if task.id not in quarantined], quarantined


def build_catalog(domain: Domain, sizes: dict[str, int], checks: int) -> Catalog:
    """List and admit `sizes[split]` tasks of each split. Raises DomainError when a split is left without any."""
    catalog = Catalog({}, {}, {})
    for split in SPLITS:
        tasks, quarantined = admit(domain, domain.tasks(split, sizes[split]), checks)
        if not tasks:
            first = next((f"{task_id}: {verdict.reason}" for task_id, verdict in quarantined.items()), "it has none")
            raise DomainError(
                f"domain {domain.name!r}: no {split} task passes admission ({first}); repair the domain or its tasks"
            )
        catalog.tasks[split] = tasks
        catalog.quarantined[split] = quarantined
        catalog.fingerprints[split] = fingerprint(tasks)
    return catalog
