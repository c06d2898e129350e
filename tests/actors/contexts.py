"""What the tests of context policies share: assignments under a policy, and what holds under every policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.record import full_prompt, segments
from common.types import (
    Assignment,
    ContextPolicy,
    Limits,
    Trajectory,
)
from common.validate import check
from learner.assignments import check_assignment
from tests.actors.servers import assignment, prompts
from tests.actors.toy import VOCABULARY, Toy
from tests.fakes import FakeEngine

CODEC = Toy()
LIMITS = Limits(8, 900, 20.0)
CALL = [10, *CODEC.encode_text('{"name":"f"}'), 11, 2]


def spell(text: str) -> list[int]:
    return CODEC.encode_text(text)


def under(policy: str, texts: list[str], limits: Limits = LIMITS, **options) -> Assignment:
    work = assignment(texts, limits)
    work = replace(work, sampling=replace(work.sampling, max_new_tokens=200))
    return replace(work, context=ContextPolicy(policy, options))


def sane(record: Trajectory, engine: FakeEngine, work: Assignment) -> None:
    """What holds under every policy: the record obeys its rules and answers the assignment, it says what the engine was given,
    and every sampled token is trained exactly once."""
    check(record, VOCABULARY, {1})
    check_assignment(record, work)
    assert [full_prompt(record, n).tolist() for n in range(len(record.steps))] == prompts(engine)
    rows = segments(record)
    trained = np.concatenate([row.step_of[row.mask] for row in rows])
    assert np.bincount(trained, minlength=len(record.steps)).tolist() == [len(step.action_ids) for step in record.steps]


def shown(record: Trajectory, index: int) -> str:
    return b"".join(CODEC.pieces[i] for i in full_prompt(record, index)).decode()


def numbered():
    """Turn n says "hello" n times: turns can be told apart. It counts its calls."""
    calls = iter(range(1, 99))
    return lambda prompt, sampling: [7] * next(calls) + [2]
