"""The table of domains. To add one: a folder here, a function below, a row in DOMAINS, an extra in pyproject.toml."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envserver.env import Domain, DomainError


def _frozenlake(options: Mapping[str, Any], instructions: str) -> Domain:
    from envserver.domains.frozenlake import FrozenLake

    return FrozenLake(options, instructions)


def _arithmetic(options: Mapping[str, Any], instructions: str) -> Domain:
    from envserver.domains.arithmetic import Arithmetic

    return Arithmetic(options, instructions)


@dataclass(frozen=True)
class Row:
    """`package` is what the domain's extra installs; the extra has the domain's name. Empty: it needs nothing more."""

    load: Callable[[Mapping[str, Any], str], Domain]
    package: str = ""


DOMAINS: dict[str, Row] = {
    "arithmetic": Row(_arithmetic, "reasoning_gym"),
    "frozenlake": Row(_frozenlake, "gymnasium"),
}


def check_installed(name: str, table: Mapping[str, Row] = DOMAINS) -> Row:
    """The row of a domain that can be loaded here; imports nothing. Raises DomainError."""
    if name not in table:
        raise DomainError(f"unknown domain {name!r}; known domains: {', '.join(sorted(table))}")
    row = table[name]
    if row.package and importlib.util.find_spec(row.package) is None:
        raise DomainError(f"domain {name!r} needs {row.package}: run `make setup`, or pip install -e '.[{name}]'")
    return row


def load_domain(name: str, options: Mapping[str, Any] | None = None, instructions: str = "") -> Domain:
    """A domain with its options checked. Raises DomainError."""
    return check_installed(name).load(options or {}, instructions)
