"""What the engine says of its samples against the learner's own forward pass: the numbers that a policy loss divides by.

Log-probabilities of a training rollout are those of softmax(logits / temperature). An engine that reports softmax(logits)
instead is right at temperature 1 and wrong everywhere else, so two temperatures are looked at, under both hypotheses.

Dimension key: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from actors.conversation import Conversation
from learner.losses import token_logprobs
from learner.model import hf
from tools.certifying.dialogues import DIALOGUES, opening, stops
from tools.certifying.engine import Ask, Engine, Sample
from tools.certifying.rows import Row, Verdict, judged, not_run
from tools.certifying.spellings import Continued

TEMPERATURES = (1.0, 0.7)
SAMPLES, TOKENS = 16, 24
LIKELY = 8  # prompts behind which the end token is likely
ROWS, STEP = 16, 64  # shapes are multiples of these: one is compiled, if the prompts are short
# Mean and largest |difference| of a token. In float32 both sides differ by rounding alone; half precision rounds each layer.
BOUNDS = {"float32": (1e-3, 0.1), "bfloat16": (0.02, 1.0), "float16": (0.02, 1.0)}


@partial(jax.jit, static_argnums=0)
def _score(graph, state, ids, targets, lengths, starts, temperature):  # noqa: ANN001, ANN202 - arrays [B, T] and [B]
    """`log p(targets[t] | ids[<t])` from `starts` on, at `temperature` and at 1."""
    model = nnx.merge(graph, state)
    places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    real = places < lengths[:, None]
    hidden = model(ids, places, real.astype(jnp.int32))
    mask = real & (places >= starts[:, None])
    return [
        token_logprobs(model.logits, hidden, targets, mask, jnp.full(ids.shape, t, jnp.float32))[0] for t in (temperature, 1.0)
    ]


class Learner:
    """The learner's forward pass over the weights of a directory."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Raises ModelError."""
        spec, state = hf.load(folder)
        self.dtype = dtype
        self._graph, self._state = nnx.split(hf.build(spec, state, dtype))

    def logprobs(self, pairs: Sequence[tuple[list[int], list[int]]], temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Of the second ids of each pair, behind the first ones, one after another: at `temperature`, and at 1."""
        longest = max(len(prompt) + len(ids) for prompt, ids in pairs)
        rows = np.zeros((-(-len(pairs) // ROWS) * ROWS, -(-longest // STEP) * STEP), np.int32)
        starts, lengths = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        for row, (prompt, ids) in enumerate(pairs):
            rows[row, : len(prompt) + len(ids)] = [*prompt, *ids]
            starts[row], lengths[row] = len(prompt), len(prompt) + len(ids)
        scaled, raw = self._run(rows, rows, lengths, starts, temperature)
        chosen = [(row, slice(starts[row], lengths[row])) for row in range(len(pairs))]
        return np.concatenate([scaled[place] for place in chosen]), np.concatenate([raw[place] for place in chosen])

    def prompts_before(self, token: int, known: int) -> list[list[int]]:
        """Of random prompts, those behind which `token` is likeliest: with any weights there are some."""
        rows = np.random.default_rng(0).integers(0, known, (ROWS, STEP), np.int32)
        lengths, starts = np.full(ROWS, STEP, np.int32), np.ones(ROWS, np.int32)
        found = self._run(rows, np.full_like(rows, token), lengths, starts, 1.0)[0][:, 1:]
        best = np.argsort(found, axis=None)[::-1][:LIKELY]
        return [rows[place // found.shape[1], : place % found.shape[1] + 1].tolist() for place in best]

    def _run(
        self, ids: np.ndarray, targets: np.ndarray, lengths: np.ndarray, starts: np.ndarray, temperature: float
    ) -> list[np.ndarray]:
        found = _score(self._graph, self._state, ids, targets, lengths, starts, jnp.float32(temperature))
        return [np.asarray(x, np.float64) for x in found]


@dataclass(frozen=True)
class Gap:
    """|Differences| of tokens."""

    values: np.ndarray

    def __str__(self) -> str:
        mean, high, most = self.values.mean(), np.quantile(self.values, 0.99), self.values.max()
        return f"mean {mean:.2g}, p99 {high:.2g}, max {most:.2g}"

    def fits(self, dtype: str) -> bool:
        mean, most = BOUNDS[dtype]
        return bool(self.values.mean() <= mean and self.values.max() <= most)


def reported(samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate([np.asarray(sample.logprobs, np.float64) for sample in samples])


def usable(samples: Sequence[Sample], rows: int) -> list[Sample]:
    return [s for s in samples if s.ids and len(s.ids) == len(s.logprobs) and all(0 <= i < rows for i in s.ids)]


def semantics(chat: Conversation, engine: Engine, learner: Learner, rows: int) -> list[Row]:
    """A row per temperature: the reported logprobs against the learner's, scaled by the temperature and not."""
    prompt, out = opening(chat, DIALOGUES[0]), []
    for number, temperature in enumerate(TEMPERATURES):
        asks = [Ask(prompt, TOKENS, temperature, stops(chat), 700 + 100 * number + n) for n in range(SAMPLES)]
        asked = engine.generate_all(asks)
        samples = usable(asked, rows)
        check = f"logprobs: temperature {temperature:g}"
        if not samples:
            out += not_run([check], f"none of {len(asked)} samples has as many logprobs as ids")
            continue
        out.append(_judge(check, samples, len(asked), learner, temperature))
    return out


def _judge(check: str, samples: Sequence[Sample], asked: int, learner: Learner, temperature: float) -> Row:
    pairs = [(sample.ask.prompt, sample.ids) for sample in samples]
    scaled, raw = (Gap(np.abs(reported(samples) - own)) for own in learner.logprobs(pairs, temperature))
    evidence = f"{len(scaled.values)} tokens, learner in {learner.dtype}; |Δ| {scaled}"
    problems = [f"{asked - len(samples)} of {asked} samples have not as many logprobs as ids"] if asked > len(samples) else []
    mean, most = BOUNDS[learner.dtype]
    if temperature == 1.0:
        if not scaled.fits(learner.dtype):
            problems.append(f"they are not the learner's (allowed: mean {mean:g}, max {most:g}): other weights, or of other ids")
        return judged(check, problems, evidence)
    verdict = "scaled by the temperature" if scaled.fits(learner.dtype) else "raw" if raw.fits(learner.dtype) else "neither"
    evidence = f"{evidence} if scaled by the temperature; {raw} if raw"
    if scaled.fits(learner.dtype) and raw.fits(learner.dtype):
        return Row(check, Verdict.NOT_RUN, evidence, "with these weights the two cannot be told apart")
    if verdict == "raw":
        problems.append("they are raw, the temperature is ignored: use an engine that reports those of the sampling distribution")
    elif verdict == "neither":
        problems.append(f"neither fits (allowed: mean {mean:g}, max {most:g})")
    return judged(check, problems, f"{evidence}: {verdict}")


def continuation(continued: Sequence[Continued], learner: Learner, rows: int) -> Row:
    """Whether what was sampled behind an unusually spelled prompt was sampled behind these ids."""
    check = "non-canonical: continuation"
    found = [each for each in continued if usable([each.sample], rows)]
    if not found:
        return not_run([check], "no sample behind such a prompt has as many logprobs as ids")[0]
    told = reported([each.sample for each in found])
    pairs = [(each.sample.ask.prompt, each.sample.ids) for each in found] + [(each.usual, each.sample.ids) for each in found]
    sent, usual = (Gap(np.abs(told - own)) for own in np.split(learner.logprobs(pairs, 1.0)[0], 2))
    evidence = f"{len(sent.values)} tokens; |Δ| {sent} behind the ids as sent, {usual} behind those of the tokenizer"
    if sent.fits(learner.dtype) and usual.fits(learner.dtype):
        return Row(check, Verdict.NOT_RUN, evidence, "with these weights the two spellings cannot be told apart")
    whose = "the tokenizer's spelling" if usual.fits(learner.dtype) else "neither spelling"
    problems = [] if sent.fits(learner.dtype) else [f"the logprobs are those of {whose}: the prompt was not taken as sent"]
    return judged(check, problems, evidence)
