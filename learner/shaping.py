"""What becomes of rollouts before they are compared: those that a limit cut off, those that are no evidence."""

from __future__ import annotations

from collections.abc import Sequence

from common.config_algorithm import COMPARING, AlgorithmConfig
from common.types import Status, Trajectory

USER_ERROR = "USER_ERROR"  # a flag of rollouts in which the simulated user was wrong


def soft_overlong(tokens: int, limit: int, cache: int) -> float:
    """`max(−1, min(0, (limit − cache − n) / cache))`, added to the reward of a rollout of n tokens (DAPO, arXiv 2503.14476).

    0 up to `limit − cache`, falling to −1 at `limit`, −1 beyond.

    Turns: the policy's tokens of all turns are counted, the environment's are not.
    """
    return max(-1.0, min(0.0, (limit - cache - tokens) / cache))


def compactly_filtered(trajectory: Trajectory) -> bool:
    """Whether the rollout leaves the loss because a limit ended it (DeepSWE's compact filtering): of turns, tokens or time.

    Its reward stays in the statistics of its group, as in DeepSWE's code, whatever it is.

    Turns: those before the limit leave the loss too.
    """
    return trajectory.status == Status.TRUNCATED


def leaves_the_loss(group: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[bool]:
    """Which rollouts of a group are not trained on, and leave the loss's denominator: with ERPO those with an error of the
    simulated user (which leave its statistics too), those with nothing to compare with, and those that are filtered."""
    wrong = [algorithm.advantage == "erpo" and USER_ERROR in trajectory.flags for trajectory in group]
    alone = algorithm.advantage in COMPARING and len(group) - sum(wrong) < 2
    filtered = [algorithm.compact_filter and compactly_filtered(trajectory) for trajectory in group]
    return [alone or a or b for a, b in zip(wrong, filtered, strict=True)]
