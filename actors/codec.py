"""Text to ids and ids to bytes, for byte-level BPE tokenizers.

There are two ways in. `encode_template` is for text of the chat template: control tokens in it are recognised. `encode_text`
is for everything that anybody else wrote (tasks, observations, errors, tool names): no control token can come out of it,
neither a special one nor an added one such as <tool_call>, and it decodes back to the same text: the tokenizer's own Unicode
normalisation is left out. (A character that the vocabulary cannot spell becomes a replacement character, never nothing.)

The way out is bytes per id, so that the text of any run of tokens, and where each token begins, are exact.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
CACHED_CHARS = 200  # texts up to this length are remembered: observations repeat


class CodecError(ValueError):
    """The tokenizer's files cannot be used; the message names the file and the fix."""


class Codec(Protocol):
    """What chat and parser need of a tokenizer."""

    control: dict[str, int]  # control and added tokens by their text

    @property
    def pieces(self) -> Sequence[bytes]: ...  # of each id; b"" where an id has no meaning

    def encode_text(self, text: str) -> list[int]: ...

    def encode_template(self, text: str) -> list[int]: ...


def decode_bytes(codec: Codec, ids: Sequence[int]) -> bytes:
    return b"".join([codec.pieces[i] for i in ids])


def decode(codec: Codec, ids: Sequence[int]) -> str:
    """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
    return decode_bytes(codec, ids).decode("utf-8", "replace")


@dataclass(frozen=True)
class ModelFiles:
    """What actors need of a model's folder."""

    codec: Codec
    template: str
    end_token: str
    rows: int  # of the embedding
    end_ids: tuple[int, ...] = ()  # where engines stop: those of the generation configuration
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, ...: templates write them
    adds_bos: bool = False  # texts begin with the beginning-of-text token


def load_model_files(folder: str | Path) -> ModelFiles:
    """Read tokenizer.json, tokenizer_config.json and config.json. Raises CodecError."""
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json")
    codec = ByteLevelCodec(folder / "tokenizer.json")
    rows = int(model.get("vocab_size", 0))
    if rows < len(codec.pieces):
        raise CodecError(
            f"{folder / 'config.json'}: vocab_size {rows} is below the tokenizer's {len(codec.pieces)} ids; "
            "use the tokenizer that belongs to the model"
        )
    template = _template(folder, config.get("chat_template"))
    special = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
    special = {name: text for name, text in special.items() if text}
    end = special.get("eos_token", "")
    if end not in codec.control:
        raise CodecError(f"{folder / 'tokenizer_config.json'}: eos_token {end!r} is no control token of tokenizer.json; set it")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ends = {*_listed(model.get("eos_token_id")), *_listed(generation.get("eos_token_id"))}
    return ModelFiles(codec, template, end, rows, tuple(sorted(ends)), special, bool(config.get("add_bos_token")))


def _template(folder: Path, entry: Any) -> str:
    """The model's chat template, "" without one. `entry` is what tokenizer_config.json says of it.

    As transformers has it: files of templates put the entry out of use, and of several under names the one called "default" is
    taken. Not so "tool_use", which transformers takes instead as soon as a dialogue has tools: one template has to show all of
    a dialogue, the bridges between its turns too, and tools that it does not show are explained in the instructions.
    """
    where, more = folder / "tokenizer_config.json", folder / "additional_chat_templates"
    single = folder / "chat_template.jinja"
    files = {"default": single} if single.is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in more.glob("*.jinja")}
    named: Any = files or entry
    if not files and isinstance(entry, list):
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) and "template" in one for one in entry):
            raise CodecError(f"{where}: chat_template is a list, but not of tables with a name and a template; write one text")
        named = {one["name"]: one["template"] for one in entry}
    if isinstance(named, dict):
        if "default" not in named:
            told = ", ".join(sorted(map(str, named)))
            raise CodecError(f"{more if files else where}: no chat template is called 'default' ({told}); rename the one to use")
        entry = named["default"]
    if isinstance(entry, Path):
        return _read_text(entry)
    if not isinstance(entry, str | None):
        raise CodecError(f"{where}: chat_template is {str(entry)[:40]!r}, no text; write the template, or chat_template.jinja")
    return entry or ""


def _content(token: Any) -> str:
    """A special token, which Hugging Face writes as a string, as a table, or as null."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _listed(ids: Any) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise CodecError(f"{path}: {error.strerror}; a model folder needs it") from error
    except UnicodeDecodeError as error:
        raise CodecError(f"{path}: not UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CodecError(f"{path}: not JSON: {error}") from error


class ByteLevelCodec:
    """A Hugging Face tokenizer.json with the byte-level alphabet (Qwen, Llama 3, GPT-2)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        text = _read_text(path)
        try:
            described = json.loads(text)
            self._template = Tokenizer.from_str(text)
            plain = {**described, "added_tokens": [], "post_processor": None, "normalizer": None}
            self._plain = Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception
            raise CodecError(f"{path}: not a tokenizer: {error}") from error
        if '"ByteLevel"' not in json.dumps(described.get("decoder")):
            raise CodecError(f"{path}: its decoder is not byte-level; use a Qwen, Llama 3 or GPT-2 style tokenizer")
        for tokenizer in (self._template, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.control = {token.content: i for i, token in self._template.get_added_tokens_decoder().items()}
        self.pieces: Sequence[bytes] = self._pieces()
        self._controls = frozenset(self.control.values())
        whole = {piece[0] for i, piece in enumerate(self.pieces) if len(piece) == 1 and i not in self._controls}
        # UTF-8 never has these; any other byte without a token (SmolLM2 lacks some) the library would leave out of a text.
        self._unspeakable = frozenset(range(256)) - whole - {0xC0, 0xC1, *range(0xF5, 0x100)}
        self._remembered = functools.lru_cache(16384)(self._encode_text)

    def encode_text(self, text: str) -> list[int]:
        return self._remembered(text) if len(text) <= CACHED_CHARS else self._encode_text(text)

    def spell(self, text: str) -> str:
        """`text`, with a replacement character for each that the vocabulary cannot spell."""
        if not self._unspeakable:
            return text
        return "".join("\ufffd" if not self._unspeakable.isdisjoint(c.encode()) else c for c in text)

    def _encode_text(self, text: str) -> list[int]:
        text = self.spell(text)
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._controls.isdisjoint(ids):
            raise CodecError(f"the tokenizer makes control tokens out of plain text: {text[:80]!r}")
        return ids

    def encode_template(self, text: str) -> list[int]:
        return self._template.encode(text, add_special_tokens=False).ids

    def _pieces(self) -> list[bytes]:
        alphabet = _byte_alphabet()
        vocabulary = self._template.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for text, i in vocabulary.items():
            pieces[i] = text.encode() if text in self.control else bytes([alphabet[c] for c in text])
        return pieces


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others are moved behind 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}
