"""Advantages of one group or one rollout: pure functions of NumPy arrays, unbatched, float64.

They run on the host. Rollouts differ in length, so a jitted version would compile again and again or pad; the
arithmetic is a few operations per sampled token, and float64 makes hand-computed numbers exact.

Only *compacted* action tokens come in: what the policy did not sample has no reward, no value and no decay here.

Dimension key: G rollouts of a group, A action tokens of a rollout in step order, S steps.
"""

from __future__ import annotations

import numpy as np

EQUAL = 1e-8  # rewards that differ by no more than this share of their size are equal


def grpo(rewards: np.ndarray, ddof: int, eps: float = 1e-6) -> np.ndarray:
    """[G] rewards -> [G] advantages, `(R - mean) / (std + eps)` (GRPO, arXiv 2402.03300 eq. 2).

    Equal rewards give exactly 0, where the plain formula divides rounding noise by rounding noise. A group of one has
    no baseline and gives 0.
    """
    rewards = np.asarray(rewards, np.float64)
    if len(rewards) < 2 or np.ptp(rewards) <= EQUAL * np.abs(rewards).max():
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)


def gae(rewards: np.ndarray, values: np.ndarray, bootstrap: float, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """[A] rewards and values -> [A] advantages and returns (generalised advantage estimation, arXiv 1506.02438).

    δₐ = rₐ + γ·vₐ₊₁ − vₐ,  Âₐ = δₐ + γλ·Âₐ₊₁,  return = Â + v. `values[a]` values the state before action token a;
    `bootstrap` values the state after the last one: 0 if the task ended there.
    """
    values = np.asarray(values, np.float64)
    following = np.append(values[1:], bootstrap)[: len(values)]
    deltas = np.asarray(rewards, np.float64) + gamma * following - values
    backwards: list[float] = []
    running = 0.0
    for delta in reversed(deltas.tolist()):
        running = delta + gamma * lam * running
        backwards.append(running)
    advantages = np.asarray(backwards[::-1])
    return advantages, advantages + values


def place_rewards(step_rewards: np.ndarray, step_of: np.ndarray) -> np.ndarray:
    """[S] rewards of steps -> [A] rewards of action tokens: each stands on the last action token of its step.

    `step_of` [A] names the step of each action token and never falls. The reward of a step without tokens stands on
    the last token before it (the first one if there is none before); without any token there is nothing to reward.
    """
    rewards = np.zeros(len(step_of))
    if len(step_of):
        last = np.searchsorted(step_of, np.arange(len(step_rewards)), side="right") - 1
        np.add.at(rewards, np.maximum(last, 0), step_rewards)
    return rewards


def whiten(advantages: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    """[A] -> [A] with mean 0 and population standard deviation 1; equal ones become 0."""
    if not len(advantages) or np.ptp(advantages) <= EQUAL * np.abs(advantages).max():
        return np.zeros(len(advantages))
    return (advantages - advantages.mean()) / (advantages.std() + eps)
