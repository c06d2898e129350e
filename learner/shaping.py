"""What becomes of rollouts that a limit cut off, before they are compared."""

from __future__ import annotations

from common.types import Status, Trajectory


def soft_overlong(tokens: int, limit: int, cache: int) -> float:
    """What is added to the reward of a rollout of so many sampled tokens (DAPO, arXiv 2503.14476 eq. 13).

    0 up to `limit − cache`, falling to −1 at `limit`, −1 beyond.

    Turns: the policy's tokens of all turns are counted, the environment's are not.
    """
    return max(-1.0, min(0.0, (limit - cache - tokens) / cache))


def compactly_filtered(trajectory: Trajectory) -> bool:
    """Whether the rollout leaves the loss because a limit ended it (DeepSWE's compact filtering): of turns, tokens or time.

    Its reward stays in the statistics of its group, as in DeepSWE's code, whatever it is.
    """
    return trajectory.status == Status.TRUNCATED
