"""What every benchmark writes: its measurements, the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def head() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write(name: str, measurements: Mapping[str, float], commit: str) -> None:
    """runs/bench/<name>.json."""
    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    path = ROOT / "runs" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"measurements": measurements, "machine": machine, "commit": commit}, indent=1) + "\n")
