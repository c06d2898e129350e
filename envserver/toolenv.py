"""`ToolEnv`: an environment made of plain Python functions.

A tool is a method (or a function) with type hints and a docstring; its JSON schema comes from them. Calls of one action
run in order, each succeeds or fails alone and each gets its own message. A call that cannot be parsed, an unknown name
or wrong arguments are observations, never exceptions: the agent reads what was wrong and goes on.
"""

from __future__ import annotations

import inspect
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from common.types import Action, Json, Message, Observation, Status, Task, ToolCall, ToolOutcome
from envserver.env import Env, EnvMisuse

ECHO_LIMIT = 80  # characters of the agent's own words in an error message
OVER = "Not executed: the episode is over."

_ARGUMENTS = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)


class ToolError(Exception):
    """Raised by a tool for a mistake of the agent; its text becomes the observation."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers. `done` ends the episode (TERMINATED)."""

    text: str
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Answer:
    """What one call comes to."""

    message: Message
    outcome: ToolOutcome
    reward: float = 0.0
    done: bool = False


class Tools:
    """The tools of an environment, or of what it holds: a function whose first parameter is `self` gets that there.

    `beside` names tools that somebody else answers, for the answer to a call of a tool that does not exist.
    """

    def __init__(self, *functions: Callable[..., ToolResult | str], beside: Sequence[str] = ()) -> None:
        self._tools = {function.__name__: _Tool(function) for function in functions}
        self.names = ", ".join([*beside, *self._tools])
        self.schemas: list[Json] = [tool.schema for tool in self._tools.values()]

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def answer(self, env: object, call: ToolCall) -> Answer:
        """Run one call. Everything that the agent did wrong is what it reads."""
        started = time.perf_counter()
        try:
            result, error = self.call(env, call), ""
        except ToolError as mistake:
            error = clean(str(mistake))
            result = ToolResult(f"Error: {error}")
        outcome = ToolOutcome(clean(call.name), not error, error, time.perf_counter() - started)
        return Answer(Message("tool", clean(result.text), call.id), outcome, result.reward, result.done)

    def call(self, env: object, call: ToolCall) -> ToolResult:
        """Run one call. Raises ToolError for everything that the agent did wrong."""
        if call.error:
            raise ToolError(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {_short(call.name)}; tools: {self.names}")
        result = tool.run(env, call.arguments)
        if isinstance(result, str):
            return ToolResult(result)
        if not isinstance(result, ToolResult):
            raise TypeError(f"tool {call.name} returned {type(result).__name__}; return text or a ToolResult")
        return result


class _Tool:
    """One function, its argument model and its schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        self.bound = bool(parameters) and parameters[0].name == "self"
        hints = get_type_hints(function, include_extras=True)
        description, meanings = _read_docstring(function)
        fields: dict[str, Any] = {}
        for parameter in parameters[self.bound :]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise TypeError(f"tool {function.__name__}: parameter {parameter} cannot be called by name")
            if parameter.name not in hints:
                raise TypeError(f"tool {function.__name__}: parameter {parameter.name} needs a type hint")
            default = ... if parameter.default is parameter.empty else parameter.default
            meaning = meanings.get(parameter.name)
            # Fields have a prefix of their own, so that an argument may be called "json" or "copy".
            fields[f"a_{parameter.name}"] = (hints[parameter.name], Field(default, alias=parameter.name, description=meaning))
        self.names = [name.removeprefix("a_") for name in fields]
        self.model: type[BaseModel] = create_model(function.__name__, __config__=_ARGUMENTS, **fields)
        parameters_schema = _without_titles(self.model.model_json_schema())
        parameters_schema.pop("additionalProperties", None)
        parameters_schema.setdefault("properties", {})
        self.schema = {
            "type": "function",
            "function": {"name": function.__name__, "description": description, "parameters": parameters_schema},
        }

    def run(self, env: object, arguments: Json) -> Any:
        try:
            values = self.model.model_validate(arguments)
        except ValidationError as error:
            raise ToolError("; ".join(self._explain(detail) for detail in error.errors()[:3])) from error
        checked = {name: getattr(values, f"a_{name}") for name in self.names}
        return self.function(env, **checked) if self.bound else self.function(**checked)

    def _explain(self, detail: Any) -> str:
        name = self.function.__name__
        where = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            return f"{name} has no argument {_short(where)}; arguments: {', '.join(self.names) or 'none'}"
        if detail["type"] == "missing":
            return f"{name} needs the argument {where}"
        if not where:
            return f"the arguments of {name} must be a JSON object"
        return f"{name}: {_short(where, quote=False)} is {_short(detail['input'])}: {detail['msg']}"


class ToolEnv(Env):
    """Subclasses define `begin`, their tools and `tools = Tools(...)`; the rest has defaults."""

    tools: ClassVar[Tools]
    _phase = "new"  # then "running", then "over"

    @abstractmethod
    def begin(self, task: Task) -> str:
        """Set up the episode and say the task's text."""

    def no_call(self, text: str) -> ToolResult:
        """Answer to an action without a tool call. The actor's turn limit bounds how often it is heard."""
        return ToolResult(f"Call a tool: {self.tools.names}.")

    def metrics(self) -> dict[str, float]:
        """Numbers about the episode so far; "success" (0 or 1) is what evaluations count."""
        return {}

    def state_key(self) -> bytes:
        """Equal bytes for equal states of equal tasks; empty when the domain has no such notion."""
        return b""

    def reset(self, task: Task) -> Observation:
        if self._phase != "new":
            raise EnvMisuse("reset was called before on this environment; make a new one for each episode")
        text = self.begin(task)
        self._phase = "running"
        return self._observe((Message("user", clean(text)),), 0.0, ())

    def step(self, action: Action) -> Observation:
        if self._phase != "running":
            raise EnvMisuse(f"step on an environment whose episode is {self._phase}")
        if not action.tool_calls:
            result = self.no_call(action.text)
            self._phase = "over" if result.done else "running"
            return self._observe((Message("user", clean(result.text)),), result.reward, ())
        answers: list[Answer] = []
        for call in action.tool_calls:
            answers.append(not_executed(call) if self._phase == "over" else self.tools.answer(self, call))
            self._phase = "over" if answers[-1].done else self._phase
        reward = sum((answer.reward for answer in answers), 0.0)
        return self._observe(tuple(answer.message for answer in answers), reward, tuple(answer.outcome for answer in answers))

    def _observe(self, messages: tuple[Message, ...], reward: float, outcomes: tuple[ToolOutcome, ...]) -> Observation:
        status = Status.TERMINATED if self._phase == "over" else Status.RUNNING
        return Observation(messages, reward, status, self.metrics(), outcomes, self.state_key())


def not_executed(call: ToolCall) -> Answer:
    """The answer to a call behind the one that ended the episode."""
    return Answer(Message("tool", OVER, call.id), ToolOutcome(clean(call.name), False, OVER, 0.0))


def clean(text: str) -> str:
    """Valid UTF-8: an agent can send half a surrogate pair in a JSON string, and a tool can echo it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(value: Json, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= ECHO_LIMIT else text[:ECHO_LIMIT] + "..."


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """First paragraph, and the lines `name: meaning` under "Args:"."""
    text = inspect.getdoc(function)
    if not text:
        raise TypeError(f"tool {function.__name__} needs a docstring: the agent reads it")
    first = " ".join(text.split("\n\n")[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?)+)", text, re.MULTILINE)
    lines = section.group(1) if section else ""
    return first, {name: meaning.strip() for name, meaning in re.findall(r"^\s+(\w+):\s*(.+)$", lines, re.MULTILINE)}


def _without_titles(schema: Json, names: bool = False) -> Json:
    """pydantic titles every field; each word is tokens in every prompt. `names`: the keys are argument names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    keep = {key: value for key, value in schema.items() if names or key != "title"}
    return {key: _without_titles(value, names=not names and key in ("properties", "$defs")) for key, value in keep.items()}
