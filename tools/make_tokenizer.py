"""Makes configs/tokenizers/tiny: a byte-level BPE of 1,024 entries with Qwen's control tokens and chat format.

    python -m tools.make_tokenizer [FOLDER]

Small models on a CPU pay for every token, so merges may cross spaces ("superwords"): a fixed line, such as the JSON of a
call, becomes one token. Digits never merge, except that a lone letter keeps the digit after it ("b3" is one token, "123"
three): a cell of a map is one token, the same wherever it is named. The corpus is what the domains really say, cut where the
chat format cuts, and a little English so that other text stays short. All of it is deterministic: the same sources make the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.template import Slots, compile_template, cut_at_slots
from common.types import Json, Task, ToolCall
from envserver.domains import load_domain
from envserver.domains.frozenlake import DELTAS
from envserver.env import Domain

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs" / "tokenizers" / "tiny"
ENTRIES = 1024  # a larger table costs every sampled token of a small model, and the domains need about 900
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
UNITS = r"(?<!\p{L})\p{L}\d|\d"
DOMAINS = ("frozenlake", "arithmetic")
TASKS = 100  # of each domain
LINE_WEIGHT = 400  # a fixed line is worth that many sightings: it must become one token
TEXT_WEIGHT = 12  # of a domain's varying text
ENGLISH = Path(__file__).with_name("tokenizer_english.txt")


def empty_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(UNITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(corpus: Iterator[str]) -> Tokenizer:
    """The tokenizer of `corpus`. Control tokens get the last ids, as in Qwen's vocabularies."""
    tokenizer = empty_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - len(SPECIAL) - len(MARKS),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and tokenizer_config.json with the chat template that lies beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # Qwen2Tokenizer would cut words its own way, whatever the file says
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": (FOLDER / "chat_template.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- the corpus -------------------------------------------------------------------------------------------


def corpus() -> Iterator[str]:
    """Every piece of text, as often as it counts."""
    for line in sorted(fixed_lines()):
        yield from [line] * LINE_WEIGHT
    for text in domain_texts():
        yield from [text] * TEXT_WEIGHT
    yield from re.findall(r" ?\w+| ?[^\w\s]+|\s+", ENGLISH.read_text())  # word by word: sentences must not become tokens


def domains() -> list[Domain]:
    return [load_domain(name) for name in DOMAINS]


def fixed_lines() -> set[str]:
    """Text between control tokens that is the same in every rollout."""
    lines: set[str] = set()
    for domain in domains():
        lines |= {domain.instructions, *(json.dumps(tool, ensure_ascii=False) for tool in domain.tools)}
        lines |= set(template_pieces(domain.tools))
    lines |= {_call_line(ToolCall("", "move", {"to": way})) for way in DELTAS}
    return lines


def cells() -> list[str]:
    return [f"{column}{row}" for column in "abcd" for row in range(1, 5)]


def template_pieces(tools: list[Json]) -> Iterator[str]:
    """What the chat template writes around texts, in a dialogue with every kind of message."""
    render = compile_template((FOLDER / "chat_template.jinja").read_text())
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    slots = Slots(len(roles))
    rendered = render([{"role": role, "content": slots.mark(n)} for n, role in enumerate(roles)], tools, True, slots)
    control = "|".join(re.escape(token) for token in SPECIAL + MARKS)
    for part in cut_at_slots(rendered):
        if isinstance(part, str):
            yield from filter(None, re.split(control, part))


def domain_texts() -> Iterator[str]:
    """What the domains say about their tasks and along their reference solutions."""
    for domain in domains():
        for task in domain.tasks("train", TASKS):
            yield from _episode(domain, task)
    for cell in cells():
        yield f"You are at {cell}."
        yield f"You fell into the hole at {cell}."


def _episode(domain: Domain, task: Task) -> Iterator[str]:
    env = domain.make_env()
    try:
        yield from (message.text for message in env.reset(task).messages)
        for action in domain.reference(task):
            yield from map(_call_line, action.tool_calls)
            yield from (message.text for message in env.step(action).messages)
    finally:
        env.close()


def _call_line(call: ToolCall) -> str:
    return "\n" + json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    tokenizer = train(corpus())
    write(tokenizer, arguments.folder)
    print(f"{tokenizer.get_vocab_size()} entries -> {arguments.folder}")


if __name__ == "__main__":
    main()
