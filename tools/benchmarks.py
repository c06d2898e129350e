"""What every benchmark writes: its measurements, the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # by degrees of freedom


def head() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write(name: str, measurements: Mapping[str, float], commit: str) -> None:
    """runs/bench/<name>.json."""
    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    path = ROOT / "runs" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"measurements": measurements, "machine": machine, "commit": commit}, indent=1) + "\n")


def interval(values: list[float]) -> tuple[float, float]:
    """Of 95 %, of the mean (Student's t)."""
    if len(values) < 2:
        return values[0], values[0]
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    return mean - half, mean + half
