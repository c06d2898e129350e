"""arithmetic: problems of Reasoning Gym, a calculator, and an answer to submit.

`calculator` evaluates, `submit` ends the episode. An action that is plain text without any call ends it too and is the
answer; an empty action is asked for a call. Answers are scored by Reasoning Gym's own scorer for the generator, and only
full marks count: its partial credit for an answer that merely contains the right one would pay for naming several.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from common.types import Action, Json, Task, ToolCall
from envserver.domains.arithmetic.calculator import CalculatorError, calculate
from envserver.env import Domain, Options, TaskError
from envserver.tasks import draw, read_tasks
from envserver.toolenv import ToolEnv, ToolError, ToolResult, Tools

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares text with `is`
    import reasoning_gym

MAX_ANSWER = 100  # characters; anything longer is wrong


class ArithmeticOptions(Options):
    generator: Literal["chain_sum", "basic_arithmetic", "products"] = Field("chain_sum", description="of Reasoning Gym")
    min_terms: int = Field(2, ge=1, le=12)
    max_terms: int = Field(4, ge=1, le=12)
    min_digits: int = Field(1, ge=1, le=6)
    max_digits: int = Field(2, ge=1, le=6)
    tasks_file: str = Field(
        "", description='JSON lines with payloads {"question", "expression", "answer"}, instead of drawn problems'
    )

    @model_validator(mode="after")
    def _ranges(self) -> ArithmeticOptions:
        if self.min_terms > self.max_terms or self.min_digits > self.max_digits:
            raise ValueError("min_terms and min_digits must not exceed max_terms and max_digits")
        return self


def parse_problem(payload: Json) -> dict[str, str]:
    """Raises ValueError when `payload` is not a problem."""
    keys = {"question", "expression", "answer"}
    if not isinstance(payload, dict) or set(payload) != keys or not all(isinstance(payload[key], str) for key in keys):
        raise ValueError(f'a problem is {{"question": "2 + 3 =", "expression": "2 + 3", "answer": "5"}}, not {payload!r}')
    return payload


def question_of(payload: Json) -> str:
    return parse_problem(payload)["question"]


class ArithmeticEnv(ToolEnv):
    def __init__(self, score: Any) -> None:
        """`score(answer, entry)` is a Reasoning Gym scorer: 1.0 is full marks."""
        self.score = score

    def begin(self, task: Task) -> str:
        try:
            self.problem = parse_problem(task.payload)
        except ValueError as error:
            raise TaskError(f"task {task.id}: {error}") from error
        self.correct = False
        self.calculations = 0
        return self.problem["question"]

    def calculator(self, expression: str) -> str:
        """Evaluate an expression."""
        try:
            value = calculate(expression)
        except CalculatorError as error:
            raise ToolError(str(error)) from error
        self.calculations += 1
        return value

    def submit(self, answer: str) -> ToolResult:
        """Give the answer."""
        text = answer.strip()
        entry = {"question": self.problem["question"], "answer": self.problem["answer"], "metadata": {}}
        self.correct = len(text) <= MAX_ANSWER and self.score(text, entry) == 1.0
        return ToolResult("Correct." if self.correct else "Wrong.", float(self.correct), done=True)

    tools = Tools(calculator, submit)

    def no_call(self, text: str) -> ToolResult:
        return self.submit(text) if text.strip() else super().no_call(text)

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.correct), "calculations": float(self.calculations)}


class Arithmetic(Domain):
    name = "arithmetic"
    tools = ArithmeticEnv.tools.schemas
    options_model = ArithmeticOptions
    has_reference = True
    blocking = False  # parsing and adding numbers of bounded size: tens of microseconds

    @cached_property
    def dataset(self) -> Any:
        """The generator; problem `i` is a function of `i` and the options."""
        sizes = self.options.model_dump(include={"min_terms", "max_terms", "min_digits", "max_digits"})
        return reasoning_gym.create_dataset(self.options.generator, seed=0, size=2**31 - 1, **sizes)

    def tasks(self, split: str, n: int) -> list[Task]:
        if self.options.tasks_file:
            return read_tasks(self.options.tasks_file, self.name, question_of)[split][:n]
        return draw(self.name, split, n, self._problem)

    def make_env(self) -> ArithmeticEnv:
        return ArithmeticEnv(self.dataset.score_answer)

    def reference(self, task: Task) -> list[Action]:
        """Evaluate the expression, then submit what came out."""
        expression = parse_problem(task.payload)["expression"]
        return [
            Action("", (ToolCall("call_0", "calculator", {"expression": expression}),)),
            Action("", (ToolCall("call_1", "submit", {"answer": calculate(expression)}),)),
        ]

    def _problem(self, seed: int) -> tuple[str, Json] | None:
        entry = self.dataset[seed]
        payload = {"question": entry["question"], "expression": entry["metadata"]["expression"], "answer": entry["answer"]}
        try:
            exact = calculate(payload["expression"]) == payload["answer"]
        except CalculatorError:
            exact = False
        # The generator rounds some quotients down; those problems have no answer that a calculator would agree with.
        return (payload["question"], payload) if exact else None
