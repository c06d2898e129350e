"""Files that appear whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` aside and rename it: readers see the old file or the new one, never a part. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
