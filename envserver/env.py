"""What an environment is, and what a domain brings.

An `Env` is one live episode: single-use, text and tool calls only, never tokens. A `Domain` lists tasks, makes
environments for them and, where it can, gives reference solutions. Most domains build their environment with
`envserver.toolenv.ToolEnv`, from plain methods. A whole domain of 30 lines stands in README.md; it gets a folder and a row in
the table of `envserver/domains/__init__.py`.

Answers of an environment are of three kinds. Scored: an Observation. Caused by the agent (a wrong call, a command that
loops until its time is up): an Observation too, with a real score. Infrastructure: any exception; the server reports it
and the rollout never gets a reward for it.
"""

from __future__ import annotations

import string
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.cli import meant
from common.types import Action, Json, Observation, Task


class DomainError(ValueError):
    """A domain cannot be set up as configured; one line that names the value and the fix."""


class TaskError(ValueError):
    """The task does not fit the domain: the caller's mistake, found in `reset`."""


class EnvMisuse(RuntimeError):
    """`step` before `reset` or after the end, or a second `reset`: environments are single-use."""


class Env(ABC):
    """One episode. The server calls `reset` once, `step` one at a time, `close` at least once."""

    @abstractmethod
    def reset(self, task: Task) -> Observation:
        """Start. A function of the task alone: same task, same observation. Raises TaskError."""

    @abstractmethod
    def step(self, action: Action) -> Observation:
        """Act. What the agent does wrong is an observation; an exception means that the infrastructure failed."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Free what the episode holds. May be called twice."""


class Options(BaseModel):
    """Parent of a domain's options: unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Domain(ABC):
    """A kind of environment and its tasks. Reads its options once, then never changes."""

    name: str
    tools: list[Json]  # OpenAI function schemas
    template: ClassVar[str] = ""  # instructions; empty: instructions.txt in the domain's folder
    options_model: ClassVar[type[Options]] = Options
    has_reference: bool = False
    # Whether reset, step and close may wait or compute for long. False runs them on the server's event loop: right only
    # for pure computation of well under a millisecond, where the hop to a thread would cost more than the work.
    blocking: bool = True

    def __init__(self, options: Mapping[str, Any] | None = None, instructions: str = "") -> None:
        """`instructions` names a file that replaces the domain's own. Raises DomainError."""
        self.options: Any = self._checked(options or {})
        self.instructions = self._instructions(instructions)

    @abstractmethod
    def tasks(self, split: str, n: int) -> list[Task]:
        """The first `n` tasks of a split (fewer from a shorter file). Splits never overlap. Raises DomainError."""

    @abstractmethod
    def make_env(self) -> Env: ...

    def context(self) -> dict[str, Json]:
        """What of its history the policy is shown where a run says `context.name = "domain"`: the keys of that table."""
        return {"name": "append"}

    def reference(self, task: Task) -> list[Action]:
        """Actions that score full marks, one per turn; only asked for when `has_reference`."""
        raise NotImplementedError(f"domain {self.name} has no reference solutions")

    def _checked(self, options: Mapping[str, Any]) -> Options:
        try:
            return self.options_model.model_validate(dict(options))
        except ValidationError as error:
            known = list(self.options_model.model_fields)
            raise DomainError("; ".join(_explain(self.name, detail, known) for detail in error.errors())) from error

    def _instructions(self, path: str) -> str:
        """The template, with `$name` replaced by the option of that name."""
        if path:
            text = read_text(path, f"domains.{self.name}.instructions")
        elif self.template:
            text = self.template
        else:
            folder = Path(sys.modules[type(self).__module__].__file__ or "").parent
            text = read_text(str(folder / "instructions.txt"), f"instructions of domain {self.name}")
        return fill(text, path or "instructions.txt", self.options.model_dump())


def fill(text: str, where: str, values: Mapping[str, Any]) -> str:
    """`text` with `$name` replaced by the value of that name. Raises DomainError."""
    try:
        return string.Template(text.strip()).substitute(values)
    except (KeyError, ValueError) as error:
        known = ", ".join(f"${name}" for name in values) or "none"
        raise DomainError(f"{where}: bad placeholder ({error}); known: {known}; write $$ for a dollar sign") from error


def read_text(path: str, what: str) -> str:
    """A file that the configuration names as `what`. Raises DomainError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DomainError(f"{what}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DomainError(f"{what}: {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _explain(domain: str, detail: Any, known: list[str]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"domain {domain!r}: unknown option {where!r}; {meant(where, known, 'options')}"
    message = detail["msg"].removeprefix("Value error, ")
    if not where:
        return f"domain {domain!r}: {message}"
    return f"domain {domain!r}: option {where} = {detail['input']!r}: {message}"
