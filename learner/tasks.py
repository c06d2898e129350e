"""The tasks of a run: fetched from the env servers once, at start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import grpc

from common import wire
from common.convert import task_from
from common.proto import rl_pb2 as pb
from common.proto import rl_pb2_grpc
from common.tasks import SPLITS
from common.types import Task

PAGE = 1000
CALL_S = 10.0  # of one call; a server that is still checking its tasks does not listen yet
RETRY_S = 0.2

Tasks = dict[str, dict[str, list[Task]]]  # domain -> split -> tasks


class TasksError(ValueError):
    """A domain's tasks cannot be had, or are fewer than the run needs; the message says what to look at or to change."""


def fetch(envs: Mapping[str, Sequence[str]], tls: wire.Tls, timeout: float, stop: Callable[[], bool]) -> Tasks:
    """The admitted tasks of every domain, from the first of its servers that answers.

    Raises TasksError after `timeout` seconds, or when a split is empty.
    """
    deadline = time.monotonic() + timeout
    return {domain: _fetch_domain(domain, addresses, tls, deadline, stop) for domain, addresses in envs.items()}


def _fetch_domain(
    domain: str, addresses: Sequence[str], tls: wire.Tls, deadline: float, stop: Callable[[], bool]
) -> dict[str, list[Task]]:
    problem = ""
    while time.monotonic() < deadline and not stop():
        for address in addresses:
            try:
                with wire.channel(address, tls) as channel:
                    return _splits(domain, rl_pb2_grpc.EnvServiceStub(channel))
            except grpc.RpcError as error:
                problem = f"{address}: {error.code().name} {error.details()}"  # type: ignore[attr-defined]
        time.sleep(RETRY_S)
    raise TasksError(
        f"no env server of domain {domain} answered ({problem or 'stopped'}); see logs/env-{domain}-*.log of the run"
    )


def _splits(domain: str, stub: rl_pb2_grpc.EnvServiceStub) -> dict[str, list[Task]]:
    found = {}
    for split in SPLITS:
        tasks: list[Task] = []
        total = 1
        while len(tasks) < total:
            page = stub.ListTasks(pb.ListTasksRequest(split=split, offset=len(tasks), limit=PAGE), timeout=CALL_S)
            total = page.total
            tasks += [task_from(message) for message in page.tasks]
            if not page.tasks:
                break
        if not tasks:
            raise TasksError(f"domain {domain} has no admitted tasks in split {split!r}; see why in the env server's log")
        found[split] = tasks
    return found
