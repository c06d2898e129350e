"""docs/algorithms.md says of each estimator what its docstring says; it names every choice, and no key that there is not."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from common.config_algorithm import PRESETS, AlgorithmConfig, ObservationConfig

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
MODULES = ("advantages", "temporal", "losses", "corrections", "shaping")


def flat(text: str) -> str:
    return " ".join(text.split())


def described() -> dict[str, str]:
    """module.function -> its docstring, of those that say what they assume about turns."""
    found = {}
    for module in MODULES:
        tree = ast.parse((REPOSITORY / "learner" / f"{module}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        found |= {f"{module}.{f.name}": flat(text) for f in functions if "Turns:" in (text := ast.get_docstring(f) or "")}
    return found


ROWS = {
    name: (setting, formula, source, turns)
    for setting, name, formula, source, turns in re.findall(
        r"^\| (.*?) \| `(\w+\.\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, flags=re.MULTILINE
    )
}


def test_every_estimator_has_a_row():
    assert set(ROWS) == set(described())
    assert len(ROWS) > 25


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_the_docstring_says(name):
    docstring = described()[name]
    _, formula, source, turns = ROWS[name]
    parts = re.findall(r"`([^`]+)`", formula)
    assert parts or name == "shaping.compactly_filtered"
    for part in parts:
        assert f"`{part}`" in docstring
    assert source
    for part in source.split("; "):
        assert all(word in docstring for word in part.split(", ")), part
    assert turns.endswith(".")
    assert re.search(rf"Turns: {re.escape(turns)}( |$)", docstring)  # whole sentences, of which the docstring may have more


def test_settings_are_keys_of_the_configuration_with_values_that_it_takes():
    keys = AlgorithmConfig.model_fields | {f"observation.{name}": x for name, x in ObservationConfig.model_fields.items()}
    for setting, *_ in ROWS.values():
        for key, value in re.findall(r"`([a-z_.]+)(?: = ([^`]*))?`", setting):
            if key != "state_key":  # the domain's
                assert key in keys
                assert not value or json.loads(value) in (*get_args(keys[key].annotation), True)


def test_every_choice_is_on_the_page():
    fields = AlgorithmConfig.model_fields
    for field, own in {**dict.fromkeys(("advantage", "normalize", "policy_loss", "correction", "aggregation"), fields)}.items():
        for choice in get_args(own[field].annotation):
            assert choice == "none" or re.search(rf'`?"?{choice}"?`', PAGE), choice
    for choice in get_args(ObservationConfig.model_fields["loss"].annotation):
        assert choice == "none" or f'`observation.loss = "{choice}"`' in PAGE


def test_presets_say_where_they_are_from_and_set_nothing_but_the_algorithm():
    files = sorted(PRESETS.glob("*.toml"))
    assert len(files) == 16
    for file in files:
        text = file.read_text()
        head = text.partition("[algorithm]")[0]
        for word in ("# Source: ", "# Values: ", "# Differs: ", "# Tasks: "):
            assert word in head, f"{file.name}: {word}"
        assert set(tomllib.loads(text)) == {"algorithm"}
        assert AlgorithmConfig(preset=file.stem).preset == file.stem
