"""Says whether a model, its tokenizer, its chat template and an engine are token-exact together.

    python tools/certify.py MODEL --engine http://127.0.0.1:30000 [--config run.toml] [--key-file FILE] [--json PATH]

MODEL is a Hugging Face directory (config.json, safetensors, tokenizer.json, tokenizer_config.json); the engine serves it: an
embedded one (`python -m learner.serving`) or a stock SGLang server. Each row of the table is a check with what was seen.
Exit status 0: every required check passed; 1: one failed, or could not be run; 2: wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:  # imported when the arguments are known to be right
    from actors.codec import ModelFiles
    from actors.conversation import Conversation
    from common.config import ChatConfig
    from tools.certifying.engine import Engine
    from tools.certifying.rows import Row
    from tools.certifying.scores import Learner
    from tools.certifying.spellings import Continued

DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
LEARNED = ("logprobs: temperature 1", "logprobs: temperature 0.7", "non-canonical: continuation")
ENGINE = ("prefix: sampled turns", "non-canonical: prompt", "stops: stop id", "counts: ids and logprobs", *LEARNED)
TEXT = ("prefix: scripted turns", "injection: all places", "utf8: streams")


class InputError(ValueError):
    """The arguments cannot be used; the message is one line with the value and the fix."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--engine", required=True, metavar="URL")
    parser.add_argument("--config", type=Path, help="a run's TOML file, for its [chat] table")
    parser.add_argument("--key-file", type=Path, help="engine_key.yaml of the run that started the engine, where it wants a key")
    parser.add_argument("--skip-logprobs", action="store_true", help="certify without the learner's forward pass")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, too")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all calls to the engine (default 120)")
    return parser.parse_args(argv)


def certify(args: argparse.Namespace) -> Iterator[Row]:
    """The rows, in order. Raises InputError and what its parts raise for wrong input."""
    from actors.codec import load_model_files
    from actors.conversation import conversation
    from actors.template import TemplateError
    from common import keys
    from tools.certifying import identity
    from tools.certifying.engine import Engine
    from tools.certifying.rows import Row, Verdict, not_run

    key = keys.read(args.key_file) if args.key_file else ""
    chat_config, config, engine = chat_of(args.config), read_model(args.model), Engine(args.engine, args.timeout, key)
    info, server = engine.model_info(), engine.server_info()
    known = known_ids(args.model)
    if known > config.get("vocab_size", 0):
        yield identity.vocabulary(config, known, None)
        yield from not_run((*TEXT, *ENGINE), "the tokenizer is not the model's")
        return
    files = load_model_files(args.model)
    same = [identity.model(config, info), identity.vocabulary(config, known, files)]
    if all(row.holds for row in same):
        same.append(identity.tokenizer(args.model, files, info, engine))
    yield from same
    try:
        chat = conversation(files, chat_config)
        yield from identity.template(chat, files)
    except TemplateError as error:
        yield Row("template: append-only", Verdict.FAIL, reason=str(error))
        yield from not_run((*TEXT, *ENGINE), "there is no usable template")
        return
    yield from _texts(chat, files, chat_config)
    if not all(row.holds for row in same):
        yield from not_run(ENGINE, "the engine serves another model: ids that it does not have can end it")
        return
    limit = min(config.get("max_position_embeddings") or 2**31, server.get("context_length") or 2**31)
    yield from _engine(chat, engine, limit, str(server.get("engine", "")) == "polyturn-embedded", Scoring(args, config, server))


def _texts(chat: Conversation, files: ModelFiles, chat_config: ChatConfig) -> Iterator[Row]:
    """What needs no engine."""
    from tools.certifying import dialogues, texts

    yield from dialogues.scripted(chat, files, chat_config.options)
    yield from texts.injection(chat)
    yield texts.parser(chat)
    yield from texts.utf8(chat)


class Scoring:
    """The learner's part, which some models do not have. `likely`: prompts behind which the end token is likely."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any], server: dict[str, Any]) -> None:
        self.likely: list[list[int]] = []
        self._skipped, self._folder, self._rows = args.skip_logprobs, args.model, config["vocab_size"]
        told = [DTYPES.get(str(value)) for value in (server.get("dtype"), config.get("torch_dtype"), config.get("dtype"))]
        self._dtype = next(filter(None, told), "bfloat16")

    def rows_of(self, chat: Conversation, engine: Engine, continued: list[Continued]) -> Iterator[Row]:
        """Raises Trouble."""
        from tools.certifying.rows import not_run

        try:
            learner = self._learner()
        except InputError as error:
            yield from not_run(LEARNED, str(error), required=not self._skipped)
            return
        from tools.certifying import scores

        yield from scores.semantics(chat, engine, learner, self._rows)
        yield scores.continuation(continued, learner, self._rows)
        self.likely = learner.prompts_before(chat.end_id, len(chat.codec.pieces))

    def _learner(self) -> Learner:
        """Raises InputError when this model's logprobs cannot be computed here."""
        if self._skipped:
            raise InputError("--skip-logprobs")
        from learner.model.spec import ModelError, ModelSpec, read_config

        try:
            ModelSpec.from_hf(read_config(self._folder))
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the accelerator is the engine's
            from tools.certifying.scores import Learner

            return Learner(self._folder, self._dtype)
        except ModelError as error:
            raise InputError(f"{error}; --skip-logprobs certifies without them") from error
        except ImportError as error:
            raise InputError(f"{error}; pip install 'polyturn[learner]', or --skip-logprobs") from error


def _engine(chat: Conversation, engine: Engine, limit: int, embedded: bool, scoring: Scoring) -> Iterator[Row]:
    """What the engine is asked. The rows over all samples come last."""
    from tools.certifying import dialogues, sampling, spellings

    continued: list[Continued] = []

    def unusual() -> Iterable[Row]:
        rows, found = spellings.accepted(chat, engine)
        continued.extend(found)
        return rows

    def ended() -> Iterable[Row]:
        sampling.seek_end(chat, engine, scoring.likely)
        return [sampling.ended(chat, engine)]

    yield from guarded("prefix: sampled turns", lambda: [dialogues.sampled(chat, engine, limit)])
    yield from guarded("non-canonical: prompt", unusual)
    yield from guarded("stops: stop id", lambda: [sampling.stop_ids(chat, engine)])
    yield from guarded("stops: length", lambda: sampling.lengths(chat, engine))
    yield from guarded("seeds: same request twice", lambda: [sampling.seeds(chat, engine)])
    yield from guarded("logprobs: temperature 1", lambda: scoring.rows_of(chat, engine, continued))
    yield from guarded("stops: end token", ended)
    yield from spellings.kept(chat.codec, engine)
    yield from sampling.counts(chat, engine)
    yield sampling.versions(engine, embedded)


def guarded(check: str, run: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `run`; an engine that refuses or falls silent on the way is a row under `check`."""
    from tools.certifying.engine import OutOfTime, Trouble
    from tools.certifying.rows import Row, Verdict

    try:
        yield from run()
    except OutOfTime as error:
        yield Row(check, Verdict.NOT_RUN, reason=str(error))
    except Trouble as error:
        yield Row(check, Verdict.FAIL, reason=str(error))


# ---- input and output ---------------------------------------------------------------------------------------------


def check_options(args: argparse.Namespace) -> None:
    """Raises InputError."""
    if not args.timeout > 0:
        raise InputError(f"--timeout is {args.timeout:g}; it must be seconds above 0")
    if args.json and not args.json.resolve().parent.is_dir():
        raise InputError(f"--json {args.json}: there is no folder {args.json.resolve().parent}; make it first")


def read_model(folder: Path) -> dict[str, Any]:
    """config.json of MODEL. Raises InputError when the directory is no model with a tokenizer."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            what = "has no" if folder.is_dir() else "is no directory, so it has no"
            raise InputError(
                f"MODEL {folder} {what} {name}; name a Hugging Face model directory with its tokenizer beside the weights"
            )
    try:
        config = json.loads((folder / "config.json").read_text())
        if isinstance(config, dict) and isinstance(config.get("vocab_size"), int):
            return config
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'} is not JSON: {error}") from error
    raise InputError(f"{folder / 'config.json'} has no vocab_size; certify a text-only model's directory")


def known_ids(folder: Path) -> int:
    """One more than the largest id of the tokenizer. Raises InputError."""
    from common.vocabulary import sampleable

    try:
        return sampleable(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error!r}; copy it again") from error


def chat_of(path: Path | None) -> ChatConfig:
    """The [chat] table of a run. Raises ConfigError."""
    from common.cli import load
    from common.config import ChatConfig

    return load(path).chat if path else ChatConfig()


def main(argv: list[str] | None = None) -> int:
    args, begun = parse(argv), time.monotonic()
    from actors.codec import CodecError
    from common.cli import ConfigError
    from common.files import replace_file
    from common.keys import KeyFileError
    from tools.certifying.engine import Trouble
    from tools.certifying.rows import Verdict, as_json, table

    try:
        check_options(args)
        rows = list(certify(args))
    except (InputError, CodecError, ConfigError, KeyFileError, Trouble) as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return 2
    passed, seconds = all(row.holds for row in rows), round(time.monotonic() - begun, 1)
    print("\n".join(table(rows)))
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in Verdict}
    tally = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    print(f"{'token-exact' if passed else 'NOT certified'}: {tally}; {seconds} s")
    if args.json:
        told = {"model": str(args.model), "engine": args.engine, "passed": passed, "seconds": seconds, "rows": as_json(rows)}
        replace_file(args.json, (json.dumps(told, ensure_ascii=False, indent=2) + "\n").encode())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
