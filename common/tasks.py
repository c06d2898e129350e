"""Lists of tasks: their splits, and a fingerprint that tells two lists apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from common.types import Task

SPLITS = ("train", "heldout")


def fingerprint(tasks: Sequence[Task]) -> str:
    """Of ids, seeds and payloads, in order: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(json.dumps([task.id, task.seed, task.payload], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
