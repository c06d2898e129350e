"""One embedded engine, as a process, over a tiny model with the tiny tokenizer; certificates in this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from actors.codec import ByteLevelCodec
from learner.model import hf
from learner.model.spec import ModelSpec
from tests.processes import until
from tools import certify

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tokenizers" / "tiny"
SPEC = ModelSpec(1024, 32, 64, 2, 4, 2, 8, 10_000.0)
END = 1017


def make_model(folder: Path, seed: int = 0) -> Path:
    """Random weights, ten times larger than a fresh model's: its distributions are far from uniform."""
    state = jax.tree.map(lambda x: 10 * x if x.ndim == 2 else x, hf.random_state(SPEC, seed))
    hf.save(state, SPEC, folder, "float32", END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """The model's directory, to be changed."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


@pytest.fixture(scope="session")
def codec() -> ByteLevelCodec:
    return ByteLevelCodec(TINY / "tokenizer.json")


@pytest.fixture(scope="session")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    log = tmp_path_factory.mktemp("engine") / "log"
    shape = ["--slots", "8", "--cache-slots", "16", "--max-length", "256", "--port", "0"]
    command = [sys.executable, "-m", "learner.serving", "--model-path", str(model), *shape]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stderr=out, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        until(lambda: process.poll() is not None or re.search(r"listening on \S+", log.read_text()), "the engine", 120)
        found = re.search(r"listening on (\S+)", log.read_text())
        assert found, log.read_text()
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        assert process.wait(30) == 0


@dataclass(frozen=True)
class Certificate:
    status: int
    rows: dict[str, dict]  # by check
    out: str
    error: str

    def named(self, verdict: str) -> set[str]:
        return {check for check, row in self.rows.items() if row["verdict"] == verdict}


@pytest.fixture
def certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Certificate]:
    """`certified(MODEL, URL, "--option", ...)`."""

    def run(folder: Path, url: str, *options: str) -> Certificate:
        path = tmp_path / "rows.json"
        status = certify.main([str(folder), "--engine", url, "--json", str(path), *options])
        out, error = capsys.readouterr()
        rows = json.loads(path.read_text())["rows"] if path.is_file() else []
        path.unlink(missing_ok=True)
        return Certificate(status, {row["check"]: row for row in rows}, out, error)

    return run
