"""Seeds and ids: every random draw of a run comes from one number, the run's seed."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in 0..2^31-1 from its parts. Same parts, same seed, on every machine and in every process.

    Parts are joined with their types, so that ("1", 2) and (1, "2") differ.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def turn_uses_stale_pool(rollout_seed: int, turn: int, share: float) -> bool:
    """Whether the stale pool of engines samples this turn: with probability `share`, the same at every try of the turn."""
    return derive_seed(rollout_seed, "pool", turn) < share * 2**31


def turn_seed(rollout_seed: int, turn: int) -> int:
    """The engine's seed for one turn of a rollout."""
    return derive_seed(rollout_seed, "turn", turn)
