"""Arguments of a call: strict JSON, and what the tools' schemas say about values that are written as text."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import Json

UNWRAPS = 2  # times that JSON inside a JSON string is decoded where the schema wants an object or a list
_SCALARS = {"string", "integer", "number", "boolean", "null"}


@dataclass(frozen=True)
class Schemas:
    """What the tools of an episode take; empty when nothing is known of them."""

    parameters: dict[str, Json] = field(default_factory=dict)  # tool -> JSON schema of its arguments

    @classmethod
    def of(cls, tools: Sequence[Json]) -> Schemas:
        """`tools` as OpenAI function schemas."""
        functions = [tool.get("function", tool) for tool in tools]
        return cls({function["name"]: function.get("parameters") or {} for function in functions})

    def properties(self, tool: str) -> dict[str, Json]:
        return self.parameters.get(tool, {}).get("properties") or {}

    def required(self, tool: str) -> list[str]:
        return list(self.parameters.get(tool, {}).get("required") or [])

    def only(self) -> str:
        """The tool, when there is one alone; "" otherwise."""
        return next(iter(self.parameters)) if len(self.parameters) == 1 else ""

    def text_parameter(self, tool: str) -> str:
        """The parameter of a tool that one piece of text can fill: its one required parameter, or its only one."""
        required, names = self.required(tool), list(self.properties(tool))
        candidates = required if len(required) == 1 else names if len(names) == 1 and not required else []
        return candidates[0] if candidates and kinds(self.properties(tool)[candidates[0]]) & _SCALARS else ""


NO_SCHEMAS = Schemas()


@functools.lru_cache(256)
def schemas_of(tools_json: str) -> Schemas:
    """Those of an episode's tools, a JSON list; "" is none."""
    return Schemas.of(json.loads(tools_json)) if tools_json else NO_SCHEMAS


def kinds(schema: Json) -> set[str]:
    """JSON types that a schema allows, through anyOf and enum; empty when it says nothing."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    found = {named} if isinstance(named, str) else set(named)
    for option in (*schema.get("anyOf", []), *schema.get("oneOf", [])):
        found |= kinds(option)
    if not found and "enum" in schema:
        found = {_kind(value) for value in schema["enum"]}
    return found


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str), ("array", list)):
        if isinstance(value, types):
            return kind
    return "object"


# ---- JSON -------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Json:
    """Strict JSON: UTF-8, no NaN or infinity, no duplicate keys, no lone surrogates. Raises ValueError that says what."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    try:
        value = _STRICT.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from error
    return value


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return out


def _no_constant(text: str) -> Json:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:  # Python's own words about it are advice for programmers
        raise ValueError(f"{text[:9]}... has too many digits") from error


_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)


# ---- arguments --------------------------------------------------------------------------------------------


def read_arguments(value: Json, tool: str, schemas: Schemas) -> dict[str, Json]:
    """The arguments object of a call that was written as JSON. Raises ValueError that says what is wrong.

    Nothing at all (missing, null, blank) is no arguments. An object in a JSON string is decoded, and so is one argument
    whose schema wants an object or a list; an argument that may be a string stays as it is.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    try:
        value = _unwrap(value, (dict,))
    except ValueError as error:
        raise ValueError("must be a JSON object") from error
    properties = schemas.properties(tool)
    return {name: _fit(argument, properties.get(name)) for name, argument in value.items()}


def _fit(argument: Json, schema: Json) -> Json:
    wanted = kinds(schema)
    if not isinstance(argument, str) or not wanted or wanted & _SCALARS - {"null"}:
        return argument
    try:
        return _unwrap(argument, (dict, list))
    except ValueError:
        return argument  # the environment says what it wants instead


def _unwrap(value: Json, wanted: tuple[type, ...]) -> Any:
    """Decode JSON strings, at most UNWRAPS times, until the value is one of `wanted`. Raises ValueError."""
    for _ in range(UNWRAPS):
        if not isinstance(value, str):
            break
        value = parse_json(value.encode())
    if not isinstance(value, wanted):
        raise ValueError(f"a {type(value).__name__} is not what is wanted")
    return value


def from_text(text: str, schema: Json) -> Json:
    """An argument that was written as bare text, as its schema wants it. Raises ValueError that says what it must be."""
    wanted = kinds(schema)
    if "null" in wanted and text.strip().lower() in ("null", "none"):
        return None
    if "string" in wanted or not wanted:
        return _spelled(text, schema)
    if "boolean" in wanted and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise ValueError(f"must be {_either(wanted)}: {error}") from error
    kind = _kind(value)
    if kind not in wanted and not (kind == "integer" and "number" in wanted):
        raise ValueError(f"must be {_either(wanted)}, not {text.strip()[:40]!r}")
    return value


def _spelled(text: str, schema: Any) -> str:
    """`text`, or the entry of the schema's enum that differs from it only in case."""
    options = schema.get("enum", []) if isinstance(schema, dict) else []
    same = [option for option in options if isinstance(option, str) and option.lower() == text.strip().lower()]
    return same[0] if len(same) == 1 else text


def _either(names: set[str]) -> str:
    return " or ".join(sorted(names - {"null"}))
