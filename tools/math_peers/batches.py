"""Random batches that Polyturn and its peers compute on alike, and the answers that peers give. NumPy alone: peers run in
environments of their own.

A row is one rollout: a prompt, turns of the policy, the environment's answers between them, then padding. Everything that
stands outside of the mask is random too, so a function that reads it shows.

Dimension key: B rows, T tokens of a row, V vocabulary; G members of a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

GROUPS, MEMBERS, LENGTH, WORDS = 3, 6, 40, 7
ROWS = GROUPS * MEMBERS
GAMMA, LAMBDA = 0.97, 0.9
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP = 0.2, 0.28, 3.0, 0.2
GSPO_LOW, GSPO_HIGH = 0.02, 0.03  # as wide as a run may set them, so that both sides are reached
LOW, HIGH = 0.6, 1.3  # of corrections; not each other's inverse
ENTROPY, KL = 0.01, 0.1
SEEDS = 2
PICKED = 96  # tokens that functions without a mask get

# name -> several turns, a limit cut some rollouts off, the context is rewritten on the way
KINDS = {
    "one turn": (False, False, False),
    "several turns": (True, False, False),
    "cut off": (True, True, False),
    "several segments": (True, False, True),
}

Answers = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Batch:
    """What one call of a learner sees. Floats are float64; those that end in `32` are their float32."""

    ids: np.ndarray  # [B, T] int32
    mask: np.ndarray  # [B, T] bool: sampled by the policy; never the first token
    span: np.ndarray  # [B, T] bool: from its first token to its last, the environment's between them included
    segments: np.ndarray  # [B, T] int32, from 0 in each row
    logits: np.ndarray  # [B, T, V] float32: after each token; those at t-1 predict token t
    logprobs: np.ndarray  # [B, T]: of ids, by `logits`
    old_logits: np.ndarray  # [B, T, V] float32
    old_logprobs: np.ndarray  # [B, T]
    reference: np.ndarray  # [B, T] logprobs
    log_weights: np.ndarray  # [B, T]: log(proximal/behaviour); 0 outside of mask
    rewards: np.ndarray  # [B, T]: on the last token of each turn, 0 elsewhere
    scores: np.ndarray  # [B]: their sums; equal in the first group
    values: np.ndarray  # [B, T]: of the state before each token
    new_values: np.ndarray  # [B, T]: the critic's later on
    bootstrap: np.ndarray  # [B]: 0 where the task ended
    returns: np.ndarray  # [B, T]
    advantages: np.ndarray  # [B, T]
    row_advantages: np.ndarray  # [B]: one for all tokens of a rollout
    losses: np.ndarray  # [B, T] of single tokens

    @property
    def group(self) -> np.ndarray:
        """[B]: the number of each row's group."""
        return np.repeat(np.arange(GROUPS), MEMBERS)

    def picked(self, x: np.ndarray) -> np.ndarray:
        """Of x [B, T, ...] the entries at the first PICKED of the policy's tokens: what a function without a mask gets."""
        return x[self.mask][:PICKED]


def make(kind: str, seed: int) -> Batch:
    """The batch of a kind of KINDS."""
    several, cut, rewritten = KINDS[kind]
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    mask, span, segments, last = _turns(rng, several, rewritten)
    rewards = np.where(last, rng.integers(-3, 4, mask.shape) / 10, 0)
    ends = last & (np.cumsum(last, 1) == last.sum(1, keepdims=True))
    rewards[:MEMBERS] = np.where(ends, 0.9, 0)[:MEMBERS]  # a group of equal rewards, whose mean in float32 is another
    ids = rng.integers(0, WORDS, mask.shape).astype(np.int32)
    logits, old_logits = (rng.normal(0, scale, (*mask.shape, WORDS)).astype(np.float32) for scale in (1, 0.5))
    old_logits += logits

    def noise(scale: float) -> np.ndarray:
        return rng.normal(0, scale, mask.shape)

    logprobs, values, old = chosen(logits, ids), noise(1), chosen(old_logits, ids)
    return Batch(
        ids, mask, span, segments, logits, logprobs, old_logits, old,
        reference=logprobs + noise(0.3) + 3.5 * (rng.random(mask.shape) < 0.1),
        log_weights=np.where(mask, noise(0.3), 0),
        rewards=rewards,
        scores=rewards.sum(1),
        values=values,
        new_values=values + noise(0.3),
        bootstrap=np.where(cut & (rng.random(ROWS) < 0.5), rng.normal(size=ROWS), 0),
        returns=values + noise(0.5),
        advantages=noise(1),
        row_advantages=rng.normal(size=ROWS),
        losses=noise(1),
    )  # fmt: skip


def _turns(rng: np.random.Generator, several: bool, rewritten: bool) -> tuple[np.ndarray, ...]:
    """mask, span, segments, and the last token of each turn: [B, T] each."""
    mask, span, last = (np.zeros((ROWS, LENGTH), bool) for _ in range(3))
    segments = np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        at = first = int(rng.integers(1, 5))
        turns = int(rng.integers(2, 5)) if several else 1
        for turn in range(turns):
            length = int(rng.integers(1, 6 if several else 20))
            mask[row, at : at + length] = True
            span[row, first : at + length] = True
            last[row, at + length - 1] = True
            at += length
            at += int(rng.integers(1, 4)) if several and turn < turns - 1 else 0
            segments[row, at:] += int(rewritten and turn < turns - 1)
    return mask, span, segments, last


def chosen(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[B, T] float64: the logprob of each token by the logits before it, 0 for the first."""
    x = logits[:, :-1].astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    table = x - np.log(np.exp(x).sum(-1, keepdims=True))
    found = np.take_along_axis(table, ids[:, 1:, None], -1)[..., 0]
    return np.pad(found, ((0, 0), (1, 0)))


def aligned(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The entries of `where` of each row moved to its right end, [B, T], zeros before them: sequences without masks or gaps."""
    out = np.zeros_like(x)
    for row, keep in enumerate(where):
        count = int(keep.sum())
        out[row, LENGTH - count :] = x[row, keep]
    return out


def all_batches() -> dict[str, Batch]:
    """ "KIND/SEED" -> batch."""
    return {f"{kind}/{seed}": make(kind, seed) for kind in KINDS for seed in range(SEEDS)}


def save(batches: Mapping[str, Batch], path: Path) -> None:
    """As .npz, "KIND/SEED|field" each."""
    np.savez(path, **{f"{name}|{f.name}": getattr(batch, f.name) for name, batch in batches.items() for f in fields(Batch)})  # pyright: ignore[reportArgumentType]


def load(path: Path) -> dict[str, Batch]:
    """Of `save`."""
    with np.load(path) as stored:
        names = list(dict.fromkeys(key.partition("|")[0] for key in stored))
        return {name: Batch(**{f.name: stored[f"{name}|{f.name}"] for f in fields(Batch)}) for name in names}


def answer(peer: Callable[[Batch], Answers], argv: list[str] = sys.argv) -> None:
    """main() of a peer's program: `PROGRAM inputs.npz outputs.npz`."""
    source, target = map(Path, argv[1:])
    found = {f"{name}|{key}": np.asarray(x) for name, batch in load(source).items() for key, x in peer(batch).items()}
    np.savez(target, **found)  # pyright: ignore[reportArgumentType]


def read(path: Path) -> dict[str, Answers]:
    """What a peer's program wrote, by batch."""
    found: dict[str, Answers] = {}
    with np.load(path) as stored:
        for key in stored:
            name, _, function = key.partition("|")
            found.setdefault(name, {})[function] = stored[key]
    return found
