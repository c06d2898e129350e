"""How the engine stops and counts: every id that it sampled is there, once, with its logprob and its version."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from actors.conversation import Conversation
from common.validate import LOGPROB_SLACK
from tools.certifying.dialogues import DIALOGUES, opening, stops
from tools.certifying.engine import Ask, Engine, Sample
from tools.certifying.rows import Row, Verdict, judged, not_run

TOKENS = 16
ANSWER = 48  # tokens in which a trained model has answered
CUT = 6  # max_new_tokens where a length stop is wanted
CUTS = (CUT, 3, 2)


def stop_ids(chat: Conversation, engine: Engine) -> Row:
    """Any id can be made one that ends a turn, so no weights need to know the end token: one that was sampled before, asked for
    again with the same seed. Engines without seeds get it at temperature 0."""
    check, problems, seen = "stops: stop id", [], []
    prompt = opening(chat, DIALOGUES[0])
    for number in range(6):
        temperature, seed = (0.0 if number % 3 == 2 else 1.0), 300 + number
        first = engine.generate(Ask(prompt, TOKENS, temperature, (), seed))
        wanted = next((i for i in reversed(first.ids[:CUT]) if i not in chat.end_ids), None)
        if wanted is None:
            continue
        second = engine.generate(Ask(prompt, TOKENS, temperature, (wanted,), seed))
        problems += end_problems(second, chat, wanted)
        if second.finish.get("type") == "stop" and second.finish.get("matched") == wanted:
            seen.append(f"{wanted} after {len(second.ids)} of {TOKENS} ids ({second.ids[-3:]})")
    if not seen and not problems:
        return not_run([check], "no id that was asked for as a stop was sampled again in 6 tries")[0]
    return judged(check, problems, f"finish stop with matched, which is the last id: {', '.join(seen[:3])}")


def end_problems(sample: Sample, chat: Conversation, *more: int) -> list[str]:
    """What is wrong with how a sample ended. `more`: ids that were asked for as stops."""
    asked, kind, matched = {*sample.ask.stops, *more}, sample.finish.get("type"), sample.finish.get("matched")
    ends, last = asked | chat.end_ids, sample.ids[-1] if sample.ids else None
    inside = [i for i in sample.ids[:-1] if i in asked]
    problems = [f"it went on behind the stop id {inside[0]}: {sample.ids}"] if inside else []
    if kind == "stop" and last not in ends:
        problems.append(f"finish stop (matched {matched}), but the last id is {last}: the id that ends the turn is missing")
    elif kind == "stop" and matched != last:
        problems.append(f"finish stop says matched {matched}, the last id is {last}")
    elif kind == "length" and len(sample.ids) != sample.ask.max_new_tokens:
        problems.append(f"finish length after {len(sample.ids)} of {sample.ask.max_new_tokens} tokens")
    elif kind not in ("stop", "length"):
        problems.append(f"finish is {kind!r}")
    return problems


def seek_end(chat: Conversation, engine: Engine, likely: Sequence[list[int]]) -> None:
    """Ask where the model's own end token is likely: at the end of an answer, behind a turn that repeats it, and behind the
    prompts in `likely`. `ended` looks at all answers."""
    prompt, ends = opening(chat, DIALOGUES[0]), stops(chat)
    asks = [Ask(prompt, ANSWER, temperature, ends, 400) for temperature in (0.0, 1.0)]
    for start in ([*prompt, *[chat.end_id] * 4], *likely):
        asks += [Ask(start, CUT, temperature, ends, 401) for temperature in (0.0, 0.2, 1.0)]
    engine.generate_all(asks)


def ended(chat: Conversation, engine: Engine) -> Row:
    """Every sample so far that met the model's own end token."""
    check, problems, seen, tokens = "stops: end token", [], [], 0
    for sample in engine.samples:
        if not chat.end_ids.issuperset(sample.ask.stops):
            continue  # asked for a stop id, and looked at there
        tokens += len(sample.ids)
        problems += end_problems(sample, chat)
        if sample.finish.get("type") == "stop" and sample.finish.get("matched") in chat.end_ids:
            seen.append(f"{sample.finish['matched']} after {len(sample.ids)} ids")
    if not seen and not problems:
        reason = f"none of {sorted(chat.end_ids)} was sampled among {tokens} tokens; see the stop id"
        return not_run([check], reason, required=False)[0]
    return judged(
        check, problems, f"{len(seen)} of {len(engine.samples)} samples ended there, as their last id: {', '.join(seen[:3])}"
    )


def lengths(chat: Conversation, engine: Engine) -> Iterator[Row]:
    """A turn that is cut has as many ids as were asked for, and no end token among them; so has a turn of one token. A trained
    model may end its turns so early that fewer have to be asked for."""
    prompt = opening(chat, DIALOGUES[0])
    for check, counts in (("stops: length", CUTS), ("stops: one token", (1,))):
        row = None
        for count in counts:
            row = row or _cut(
                check, engine.generate_all([Ask(prompt, count, 1.0, stops(chat), 500 + n) for n in range(6)]), count, chat
            )
        yield row or not_run([check], f"each of 6 samples ended within {min(counts)} tokens")[0]


def _cut(check: str, samples: Sequence[Sample], count: int, chat: Conversation) -> Row | None:
    """None when no sample was cut at `count`."""
    cut = [sample for sample in samples if sample.finish.get("type") == "length"]
    problems = [problem for sample in samples for problem in end_problems(sample, chat)]
    problems += [f"finish length says {s.finish['length']}, asked {count}" for s in cut if s.finish.get("length", count) != count]
    if count > 1:
        problems += [f"an end token in a cut turn: {s.ids}" for s in cut if chat.end_ids & set(s.ids[:-1])]
    if not cut and not problems:
        return None
    sizes = sorted({len(sample.ids) for sample in cut})
    return judged(check, problems, f"{len(cut)} of {len(samples)} cut, finish length, ids {sizes} of {count} asked for")


def counts(chat: Conversation, engine: Engine) -> Iterator[Row]:
    """Over all samples of this certificate."""
    problems, tokens = [], 0
    for sample in engine.samples:
        tokens += len(sample.ids)
        told = sample.meta.get("completion_tokens")
        if told != len(sample.ids):
            problems.append(f"{len(sample.ids)} output_ids, completion_tokens says {told}")
        if len(sample.logprobs) != len(sample.ids):
            problems.append(f"{len(sample.ids)} output_ids, {len(sample.logprobs)} logprobs")
        elif not sample.whole:
            problems.append(f"output_ids {sample.ids[:4]}… have the logprobs of {sample.logprob_ids[:4]}…")
        if sample.meta.get("prompt_tokens") != len(sample.ask.prompt):
            problems.append(f"{len(sample.ask.prompt)} ids sent, prompt_tokens says {sample.meta.get('prompt_tokens')}")
        bad = [x for x in sample.logprobs if not math.isfinite(x) or x > LOGPROB_SLACK]
        problems += [f"{bad[0]} is no logprob"] if bad else []
    evidence = (
        f"{len(engine.samples)} samples, {tokens} ids: as many ids, logprobs and completion_tokens; prompts counted as sent"
    )
    yield judged(
        "counts: ids and logprobs", problems, evidence if not problems else f"{len(engine.samples)} samples, {tokens} ids"
    )
    yield _known(chat, engine.samples)


def _known(chat: Conversation, samples: Sequence[Sample]) -> Row:
    ids = [i for sample in samples for i in sample.ids]
    known = len(chat.codec.pieces)
    outside = sorted({i for i in ids if not 0 <= i < known})
    problems = [f"sampled {outside[:5]}, which the tokenizer does not have (0..{known - 1})"] if outside else []
    return judged("counts: sampled ids", problems, f"ids {min(ids, default=0)}..{max(ids, default=0)} of 0..{known - 1}")


def seeds(chat: Conversation, engine: Engine) -> Row:
    ask = Ask(opening(chat, DIALOGUES[0]), TOKENS, 1.0, stops(chat), 600)
    first, second = engine.generate(ask), engine.generate(ask)
    same = "the same" if first.ids == second.ids else "other"
    return Row("seeds: same request twice", Verdict.INFO, f"{same} ids: {first.ids[:6]}…, {second.ids[:6]}…")


def versions(engine: Engine, embedded: bool) -> Row:
    """Runs of versions that cover each sample: actors refuse samples without them."""
    check, problems, labels = "versions: of each token", [], set()
    missing = [sample for sample in engine.samples if not isinstance(sample.meta.get("weight_versions"), list)]
    if missing:
        told = "answers have no weight_versions, which actors need (SGLang 0.5.23 has them)"
        return Row(check, Verdict.FAIL, reason=told) if embedded else not_run([check], told, required=False)[0]
    for sample in engine.samples:
        at = 0
        for run in sample.meta["weight_versions"]:
            if not isinstance(run, dict) or run.get("start") != at or run.get("end", -1) < at:
                break
            labels.add(str(run.get("version")))
            at = run["end"]
        if at != len(sample.ids):
            problems.append(f"weight_versions {sample.meta['weight_versions']} do not cover {len(sample.ids)} ids")
    told = ", ".join(sorted(labels))
    plain = (
        "" if all(label.isdigit() for label in labels) else "; 'default' until the learner publishes: actors wait for a number"
    )
    return judged(check, problems, f"{len(engine.samples)} samples, each covered; version {told}{plain}")
