"""Files in shared memory that processes hold, for whoever ends them: SGLang's are left there when it is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FOLDER = Path("/dev/shm")


def shared_files(group: int) -> list[Path]:
    """Of shared memory, what processes of the group hold (Linux). Ask while they live."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                held |= {line.split()[4] for line in lines if f"{FOLDER}/" in line}  # inodes: semaphores were renamed
    return [Path(entry.path) for entry in os.scandir(FOLDER) if str(entry.inode()) in held] if held else []
