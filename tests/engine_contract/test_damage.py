"""Weights that cannot be loaded. Whatever an engine does, it must never serve something else under the new version's name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine_contract.conftest import Models, Served
from tests.engine_contract.test_contract import CLOSE, PROMPTS, differences


def damaged(models: Models, folder: Path, damage: str) -> Path:
    if damage != "missing":
        shutil.copytree(models.a, folder)
    if damage == "without weights":
        (folder / "model.safetensors").unlink()
    if damage == "cut short":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    return folder


@pytest.mark.parametrize("damage", ["missing", "without weights", "cut short"])
def test_weights_that_cannot_be_loaded(engine: Served, models: Models, tmp_path: Path, damage: str) -> None:
    if (engine.name, damage) == ("sglang", "cut short"):
        pytest.skip("it dies of them: test_weights_that_kill")
    body = {
        "model_path": str(damaged(models, tmp_path / "bad", damage)),
        "weight_version": "9",
        "flush_cache": True,
        "load_format": "safetensors",
    }
    status, answer = engine.call("/update_weights_from_disk", body)
    assert status == 400, answer
    assert answer["success"] is False
    assert answer["message"]
    assert engine.api.weight_version() == "1"
    assert differences(engine.generate(PROMPTS[1], new=6), PROMPTS[1], models).max() < CLOSE
