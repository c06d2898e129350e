"""Every domain passes the conformance suite; then what is special about each of them."""

import contextlib
import json
import random
import re
import types
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from common.config_domain import ContextConfig
from common.types import Action, Status, Task, ToolCall
from envserver.domains import load_domain
from envserver.domains.arithmetic import Arithmetic
from envserver.domains.arithmetic.calculator import CalculatorError, calculate
from envserver.domains.frozenlake import FrozenLake, distances, parse_lake
from envserver.env import DomainError, TaskError
from envserver.testing import DomainConformance, play
from envserver.toolenv import Tools


class TestFrozenLake(DomainConformance):
    def make_domain(self):
        return load_domain("frozenlake")


class TestArithmetic(DomainConformance):
    def make_domain(self):
        return load_domain("arithmetic")


class TestTheDomainOfTheReadme(DomainConformance):
    """The example that the README shows is a whole domain, in about 30 lines."""

    n = 4  # eight times as many distinct held-out numbers of 0..99 still exist

    def make_domain(self):
        text = (Path(__file__).parents[2] / "README.md").read_text()
        code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Guess(Domain)" in block)
        assert len([line for line in code.splitlines() if line]) < 40
        module = types.ModuleType("guess")
        exec(code, module.__dict__)
        return module.Guess()


class TestDrawnLake(DomainConformance):
    def make_domain(self):
        return load_domain("frozenlake", {"draw": True})


def lake(holes, size=4, seed=0):
    return Task("frozenlake", "t", seed, {"size": size, "holes": holes})


def moves(ways):
    """One action a move; "rd" is right, then down."""
    names = {"l": "left", "d": "down", "r": "right", "u": "up"}
    return [Action("", (ToolCall(f"c{i}", "move", {"to": names[way]}),)) for i, way in enumerate(ways)]


def texts(observations):
    return [message.text for observation in observations for message in observation.messages]


def test_a_drawn_lake():
    seen = texts(play(FrozenLake({"draw": True}), lake(["b2", "c4"]), moves("r")))
    drawn = "\n1 o @ o o\n2 o x o o\n3 o o o o\n4 o o x G\nOpen: left, right."
    assert seen[1] == f"You are at b1. {drawn}"
    assert seen[0].startswith("Start a1. Goal d4. Holes: b2, c4. \n1 @ o o o\n")


def test_frozenlake_is_shown_with_its_newest_answer():
    assert ContextConfig(**FrozenLake().context()) == ContextConfig(name="window", turns=1)


def test_frozenlake_texts_rewards_and_ends():
    domain = FrozenLake()
    won = play(domain, lake(["b2", "c4"]), moves("urrrddd"))
    assert texts(won) == [
        "Start a1. Goal d4. Holes: b2, c4. Open: down, right.",
        "You are at a1. Open: down, right.",
        "You are at b1. Open: left, right.",
        "You are at c1. Open: left, down, right.",
        "You are at d1. Open: left, down.",
        "You are at d2. Open: left, down, up.",
        "You are at d3. Open: left, down, up.",
        "You reached the goal at d4.",
    ]
    assert [observation.reward for observation in won] == [0.0] * 7 + [1.0]
    assert won[-1].status == Status.TERMINATED
    assert won[-1].metrics == {"success": 1.0, "moves": 7.0}
    lost = play(domain, lake(["b2", "c4"]), moves("dr"))
    assert texts(lost)[-1] == "You fell into the hole at b2."
    assert (lost[-1].reward, lost[-1].status) == (0.0, Status.TERMINATED)
    assert lost[-1].metrics == {"success": 0.0, "moves": 2.0}
    assert texts(play(domain, lake([]), []))[0] == "Start a1. Goal d4. Holes: none. Open: down, right."


@given(st.integers(2, 5), st.text("ldru", max_size=30), st.integers(0, 2**20))
def test_frozenlake_moves_as_gymnasium_does_and_says_what_is_beside(size, path, bits):
    """Slow definition: a walk over rows and columns. A letter is a column, a digit a row."""
    cells = [f"{'abcde'[column]}{row + 1}" for row in range(size) for column in range(size)]
    holes = [cell for n, cell in enumerate(cells[1:-1]) if bits >> n & 1]
    try:
        parse_lake({"size": size, "holes": holes})
    except ValueError:
        reject()
    steps = {"l": (-1, 0), "d": (0, 1), "r": (1, 0), "u": (0, -1)}
    column, row = 0, 0
    for observation, way in zip(play(FrozenLake(), lake(holes, size), moves(path))[1:], path, strict=False):
        column = min(max(column + steps[way][0], 0), size - 1)
        row = min(max(row + steps[way][1], 0), size - 1)
        here = f"{'abcde'[column]}{row + 1}"
        if here in holes:
            assert texts([observation]) == [f"You fell into the hole at {here}."]
        elif here == cells[-1]:
            assert texts([observation]) == [f"You reached the goal at {here}."]
        else:
            beside = {"left": (column - 1, row), "down": (column, row + 1), "right": (column + 1, row), "up": (column, row - 1)}
            inside = {name: f"{'abcde'[c]}{r + 1}" for name, (c, r) in beside.items() if 0 <= c < size and 0 <= r < size}
            ways = ", ".join(name for name, cell in inside.items() if cell not in holes)
            assert texts([observation]) == [f"You are at {here}. Open: {ways}."]


def test_frozenlake_refuses_a_way_that_is_none():
    wrong = [Action("", (ToolCall("c", "move", {"to": "b1"}),))]
    (answer,) = texts(play(FrozenLake(), lake([]), wrong)[1:])
    assert answer == "Error: move: to is 'b1': Input should be 'left', 'down', 'right' or 'up'"


def test_frozenlake_makes_all_moves_of_one_action_until_the_end():
    calls = tuple(call for action in moves("drr") for call in action.tool_calls)
    observation = play(FrozenLake(), lake(["b2"]), [Action("", calls)])[-1]
    assert texts([observation]) == [
        "You are at a2. Open: down, up.",
        "You fell into the hole at b2.",
        "Not executed: the episode is over.",
    ]
    assert observation.metrics["moves"] == 2


def test_frozenlake_state_key_is_the_cell_and_the_map():
    domain = FrozenLake()
    keys = [
        play(domain, lake(holes), path)[-1].state_key
        for holes in (["b2", "c4"], ["c4", "b2"], ["b3"])
        for path in ([], moves("r"))
    ]
    assert keys[0] == keys[2] != keys[4]
    assert keys[0] != keys[1] == keys[3]
    assert play(domain, lake(["b2", "c4"]), moves("rl"))[-1].state_key == keys[0]


def test_082_siblings_share_no_state_although_they_share_the_table():
    domain = FrozenLake()
    first, second = domain.make_env(), domain.make_env()
    first.reset(lake(["b2"]))
    second.reset(lake(["b2"]))
    first.step(moves("r")[0])
    assert texts([second.step(moves("d")[0])]) == ["You are at a2. Open: down, up."]
    assert texts([first.step(moves("r")[0])]) == ["You are at c1. Open: left, down, right."]


def longest_way(size, holes):
    """Slow definition of the distance from the start: breadth first over sets of cells."""
    frontier, steps = {(0, 0)}, 0
    while (size - 1, size - 1) not in frontier:
        near = {(r + a, c + b) for r, c in frontier for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        frontier = {cell for cell in near if set(cell) <= set(range(size)) and cell not in holes}
        steps += 1
    return steps


def test_frozenlake_references_are_shortest_paths_and_diverse():
    domain = FrozenLake()
    for task in domain.tasks("train", 40):
        size, holes = parse_lake(task.payload)
        reference = domain.reference(task)
        assert len(reference) == distances(size, holes)[0, 0] == longest_way(size, holes)
        assert play(domain, task, reference)[-1].metrics["success"] == 1
    paths = {str(domain.reference(lake([], seed=seed))) for seed in range(60)}
    assert len(paths) > 10  # of the 20 shortest ways over an empty lake
    first = Counter(domain.reference(lake([], seed=seed))[0].tool_calls[0].arguments["to"] for seed in range(200))
    assert min(first.values()) > 60  # neither way of the first tie is preferred


def test_frozenlake_maps_are_random_solvable_and_disjoint():
    domain = FrozenLake({"size": 5, "hole_probability": 0.3})
    train, heldout = domain.tasks("train", 200), domain.tasks("heldout", 60)
    maps = [{str(sorted(task.payload["holes"])) for task in tasks} for tasks in (train, heldout)]
    assert len(maps[0]) == 200
    assert not maps[0] & maps[1]
    holes = sum(len(task.payload["holes"]) for task in train) / 200
    assert 4 < holes < 23 * 0.3 + 1  # solvable maps have fewer holes than 23 free cells would get


@pytest.mark.parametrize(
    "payload",
    [
        {"size": 4},
        {"size": 1, "holes": []},
        {"size": 4, "holes": ["a1"]},
        {"size": 4, "holes": ["d4"]},
        {"size": 4, "holes": ["e1"]},
        {"size": 4, "holes": "b2"},
        {"size": 4, "holes": [["b2"]]},
        {"size": 4, "holes": None},
        {"size": 4, "holes": ["b1", "a2"]},
        {"size": 4, "holes": ["b2", "b2"]},
        [],
        None,
    ],
)
def test_frozenlake_refuses_a_payload_that_is_no_solvable_lake(payload):
    with pytest.raises(TaskError, match="task t: "):
        FrozenLake().make_env().reset(Task("frozenlake", "t", 0, payload))


def test_domains_read_their_tasks_from_a_file(tmp_path):
    path = tmp_path / "lakes.jsonl"
    lines = [
        {"split": split, "id": split, "payload": {"size": 4, "holes": [hole]}}
        for split, hole in (("train", "b2"), ("heldout", "c3"))
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert FrozenLake({"tasks_file": str(path)}).tasks("heldout", 9)[0].payload["holes"] == ["c3"]
    path.write_text(path.read_text().replace('"c3"', '"z9"'))
    with pytest.raises(DomainError, match=r"lakes\.jsonl:2: holes \['z9'\]"):
        FrozenLake({"tasks_file": str(path)}).tasks("train", 9)
    lines = [
        {"split": split, "id": split, "payload": {"question": f"{n} =", "expression": n, "answer": n}}
        for split, n in (("train", "1"), ("heldout", "2"))
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert Arithmetic({"tasks_file": str(path)}).tasks("train", 9)[0].payload["answer"] == "1"


# ---- arithmetic --------------------------------------------------------------------------------------------


def problem(answer="10"):
    return Task("arithmetic", "t", 0, {"question": "What is 4 + 6?", "expression": "4 + 6", "answer": answer})


def submit(answer):
    return [Action("", (ToolCall("c", "submit", {"answer": answer}),))]


def test_arithmetic_calculate_then_submit():
    calculator = [Action("", (ToolCall("c", "calculator", {"expression": "(4 + 6) * -2 / 8"}),))]
    observations = play(Arithmetic(), problem(), calculator + submit("10"))
    assert texts(observations) == ["What is 4 + 6?", "-5/2", "Correct."]
    assert [observation.reward for observation in observations] == [0, 0, 1]
    assert observations[-1].status == Status.TERMINATED
    assert observations[-1].metrics == {"success": 1.0, "calculations": 1.0}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("10", 1),
        (" 10 ", 1),
        ("+010.0", 1),
        ("10 or 11", 0),
        ("11 or 10", 0),
        ("in 2010 we paid 310", 0),
        ("10 10", 0),
        ("1", 0),
        ("", 0),
        ("10" + " " * 200 + "x", 0),
        ("NaN", 0),
        ("sNaN", 0),
        ("1e999999999", 0),
        ("0" * 101 + "10", 0),
    ],
)
def test_044_only_the_one_right_answer_scores(answer, score):
    called = play(Arithmetic(), problem(), submit(answer))[-1]
    assert (called.reward, called.status) == (score, Status.TERMINATED)
    if answer.strip():
        written = play(Arithmetic(), problem(), [Action(answer)])[-1]
        assert (written.reward, written.status, written.metrics["success"]) == (score, Status.TERMINATED, score)


def test_arithmetic_only_text_ends_the_episode_and_silence_does_not():
    assert texts(play(Arithmetic(), problem(), [Action("  "), Action("9")])) == [
        "What is 4 + 6?",
        "Call a tool: calculator, submit.",
        "Wrong.",
    ]


def test_arithmetic_the_text_beside_a_call_is_not_an_answer():
    observation = play(Arithmetic(), problem(), [Action("10", (ToolCall("c", "calculator", {"expression": "1"}),))])[-1]
    assert observation.status == Status.RUNNING


@pytest.mark.parametrize("generator", ["chain_sum", "basic_arithmetic", "products"])
def test_arithmetic_generators_agree_with_the_calculator_and_have_the_asked_size(generator):
    domain = Arithmetic({"generator": generator, "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2})
    for task in domain.tasks("train", 30):
        assert calculate(task.payload["expression"]) == task.payload["answer"]
        assert task.payload["expression"] in task.payload["question"]


def test_arithmetic_skips_problems_whose_answer_was_rounded():
    domain = Arithmetic({"generator": "basic_arithmetic", "min_terms": 3, "max_terms": 4, "max_digits": 1})
    entries = [domain.dataset[seed] for seed in range(300)]
    rounded = {entry["question"] for entry in entries if calculate(entry["metadata"]["expression"]) != entry["answer"]}
    assert rounded
    tasks = [task for split in ("train", "heldout") for task in domain.tasks(split, 120)]
    assert max(task.seed for task in tasks) > 200
    assert not rounded & {task.payload["question"] for task in tasks}


def test_arithmetic_options_that_contradict_are_refused():
    with pytest.raises(DomainError, match="min_terms and min_digits must not exceed"):
        Arithmetic({"min_terms": 5, "max_terms": 3})
    with pytest.raises(DomainError, match="option generator = 'sums': Input should be 'chain_sum'"):
        Arithmetic({"generator": "sums"})


def random_expression(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return str(rng.randint(0, 99))
    left, right = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    return rng.choice(["{} + {}", "({} - {})", "{}*{}", "-({} + {})", "{} - -{}"]).format(left, right)


@given(st.integers(0, 10**6))
def test_calculator_agrees_with_python_on_integers(seed):
    expression = random_expression(random.Random(seed), 3)
    assert calculate(expression) == str(eval(expression))


@pytest.mark.parametrize(
    ("expression", "value"), [("7/2", "7/2"), ("1/3*3", "1"), ("6/-3", "-2"), ("8 / 4 / 2", "1"), ("-(-4)", "4"), (" 3 ", "3")]
)
def test_calculator_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("2 ** 9", "integers"),
        ("7 // 2", "integers"),
        ("__import__('os')", "integers"),
        ("1.5", "integers"),
        ("1e9", "integers"),
        ("٣", "integers"),
        ("4(3)", "integers"),
        ("1 / (2 - 2)", "division by zero"),
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("007", "not an arithmetic expression"),
        ("(" * 100 + "1" + ")" * 99, "not an arithmetic expression"),
        ("(" * 100, "not an arithmetic expression"),
        ("9" * 99, "too large"),
        ("*".join(["99999999"] * 20), "too large"),
        ("1" * 201, "201 characters, at most 200"),
    ],
)
def test_calculator_refuses_everything_else(expression, words):
    with pytest.raises(CalculatorError, match=words):
        calculate(expression)
    call = Action("", (ToolCall("c", "calculator", {"expression": expression}),))
    observation = play(Arithmetic(), problem(), [call])[-1]
    assert observation.messages[0].text.startswith("Error: ")
    assert observation.status == Status.RUNNING


@given(st.text(alphabet="0123456789+-*/() ", max_size=200))
def test_calculator_never_fails_in_another_way(expression):
    with contextlib.suppress(CalculatorError):
        calculate(expression)


def test_tools_are_built_once_per_class():
    assert isinstance(FrozenLake().make_env().tools, Tools)
    assert FrozenLake.tools is FrozenLake().make_env().tools.schemas
