"""What the border between text and tokens costs per turn, as a dialogue grows; and what rendering and encoding all of it again
would cost.

    python tools/bench_tokens.py [--model DIR] [--turns 64] [--tokens 1000] [--dialogues 15]

A turn is half sampled ids, which are parsed and recorded, and half an observation, which is encoded and put behind them; then the
next prompt is made. Times are the CPU's, so that what else the machine does is not counted; "first" and "last" are medians over
the four turns at that end of every dialogue. DIR is a model's folder (tokenizer.json, tokenizer_config.json, config.json);
without it the tiny tokenizer. Prints a table and writes runs/bench/tokens.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(ROOT)

from actors.chat import Chat  # noqa: E402
from actors.codec import ByteLevelCodec, ModelFiles, decode, load_model_files  # noqa: E402
from actors.history import Beginning, History, Rules  # noqa: E402
from actors.tape import Sampled, Tape  # noqa: E402
from actors.toolcalls.turns import TurnParser  # noqa: E402
from common.types import (  # noqa: E402
    Assignment,
    ContextPolicy,
    Finish,
    Limits,
    Message,
    Sampling,
    Source,
    Status,
    Task,
    VersionRun,
)
from tools.benchmarks import head, write  # noqa: E402

EDGE = 4  # turns at each end of a dialogue that are taken together: one turn alone is a matter of chance
TINY = ROOT / "configs" / "tokenizers" / "tiny"


@dataclass(frozen=True)
class Turn:
    ids: list[int]  # sampled, the end token last
    text: str  # what they say
    observation: str


def files_of(folder: Path | None) -> ModelFiles:
    if folder is not None:
        return load_model_files(folder)
    return ModelFiles(ByteLevelCodec(TINY / "tokenizer.json"), (TINY / "chat_template.jinja").read_text(), "<|im_end|>", 1024)


def dialogue(files: ModelFiles, end_id: int, turns: int, tokens: int, seed: int) -> list[Turn]:
    """Turns of random words: no text stands twice, so that nothing is remembered."""
    random, codec = np.random.default_rng(seed), files.codec

    def words(count: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < count:
            ids += codec.encode_text(f" {int(random.integers(10**6)):06d} word")
        return ids[:count]

    made = []
    for _ in range(turns):
        sampled, observation = words(tokens // 2 - 1), words(tokens - tokens // 2)
        made.append(Turn([*sampled, end_id], decode(codec, sampled), decode(codec, observation)))
    return made


def tape() -> Tape:
    limits = Limits(10**6, 10**9, 1e9)
    task = Task("bench", "t", 0, {})
    return Tape(Assignment("r", 0, "g", task, Source.POLICY, "train", limits, Sampling(1.0, 10**6), ContextPolicy()))


def incremental(chat: Chat, parser: TurnParser, turns: list[Turn]) -> list[float]:
    """CPU seconds of each turn."""
    record, seconds = tape(), []
    history = History(chat, Rules(), Beginning("Go.", "", (Message("user", "Begin."),)), 10**9)
    prompt = history.begin()
    for index, turn in enumerate(turns):
        logprobs = [-0.5] * len(turn.ids)
        begun = time.process_time()
        sampled = Sampled(turn.ids, logprobs, [VersionRun(0, 1, "e", "main")], Finish.STOP)
        parsed = parser.parse(turn.ids, Finish.STOP, index)
        record.append(prompt, sampled, parsed, {})
        history.stored(prompt, turn.ids, index)
        history.turn(turn.ids, parsed.spans, [Message("user", turn.observation)])
        prompt = history.show(history.next_view())
        seconds.append(time.process_time() - begun)
    assert len(prompt) > sum(len(turn.ids) for turn in turns)
    record.end(Status.TRUNCATED)
    return seconds


def rerendered(files: ModelFiles, folder: Path, turns: list[Turn]) -> float:
    """CPU seconds of rendering and encoding the whole dialogue, as a stack that keeps text has to at its last turn."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    messages = [{"role": "system", "content": "Go."}, {"role": "user", "content": "Begin."}]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": turn.observation}]
    special: Any = dict(files.special_tokens)
    begun = time.process_time()
    text = tokenizer.apply_chat_template(
        messages, chat_template=files.template, tokenize=False, add_generation_prompt=True, **special
    )
    tokenizer.encode(str(text), add_special_tokens=False)
    return time.process_time() - begun


def measure(folder: Path | None, turns: int, tokens: int, dialogues: int) -> dict[str, float]:
    files = files_of(folder)
    chat = Chat(files)
    parser = TurnParser(files.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)
    made = [dialogue(files, chat.end_id, turns, tokens, seed) for seed in range(dialogues)]
    incremental(chat, parser, made[0])  # the template is learnt once
    seconds = np.array([incremental(chat, parser, each) for each in made])  # [dialogues, turns]
    first, last = (float(np.median(part)) for part in (seconds[:, :EDGE], seconds[:, -EDGE:]))
    again = statistics.median(rerendered(files, folder or TINY, each) for each in made)
    return {
        "first_turn_ms": 1e3 * first,
        "last_turn_ms": 1e3 * last,
        "last_over_first": last / first,
        "rerender_last_turn_ms": 1e3 * again,
        "ratio_rerender_last_turn": again / last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dialogues", type=int, default=15)
    args = parser.parse_args()
    found = measure(args.model, args.turns, args.tokens, args.dialogues)
    print(f"| {args.turns} turns of {args.tokens} tokens | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} |")
    write("tokens", found, head())


if __name__ == "__main__":
    main()
