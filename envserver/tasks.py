"""Lists of tasks: splits that cannot overlap, drawing from seeds, files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.tasks import SPLITS
from common.types import Json, Task
from envserver.env import DomainError

DRAWS_PER_TASK = 200  # seeds that `draw` tries per wanted task, before it says that there are not so many


def split_of(content: str) -> str:
    """The split of a task's content: the parity of a hash that is the same on every machine.

    A function of the content, not of the seed: two seeds that make the same task put it on the same side.
    """
    return SPLITS[hashlib.blake2b(content.encode(), digest_size=8).digest()[0] & 1]


def draw(domain: str, split: str, n: int, make: Callable[[int], tuple[str, Json] | None]) -> list[Task]:
    """The first `n` tasks of a split, from seeds 0, 1, 2, ...

    `make(seed)` is (content, payload), or None when that seed has no task. Tasks are distinct: contents that many seeds
    make, mostly easy ones, would crowd out the rest. Raises DomainError when there are too few.
    """
    if split not in SPLITS:
        raise DomainError(f"domain {domain!r} has no split {split!r}; splits: {', '.join(SPLITS)}")
    out: list[Task] = []
    seen: set[str] = set()
    for seed in range(n * DRAWS_PER_TASK):
        if len(out) == n:
            break
        made = make(seed)
        if made is None or split_of(made[0]) != split or made[0] in seen:
            continue
        seen.add(made[0])
        out.append(Task(domain, f"{domain}-{seed}", seed, made[1]))
    if len(out) < n:
        raise DomainError(
            f"domain {domain!r} has only {len(out)} {split} tasks with these options; "
            f"lower {split}_tasks (now {n}) or make the tasks more varied"
        )
    return out


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    split: str = Field(pattern=f"^({'|'.join(SPLITS)})$")
    id: str = Field(min_length=1)
    seed: int = Field(0, ge=0, lt=2**63)
    payload: dict[str, Any]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_tasks(path: str, domain: str, content: Callable[[Json], str]) -> dict[str, list[Task]]:
    """Tasks by split from JSON lines `{"split": "train", "id": "x", "seed": 0, "payload": {...}}`.

    `content(payload)` is what must not be in both splits; it raises ValueError for a bad payload.
    Raises DomainError with file and line number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # JSON may hold U+2028, which splitlines takes for an end
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"domain {domain!r}: tasks_file {path}: {error}") from error
    out: dict[str, list[Task]] = {split: [] for split in SPLITS}
    ids: set[str] = set()
    split_by_content: dict[str, str] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate(json.loads(text, parse_constant=_refuse))
            key = content(line.payload)
            if line.id in ids:
                raise ValueError(f"id {line.id!r} stands twice")
            if split_by_content.setdefault(key, line.split) != line.split:
                raise ValueError(f"task {line.id!r} is in both splits")
        except json.JSONDecodeError as error:
            raise DomainError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the line"
            raise DomainError(f"{path}:{number}: {where}: {first['msg']}") from error
        except RecursionError as error:
            raise DomainError(f"{path}:{number}: nested too deeply") from error
        except ValueError as error:
            raise DomainError(f"{path}:{number}: {error}") from error
        ids.add(line.id)
        out[line.split].append(Task(domain, line.id, line.seed, line.payload))
    for split in SPLITS:
        if not out[split]:
            raise DomainError(f'{path}: no task of split {split!r}; add lines with "split": "{split}"')
    return out
