"""Are they the same model? What the engine says of itself against the directory, before an id is sent to it.

An id outside an engine's vocabulary can end it, so nothing is generated for a pair that does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.chat import Chat
from actors.codec import ModelFiles, decode
from actors.conversation import Conversation
from actors.toolcalls import FORMATS
from common.types import ContextKind, Message
from tools.certifying.engine import Engine, Trouble
from tools.certifying.rows import Row, Verdict, judged, quoted

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
PROBE = "What is 1+1? It is 2.\n\ncafé 🙂 hello world"


def vocabulary(config: dict[str, Any], known: int, files: ModelFiles | None) -> Row:
    """`known`: one more than the largest id of the tokenizer."""
    rows = config.get("vocab_size", 0)
    evidence = f"tokenizer ids 0..{known - 1}, {rows} rows"
    problems = [] if known <= rows else [f"ids {rows}..{known - 1} have no row; use the tokenizer that belongs to the model"]
    if files:
        codec = files.codec
        spoken = sum(map(bool, codec.pieces))
        evidence += (
            f" ({rows - known} rows without a token), {spoken} ids with a text, {len(codec.control)} of them control tokens;"
            f" end token {files.end_token} {codec.control[files.end_token]}, engines also end at {list(files.end_ids)}"
        )
    return judged("identity: vocabulary", problems, evidence)


def model(config: dict[str, Any], info: dict[str, Any]) -> Row:
    """Kind and sizes; the engine's own directory is read where this machine has it."""
    said, problems = [], []
    for key in ("model_type", "architectures"):
        theirs, ours = info.get(key), config.get(key)
        said.append(f"{key} {theirs}" if theirs else f"{key} not told")
        if theirs and ours and theirs != ours:
            problems.append(f"the engine serves {key} {theirs}, the directory has {ours}")
    path = Path(str(info.get("model_path", "")))
    served = _config(path)
    if served:
        sizes = [f"{key} {served.get(key)}" for key in SIZES[:3]]
        said.append(f"{path} has {', '.join(sizes)}")
        problems += [
            f"{key} is {served.get(key)} in the engine's {path}, {config.get(key)} in the directory"
            for key in SIZES
            if served.get(key) != config.get(key)
        ]
    else:
        said.append(f"{path} cannot be read here: sizes not compared")
    return judged("identity: model", problems, "; ".join(said))


def _config(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def tokenizer(folder: Path, files: ModelFiles, info: dict[str, Any], engine: Engine) -> Row:
    """The engine's own tokenizer where it has one, else the file that it was started beside."""
    check = "identity: tokenizer"
    theirs = Path(str(info.get("tokenizer_path") or info.get("model_path", ""))) / "tokenizer.json"
    ours, problems, said = folder / "tokenizer.json", [], []
    if theirs.is_file():
        sums = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in (ours, theirs)]
        said.append(f"{theirs}: sha256 {sums[1]}…")
        if sums[0] != sums[1]:
            problems += _other_ids(ours, theirs)
            said.append(f"the directory's file has {sums[0]}…")
    if problems:
        return judged(check, problems, "; ".join(said))
    try:
        ids, wanted = engine.encode(PROBE), files.codec.encode_template(PROBE)
        said.append(f"the engine writes {quoted(PROBE, 24)} as {len(ids)} ids, this tokenizer as {len(wanted)}")
        if ids and ids[-len(wanted) :] != wanted:
            differs = f"the engine's own tokenizer makes {ids[:6]}… of a text, the directory's {wanted[:6]}…"
            if theirs.is_file():  # the same file, read by a class with rules of its own; actors send ids alone
                return Row(check, Verdict.INFO, f"{'; '.join(said)}; {differs}, from the same file: see its tokenizer_class")
            problems.append(differs)
    except Trouble as error:
        said.append(f"the engine writes no texts ({error})")
        if not theirs.is_file():
            return Row(check, Verdict.NOT_RUN, reason=f"{theirs} cannot be read here; {said[-1]}", required=False)
    return judged(check, problems, "; ".join(said))


def _other_ids(ours: Path, theirs: Path) -> list[str]:
    """Files may differ in form alone; what counts are the ids."""
    from tokenizers import Tokenizer

    here, there = (Tokenizer.from_file(str(path)) for path in (ours, theirs))
    mine, other = here.get_vocab(with_added_tokens=True), there.get_vocab(with_added_tokens=True)
    differ = sorted(token for token in mine.keys() | other.keys() if mine.get(token) != other.get(token))
    if differ:
        pairs = [f"{token!r} is {mine.get(token)} here, {other.get(token)} there" for token in differ[:2]]
        return [f"{len(differ)} tokens have other ids in the engine's {theirs}: {', '.join(pairs)}"]
    if here.encode(PROBE).ids != there.encode(PROBE).ids:
        return [f"the engine's {theirs} has the same tokens, and makes other ids of {PROBE!r}"]
    return []


def template(chat: Conversation, files: ModelFiles) -> Iterator[Row]:
    """What was learnt from the chat template."""
    codec = chat.codec
    names = [name for name, kind in FORMATS.items() if type(chat.format) is kind]
    bridge = chat.bridge(True, [Message("user", "x")])
    layout = f"chat template of {len(files.template)} characters" if isinstance(chat, Chat) else "raw layout, no template"
    opens = ", opens the reasoning itself" if chat.opens_reasoning else ""
    shown = decode(codec, bridge.ids.tolist())
    evidence = f"{layout}; between turns {shown!r} ({len(bridge)} ids{opens}); calls as {', '.join(names)}"
    missing = [] if ContextKind.OBSERVATION in bridge.spans.kinds.tolist() else ["an observation's text has no place of its own"]
    yield judged("template: append-only", missing, evidence)
