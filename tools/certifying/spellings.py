"""Ids that the tokenizer itself would never make of their text. A policy samples such ids all the time; whoever turns them into
text and back changes them, and trains on what was not sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.codec import Codec, decode
from actors.conversation import Conversation
from actors.history import History
from common.types import Message
from tools.certifying.dialogues import DIALOGUES, begin, stops
from tools.certifying.engine import Ask, Engine, Refused, Sample, input_ids
from tools.certifying.played import Played
from tools.certifying.rows import Row, Verdict, judged, quoted

WORDS = (" hello", " world", " answer", " because", " number", " there", " the", " you", "hello", "answer", "the")
COUNT, TOKENS = 4, 8


@dataclass(frozen=True)
class Spelling:
    """One text, two rows of ids."""

    text: str
    usual: list[int]
    other: list[int]


def spellings(codec: Codec) -> list[Spelling]:
    """Words as the tokenizer writes them, and in two pieces."""
    found = []
    for word in WORDS:
        usual = codec.encode_text(word)
        for cut in range(len(word) - 1, 0, -1):
            other = codec.encode_text(word[:cut]) + codec.encode_text(word[cut:])
            if other != usual and decode(codec, other) == word:
                found.append(Spelling(word, usual, other))
                break
    return found


@dataclass(frozen=True)
class Continued:
    """What the engine sampled behind a prompt with unusual spellings, and the same prompt as the tokenizer writes it."""

    sample: Sample
    usual: list[int]


def played(chat: Conversation, found: list[Spelling], history: type[History] = History) -> Played:
    """A dialogue with one turn, made of the spellings as sampled. `history`: what makes its prompts; actors have History."""
    out = begin(chat, DIALOGUES[0], history)
    out.turn([*(i for each in found for i in each.other), chat.end_id], [Message("user", "Go on.")])
    return out


def accepted(chat: Conversation, engine: Engine) -> tuple[list[Row], list[Continued]]:
    """Rows, and what the learner can look at."""
    found = spellings(chat.codec)[:COUNT]
    check = "non-canonical: prompt"
    if not found:
        return [Row(check, Verdict.NOT_RUN, reason="the tokenizer has one spelling for every word tried")], []
    dialogue = played(chat, found)
    sent, usual = dialogue.prompt, _again(chat.codec, dialogue.prompt)
    shown = ", ".join(f"{s.text!r} as {s.other} instead of {s.usual}" for s in found[:2])
    asks = [Ask(sent, TOKENS, stops=stops(chat), seed=200 + n) for n in range(4)]
    samples = engine.generate_all(asks)
    counts = sorted({str(sample.meta.get("prompt_tokens")) for sample in samples})
    evidence = (
        f"{shown}, ...: {len(sent)} ids sent, the engine counts {', '.join(counts)}; encoded again they would be {len(usual)}"
    )
    problems = dialogue.problems()
    problems += [] if counts == [str(len(sent))] else [f"{len(sent)} ids were sent, the engine counts {', '.join(counts)}"]
    return [judged(check, problems, evidence), _echo(engine, sent)], [Continued(sample, usual) for sample in samples]


def _echo(engine: Engine, sent: list[int]) -> Row:
    """The prompt as the engine itself lists it, where it can."""
    check = "non-canonical: echo"
    try:
        ids = input_ids(engine.raw(Ask(sent, 1, temperature=0.0, input_logprobs=True)))
    except Refused as error:
        return Row(check, Verdict.NOT_RUN, reason=f"the engine lists no input ids: {error}", required=False)
    if not ids:
        return Row(check, Verdict.NOT_RUN, reason="the engine listed no input ids", required=False)
    at = next((n for n, (a, b) in enumerate(zip(sent, ids, strict=False)) if a != b), min(len(sent), len(ids)))
    problems = [] if ids == sent else [f"from position {at} on it saw {ids[at : at + 4]}, sent was {sent[at : at + 4]}"]
    return judged(check, problems, f"the engine lists {len(ids)} input ids, {len(sent)} were sent")


def kept(codec: Codec, engine: Engine) -> Iterator[Row]:
    """What the certificate's own samples were like."""
    samples = [sample for sample in engine.samples if sample.ids and all(0 <= i < len(codec.pieces) for i in sample.ids)]
    unusual = [sample for sample in samples if _again(codec, sample.ids) != sample.ids]
    shown = ""
    if unusual:
        ids = unusual[0].ids[:6]
        shown = f"; for instance {ids} {quoted(decode(codec, ids), 30)}, encoded again {_again(codec, ids)}"
    evidence = (
        f"{len(unusual)} of {len(samples)} samples are not what the tokenizer makes of their text{shown}; records keep the ids"
    )
    yield Row("non-canonical: samples", Verdict.INFO, evidence)


def _again(codec: Codec, ids: list[int]) -> list[int]:
    """What a program that keeps text would train on."""
    return codec.encode_template(decode(codec, ids))
