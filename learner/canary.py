"""The canary of published weights: what an engine that has loaded them must answer. NumPy only.

Each version carries a short prompt with the log-probabilities that the learner's own forward pass gives it under the weights as
they are published (cast to the engines' dtype). After an update an engine scores that prompt, through the programs that it
serves with; until it has answered rightly, nothing that it samples is trained on.

Dimension key: N tokens of the canary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

FILE = "canary.npz"
LENGTH = 48
# Mean |Δlogprob| between learner and engine: what float32 may differ by, and what no bfloat16 engine may pass.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.02}
MARGIN = 4.0  # a bfloat16 engine must stay below so many times what it had at its first canary
FLOOR = 1e-3  # of that bound: the first canary may have been lucky
# Rounding grows with the logits: a random policy's are nearly flat, a trained one's are not. So what the first canary had is
# taken relative to how wide its logits were (their standard deviation).
ONE_TOKEN = 10.0  # times the bound of the mean: what a single token may differ by


class CanaryError(Exception):
    """An engine's answer is not that of the weights it was given; the message says how."""


@dataclass(frozen=True, eq=False)
class Canary:
    ids: np.ndarray  # [N] int32
    logprobs: np.ndarray  # [N] float32, at temperature 1; [0] is 0: nothing stands before the first token
    last_logits: np.ndarray  # [V] float32, after the last token

    def save(self, folder: Path) -> None:
        np.savez(folder / FILE, ids=self.ids, logprobs=self.logprobs, last_logits=self.last_logits)

    @staticmethod
    def load(folder: Path) -> Canary:
        """Raises CanaryError when it cannot be read."""
        try:
            with np.load(folder / FILE) as data:
                return Canary(data["ids"], data["logprobs"], data["last_logits"])
        except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
            raise CanaryError(f"{folder / FILE} cannot be read: {type(error).__name__}: {error}") from error

    @property
    def width(self) -> float:
        return float(np.std(self.last_logits, dtype=np.float64))

    def sampled(self, token: int, temperature: float) -> float:
        """Logprob of sampling `token` after the last one."""
        scaled = self.last_logits.astype(np.float64) / temperature
        return float(scaled[token] - np.logaddexp.reduce(scaled))


@dataclass(frozen=True, eq=False)
class Score:
    """What an engine answered."""

    logprobs: np.ndarray  # [N] float64, as in Canary
    token: int  # one sampled after the prompt
    token_logprob: float
    version: str  # that sampled it


def canary_ids(sampleable: int, most: int, seed: int) -> np.ndarray:
    """[N] int32, N = LENGTH or what an engine has room for (`most`): random ids of the tokenizer, the same over a whole run."""
    return np.random.default_rng(seed).integers(0, sampleable, max(2, min(LENGTH, most)), dtype=np.int32)


@dataclass
class Judge:
    """Of one engine. `dtype` is that of the published weights, `temperature` the one that training samples at."""

    dtype: str
    temperature: float
    calibrated: float = 0.0  # mean |Δ| of the first canary that passed, per width of its logits; 0: none has

    def bound(self, canary: Canary) -> float:
        """Of the mean |Δlogprob|."""
        most = BOUNDS[self.dtype]
        if self.dtype == "float32" or not self.calibrated:
            return most
        return min(most, max(FLOOR, MARGIN * self.calibrated * canary.width))

    def check(self, canary: Canary, score: Score, version: int) -> float:
        """The mean |Δlogprob|. Raises CanaryError."""
        if score.version != str(version):
            raise CanaryError(f"version {score.version} answered the canary of version {version}")
        if score.logprobs.shape != canary.logprobs.shape or not np.isfinite(score.logprobs).all():
            raise CanaryError(f"{len(score.logprobs)} finite logprobs were expected for {len(canary.ids)} tokens of the canary")
        mean, bound = float(np.abs(score.logprobs[1:] - canary.logprobs[1:]).mean()), self.bound(canary)
        if mean > bound:
            raise CanaryError(
                f"mean |logprob - learner's| is {mean:.2g} over the canary's {len(canary.ids)} tokens, allowed for "
                f"{self.dtype} is {bound:.2g}: it serves other weights, or computes them otherwise than the learner"
            )
        self._check_sampled(canary, score, ONE_TOKEN * bound)
        self.calibrated = self.calibrated or max(mean / max(canary.width, 1e-6), 1e-30)
        return mean

    def _check_sampled(self, canary: Canary, score: Score, allowed: float) -> None:
        """Recorded logprobs are those of softmax(logits / temperature), or every ratio of the loss is biased."""
        if not 0 <= score.token < len(canary.last_logits):
            raise CanaryError(f"it sampled id {score.token}, the model has {len(canary.last_logits)}")
        off = abs(score.token_logprob - canary.sampled(score.token, self.temperature))
        if off <= allowed:
            return
        if abs(score.token_logprob - canary.sampled(score.token, 1.0)) <= allowed:
            raise CanaryError(
                f"it returns logprobs from before the temperature ({self.temperature:g}), which bias every ratio of the loss; "
                "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        raise CanaryError(f"the logprob of a sampled token differs by {off:.2g} from softmax(logits / {self.temperature:g})")
