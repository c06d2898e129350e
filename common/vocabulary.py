"""What a tokenizer's files say about its vocabulary, read as JSON: no tokenizer library is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token -> id of a tokenizer.json: the model's vocabulary (a table, or Unigram's list) and the added tokens."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {token: index for index, (token, _score) in enumerate(vocabulary)}
    return {**vocabulary, **{entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}}


def sampleable(folder: Path) -> int:
    """One more than the largest id that the tokenizer in `folder` knows: rows of an embedding above it are padding."""
    return 1 + max(token_ids(json.loads((folder / "tokenizer.json").read_text())).values())
