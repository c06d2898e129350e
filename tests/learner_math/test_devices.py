"""One device or four: the same loss, gradients and metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # to compile


def on_four_devices(module: str, flags: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    flags = f"--xla_force_host_platform_device_count=4 {flags}"
    command = [sys.executable, "-m", f"tests.learner_math.{module}"]
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=False)


def test_rows_over_four_devices_change_nothing():
    """Gradients within 1e-5 in float32, metrics within 1e-6 and 1e-5 of their size."""
    found = on_four_devices("on_devices")
    assert found.stdout.splitlines()[-1:] == ["equal"], found.stderr[-2000:]


def test_in_float64_neither_rows_nor_micro_batches_padding_or_devices_change_the_loss():
    """Within 1e-12, gradients too; of every policy loss and every aggregation."""
    found = on_four_devices("in_float64", QUICK, JAX_ENABLE_X64="1")
    assert found.stdout.splitlines()[-1:] == ["equal"], found.stderr[-2000:]
