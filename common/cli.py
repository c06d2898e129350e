"""TOML files and `--a.b=value` overrides into a RunConfig, with errors that name the field and the fix."""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from common.config import RunConfig
from common.config_algorithm import AlgorithmConfig


class ConfigError(ValueError):
    """The configuration is wrong; the message has one line per mistake, each with the field and the fix."""


def load(path: str | Path, overrides: list[str] = []) -> RunConfig:  # noqa: B006 - never changed
    """Read `path`, apply overrides such as `--optimizer.lr=1e-3` or `--domains.0.capacity=8`, and check all of it.

    Raises ConfigError.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}; save it as UTF-8") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; committed configurations are in configs/") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _apply(table, override, _value)
    try:
        _keep_words(table, overrides)
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(detail)}" for detail in error.errors())) from error


def _keep_words(table: dict[str, Any], overrides: list[str]) -> None:
    """Where a text is wanted, `--name=2026-11-30` is one, though TOML would read a date."""
    try:
        RunConfig.model_validate(table)
    except ValidationError as error:
        wanted = {".".join(map(str, detail["loc"])) for detail in error.errors() if detail["type"] == "string_type"}
        for override in overrides:
            if override.removeprefix("--").partition("=")[0] in wanted:
                _apply(table, override, str)


def _apply(table: dict[str, Any], override: str, read: Callable[[str], Any]) -> None:
    key, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or not key:
        raise ConfigError(f"override {override!r}: write --table.key=value, for instance --optimizer.lr=1e-3")
    place: Any = table
    *path, last = key.split(".")
    for part in path:
        if isinstance(place, list):
            place = _item(place, part, override)
        else:
            place = place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"override {override!r}: {part} is a value, not a table")
    if isinstance(place, list):
        where = ".".join(path)
        tables = all(isinstance(entry, dict) for entry in place)
        fix = (
            f"name a key of one of the list's entries: --{where}.0.KEY=..."
            if tables
            else f"write the whole list: --{where}=[...]"
        )
        raise ConfigError(f"override {override!r}: {fix}")
    place[last] = read(text)


def _item(place: list[Any], part: str, override: str) -> Any:
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(f"override {override!r}: {part!r} is not an index into a list of {len(place)} entries")
    return place[int(part)]


def _value(text: str) -> Any:
    """A TOML value; bare words are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        return f"unknown key {where}; {meant(str(key), sorted(_keys(parents)), 'keys here')}"
    if detail["type"] == "missing":
        return f"{where} is missing; add it"
    message = detail["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where} = {detail['input']!r}: {message}" if not isinstance(detail["input"], dict | list) else f"{where}: {message}"


def refuse(error: Exception) -> int:
    """Say in one line why a program does not go on; returns its exit status: a restart would not help."""
    print("polyturn: error: " + str(error).replace("\n", "; "), file=sys.stderr)
    return 2


def meant(word: str, known: Sequence[str], what: str) -> str:
    """The fix for an unknown `word`: the one of `known` that is like it, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known {what}: {', '.join(known) or 'none'}"


def _keys(path: list[Any]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        if isinstance(part, int):
            continue
        model = _table_of(model.model_fields[part].annotation) or AlgorithmConfig  # a domain's keys are those of the run's
    return list(model.model_fields)


def _table_of(annotation: Any) -> Any:
    """The table class inside `X` or `list[X]`; None when there is none."""
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def help_text() -> str:
    """Every key with its type, default and meaning."""
    lines = ["Keys (set in the TOML file, or override with --table.key=value):", ""]
    _describe(RunConfig, "", lines)
    return "\n".join(lines)


def _describe(model: type[BaseModel], prefix: str, lines: list[str]) -> None:
    for name, info in model.model_fields.items():
        table = _table_of(info.annotation)
        if table is not None:
            index = "0." if get_origin(info.annotation) is list else ""
            _describe(table, f"{prefix}{name}.{index}", lines)
            continue
        default = "required" if info.is_required() else f"default {json.dumps(info.default, default=str)}"
        meaning = f"  {info.description}" if info.description else ""
        lines.append(f"  --{prefix}{name}=<{_type_name(info.annotation)}>  ({default}){meaning}")


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_args(annotation) and get_origin(annotation) is not None:
        inner = get_args(annotation)
        if all(isinstance(item, str | int) for item in inner):
            return "|".join(map(str, inner))
        if get_origin(annotation) is list:
            return f"list of {_type_name(inner[0])}"
        return "table"
    return getattr(annotation, "__name__", str(annotation))


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that `load` reads back."""
    lines: list[str] = []
    _dump(config.model_dump(), "", lines)
    return "\n".join(lines) + "\n"


def _dump(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
    """Values first, then tables and lists of tables under headers of their own: TOML's order."""
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if isinstance(v, list) and v and all(isinstance(item, dict) for item in v)}
    for key, value in table.items():
        if key not in tables and key not in arrays:
            lines.append(f"{_key(key)} = {_toml(value)}")
    for key, value in tables.items():
        lines += ["", f"[{prefix}{_key(key)}]"]
        _dump(value, f"{prefix}{_key(key)}.", lines)
    for key, entries in arrays.items():
        for entry in entries:
            lines += ["", f"[[{prefix}{_key(key)}]]"]
            _dump(entry, f"{prefix}{_key(key)}.", lines)


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL, TOML escapes it
    return str(value)  # numbers, dates and times
