"""The key of a run: who may call its engines and its relays.

Where a run can be reached from other machines, every call to an engine but /health needs the key, /generate included: what
SGLang does with --api-key. (Its --admin-api-key alone would leave /server_info open, which tells all arguments, that key
among them.) The launcher makes the key; it stands in a file that only its owner reads, never in a command line or a log. The
file is YAML because SGLang reads it as it is, by --config.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from common.addresses import AddressesError
from common.config import RunConfig

NAME = "engine_key.yaml"
START, END = 'api-key: "', '"\n'


class KeyFileError(AddressesError):
    """The key cannot be read; one line with the fix."""


def make(run: Path) -> None:
    """Unless the run has one."""
    path = run / NAME
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{START}{secrets.token_hex(32)}{END}")


def read(path: Path) -> str:
    """Raises KeyFileError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; start the run with tools/launch.py") from error
    key = text.removeprefix(START).removesuffix(END)
    if text != f"{START}{key}{END}" or not key.isalnum():
        raise KeyFileError(f"{path}: not a line such as {START}0a1b{END.strip()}; remove the file and start the run again")
    return key


def of_run(run: Path, config: RunConfig) -> str:
    """Empty where the run needs none. Raises KeyFileError."""
    return read(run / NAME) if config.keyed else ""


def bearer(key: str) -> dict[str, str]:
    """The header that shows `key`; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def shown(authorization: str, key: str) -> bool:
    """Whether the header `authorization` shows `key`. Without a key everybody may call."""
    return not key or secrets.compare_digest(authorization.encode(), f"Bearer {key}".encode())
