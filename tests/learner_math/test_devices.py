"""One device or four: the same loss, gradients and metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_rows_over_four_devices_change_nothing():
    """Gradients within 1e-5 in float32, metrics within 1e-6 and 1e-5 of their size."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.learner_math.on_devices"]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1:] == ["equal"], found.stderr[-2000:]
