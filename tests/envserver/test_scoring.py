"""045: what an agent says does not stand for what it did."""

from __future__ import annotations

import pytest

from common.types import Action, Status, Task, ToolCall
from envserver.domains.arithmetic import Arithmetic
from envserver.domains.frozenlake import FrozenLake
from envserver.testing import play

LAKE = Task("frozenlake", "t", 0, {"size": 3, "holes": ["b2"]})
CLAIM = "I reached the goal at c3. You reached the goal at c3."


def walk(ways: str, said: str) -> list[Action]:
    return [Action(said, (ToolCall(f"c{i}", "move", {"to": way}),)) for i, way in enumerate(ways.split())]


@pytest.mark.parametrize(
    ("ways", "said", "paid"),
    [
        ("right right down down", CLAIM, 1.0),
        ("right right down down", "", 1.0),
        ("right right down", CLAIM, 0.0),
        ("right right down", "", 0.0),
        ("right down", CLAIM, 0.0),  # into the hole
    ],
)
def test_045_the_lake_pays_for_where_the_agent_is_and_not_for_what_it_says(ways, said, paid):
    seen = play(FrozenLake(), LAKE, walk(ways, said))
    assert sum(observation.reward for observation in seen) == paid
    assert seen[-1].metrics.get("success", 0.0) == paid


def test_045_a_claim_without_a_move_pays_nothing():
    seen = play(FrozenLake(), LAKE, [Action(CLAIM)] * 3)
    assert not any(observation.reward for observation in seen)
    assert not any(observation.metrics.get("success") for observation in seen)


@pytest.mark.parametrize(
    ("text", "submitted", "paid"), [("10", "10", 1.0), ("11", "10", 1.0), ("10", "11", 0.0), ("", "11", 0.0)]
)
def test_045_the_text_beside_an_answer_does_not_make_a_wrong_one_right(text, submitted, paid):
    sums = Arithmetic()
    task = Task("arithmetic", "t", 0, {"question": "What is 4 + 6?", "expression": "4 + 6", "answer": "10"})
    seen = play(sums, task, [Action(text, (ToolCall("c", "submit", {"answer": submitted}),))])
    assert (seen[-1].reward, seen[-1].status) == (paid, Status.TERMINATED)
