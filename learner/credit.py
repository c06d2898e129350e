"""Credit: from the rewards of a batch of rollouts to an advantage, a return and an old value for every sampled token.

A rollout may be cut into several segments (its context was rewritten, or it branched). Its action tokens are gathered across
them in step order, credited as one sequence, and put back. Context tokens take no part. All rollouts of an update go through the
compiled functions together, filled up to a power of two of tokens and of rollouts, so that few shapes are compiled.

`values[t]` values the state before token t. It was read at token t-1 of t's own segment: every segment starts with
context, so the first action of a rewritten context is valued there, and the last action before the rewriting
bootstraps from that value.

Dimension key: T tokens of a segment, R rollouts, A action tokens of a rollout in step order, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.config_algorithm import CRITICAL, AlgorithmConfig
from common.record import Segment
from common.types import Status, StepKind, Trajectory
from learner import advantages, corrections, temporal
from learner.rows import Credit, Rollout, Tokens, power, rows_of
from learner.shaping import USER_ERROR, soft_overlong


def of_batch(groups: Sequence[Sequence[Rollout]], algorithm: AlgorithmConfig) -> list[list[list[Credit]]]:
    """Per group, rollout and segment.

    A group is what it was planned as; its statistics are over rollouts, however many segments each has, and whatever is
    trained on. The caller leaves out rollouts without a reward (FAILED). Raises ValueError for rollouts that the algorithm has no
    credit for.
    """
    rollouts = [rollout for group in groups for rollout in group]
    tokens = Tokens(rollouts)
    rewards, penalties = _step_rewards(rollouts, algorithm), _kl_penalties(tokens, algorithm)
    placed = tokens.rows([place_rewards(own, of) for own, of in zip(rewards, tokens.steps, strict=True)]) - penalties
    values, log_weights = tokens.gather("values"), tokens.log_weights()
    returns = jnp.zeros_like(placed)
    if algorithm.advantage in (*CRITICAL, "reinforce_pp"):
        for rollout in rollouts:
            refuse_concurrent(rollout.trajectory, rollout.segments, algorithm.advantage)
        starts, ends = tokens.turns()
        line = _Line(placed, values, log_weights, starts, ends, tokens.mask, _bootstraps(tokens, algorithm))
        gains, returns = _over_time(algorithm, line)
    elif algorithm.advantage == "gigpo":
        gains = tokens.of_steps(_over_states(groups, _totals(rewards, penalties), rewards, algorithm))
    else:
        totals = _totals(rewards, penalties)
        erpo = algorithm.advantage == "erpo"
        own = _over_questions(groups, totals, tokens, algorithm) if erpo else _compared(groups, totals, algorithm)
        gains = jnp.where(tokens.mask, own[:, None], 0)
    gains = _normalized(gains, tokens, algorithm)
    if algorithm.zero_advantages:
        gains = jnp.zeros_like(gains)
    weights = _corrected(algorithm, log_weights, tokens.mask)
    credits = iter(tokens.spread(gains, returns, values, weights))
    return [[next(credits) for _ in group] for group in groups]


def refuse_concurrent(trajectory: Trajectory, segments: Sequence[Segment], advantage: str) -> None:
    """Raise ValueError if branches of the rollout ran at the same time, as seen from the order of its steps.

    A sub-agent that its caller waits for runs within the caller's wait, so credit along the steps is that of one agent.
    """
    spans = sorted((segment.steps[0], segment.steps[-1]) for segment in segments)
    for i, (first, last) in enumerate(spans):
        for begun, end in spans[i + 1 :]:
            if first < begun < last < end:
                raise ValueError(
                    f"rollout {trajectory.rollout_id} has branches that ran at the same time (steps {first} to {last} and {begun}"
                    f' to {end}): algorithm.advantage = "{advantage}" takes the next step for what a step led to, which it is not'
                    ' there; use one that compares rollouts, such as "grpo"'
                )


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


def last_segment(trajectory: Trajectory, segments: Sequence[Segment]) -> int:
    """Index of the segment that holds the last step, and the tail after it."""
    return next(i for i, segment in enumerate(segments) if segment.steps[-1] == len(trajectory.steps) - 1)


# ---- rewards ---------------------------------------------------------------------------------------------------------------


def _step_rewards(rollouts: Sequence[Rollout], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """[S] of each rollout: what its environment paid, less what its length costs, at the end."""
    out = []
    for rollout in rollouts:
        rewards = np.asarray([step.reward for step in rollout.trajectory.steps], np.float64)
        if algorithm.overlong_limit:
            sampled = sum(int(segment.mask.sum()) for segment in rollout.segments)
            rewards[-1] += soft_overlong(sampled, algorithm.overlong_limit, algorithm.overlong_cache)
        out.append(rewards)
    return out


def _totals(rewards: Sequence[np.ndarray], penalties: jax.Array) -> np.ndarray:
    """[R]: summed in float64, so that equal rewards are equal."""
    return np.asarray([own.sum() for own in rewards]) - np.asarray(penalties, np.float64).sum(1)[: len(rewards)]


def _kl_penalties(tokens: Tokens, algorithm: AlgorithmConfig) -> jax.Array:
    """β·k1 of each token: what is subtracted from its reward."""
    if algorithm.kl.where != "reward":
        return jnp.zeros(tokens.mask.shape)
    old = tokens.gather("logprobs") if algorithm.old_policy == "proximal" else tokens.behaviour()
    return algorithm.kl.coefficient * (old - tokens.gather("reference"))


def _bootstraps(tokens: Tokens, algorithm: AlgorithmConfig) -> jax.Array:
    """[R]: the value after the last token, of rollouts that were TRUNCATED, which the record's status says and never a
    length.

    Bootstrapping is right where the limit is no part of the task (Pardo et al. 2018, arXiv 1712.00378); an agent that can
    bring the limit about earns the critic's value by doing so.
    """
    on = algorithm.bootstrap_truncated and algorithm.advantage in CRITICAL
    out = np.zeros(len(tokens.mask), np.float32)
    for index, rollout in enumerate(tokens.rollouts):
        out[index] = rollout.after if on and rollout.trajectory.status == Status.TRUNCATED else 0.0
    return jnp.asarray(out)


# ---- compiled --------------------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """Of one rollout [A], or of many [R, A]."""

    rewards: Any
    values: Any
    log_weights: Any
    starts: Any  # of turns
    ends: Any
    mask: Any
    bootstrap: Any  # [], or [R]


@partial(jax.jit, static_argnums=0)
def _over_time(algorithm: AlgorithmConfig, lines: _Line) -> tuple[jax.Array, jax.Array]:
    gamma, lam = algorithm.gamma, algorithm.gae_lambda

    def one(line: _Line) -> tuple[jax.Array, jax.Array]:
        rewards, values, mask, bootstrap = line.rewards, line.values, line.mask, line.bootstrap
        match algorithm.advantage:
            case "gae":
                return temporal.gae(rewards, values, mask, bootstrap, gamma, lam)
            case "bilevel_gae":
                return temporal.bilevel_gae(rewards, values, line.ends, mask, bootstrap, (gamma, algorithm.gamma_turn), lam)
            case "step_gae":
                return temporal.step_gae(rewards, values, line.starts, mask, bootstrap, gamma, lam)
            case "vtrace":
                bounds = temporal.Bounds(algorithm.vtrace_rho, algorithm.vtrace_c, algorithm.vtrace_policy, lam)
                return temporal.vtrace(rewards, values, line.log_weights, mask, bootstrap, gamma, bounds)
            case _:
                returns = temporal.discounted_returns(rewards, mask, gamma)
                return returns, returns

    return jax.vmap(one)(lines)


def _compared(groups: Sequence[Sequence[Rollout]], totals: np.ndarray, algorithm: AlgorithmConfig) -> jax.Array:
    """[R]: the advantage of each rollout over the others of its group."""
    rewards, mask = rows_of(np.split(totals, np.cumsum([len(group) for group in groups])[:-1]))
    return _filled(np.asarray(_in_groups(algorithm, rewards, mask))[np.asarray(mask)], power(len(totals)))


def _over_questions(
    groups: Sequence[Sequence[Rollout]], totals: np.ndarray, tokens: Tokens, algorithm: AlgorithmConfig
) -> jax.Array:
    """[R]: ERPO's, without rollouts in which the simulated user was wrong."""
    question = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    valid = np.asarray([USER_ERROR not in rollout.trajectory.flags for rollout in tokens.rollouts])
    rewards, question, valid = (_filled(x, power(len(totals))) for x in (totals.astype(np.float32), question, valid))
    environment = jnp.asarray(tokens.domains()[0])
    return _erpo(rewards, question, environment, valid, ddof=algorithm.std_ddof)


@partial(jax.jit, static_argnums=0)
def _in_groups(algorithm: AlgorithmConfig, rewards: jax.Array, mask: jax.Array) -> jax.Array:
    match algorithm.advantage:
        case "grpo":
            method = partial(advantages.grpo, ddof=algorithm.std_ddof)
        case "gigpo":
            method = partial(advantages.grpo, ddof=1) if algorithm.step_std else advantages.dr_grpo
        case "rloo":
            method = advantages.rloo
        case _:  # dr_grpo, and reinforce_pp_baseline before it is whitened
            method = advantages.dr_grpo
    return jax.vmap(method)(rewards, mask)


_erpo = jax.jit(advantages.erpo, static_argnames="ddof")
_gigpo = jax.jit(advantages.gigpo, static_argnames=("weight", "std"))


@partial(jax.jit, static_argnames="gamma")
def _returns(rewards: jax.Array, mask: jax.Array, gamma: float) -> jax.Array:
    return jax.vmap(partial(temporal.discounted_returns, gamma=gamma))(rewards, mask)


def _over_states(
    groups: Sequence[Sequence[Rollout]], totals: np.ndarray, rewards: Sequence[np.ndarray], algorithm: AlgorithmConfig
) -> np.ndarray:
    """[S] over the steps of all rollouts, one after another: GiGPO's."""
    rollouts = [rollout for group in groups for rollout in group]
    counts = [len(own) for own in rewards]
    of = np.repeat(np.arange(len(rollouts)), counts)
    steps, mask = rows_of(rewards)
    returns = np.asarray(_returns(steps, mask, gamma=algorithm.gamma))[np.asarray(mask)]
    numbers: dict[Any, int] = {}
    anchor = [
        numbers.setdefault((index, *key), len(numbers))
        for index, group in enumerate(groups)
        for which, rollout in enumerate(group)
        for key in _states(rollout.trajectory, which)
    ]
    size = power(len(of))
    episode = np.asarray(_compared(groups, totals, algorithm))[of]
    xs = (_filled(x.astype(np.float32), size) for x in (episode, returns))
    seen = _filled(np.ones(len(of), bool), size)
    found = _gigpo(*xs, _filled(np.asarray(anchor), size), seen, weight=algorithm.step_weight, std=algorithm.step_std)
    return np.asarray(found)[: len(of)]


def _states(trajectory: Trajectory, which: int) -> list[tuple]:
    """What each step began in: the state that the environment said after the act before, which all rollouts of a group share at
    their beginning. A step in no known state, or of another kind than ACT, is like no other."""
    out, state = [], b"begin"
    for index, step in enumerate(trajectory.steps):
        known = step.kind == StepKind.ACT and state
        out.append((state,) if known else (which, index))
        if step.kind == StepKind.ACT:
            state = step.state_key
    return out


def _filled(values: np.ndarray, size: int) -> jax.Array:
    """Zeros behind, up to `size`."""
    return jnp.asarray(np.concatenate([values, np.zeros(size - len(values), values.dtype)]))


def _normalized(gains: jax.Array, tokens: Tokens, algorithm: AlgorithmConfig) -> jax.Array:
    """Over the tokens that are trained on; the others get 0."""
    if algorithm.normalize == "none":
        return gains
    trained = tokens.trained().reshape(-1)
    if algorithm.normalize == "batch":
        return _whiten(gains.reshape(-1), trained).reshape(gains.shape)
    domain, count = tokens.domains()
    of = jnp.asarray(np.repeat(domain, gains.shape[1]))
    return _task_normalize(gains.reshape(-1), of, trained, tasks=count).reshape(gains.shape)


_whiten = jax.jit(advantages.whiten)
_task_normalize = jax.jit(advantages.task_normalize, static_argnames="tasks")


@partial(jax.jit, static_argnums=0)
def _corrected(algorithm: AlgorithmConfig, log_weights: jax.Array, mask: jax.Array) -> jax.Array:
    """[R, A]: the weight of each token."""
    bounds = {"low": algorithm.correction_low, "high": algorithm.correction_high}
    match algorithm.correction:
        case "none":
            return jnp.where(mask, 1.0, 0.0)
        case "importance":
            method = corrections.importance
        case name:
            method = partial(getattr(corrections, name), **bounds)
    return jax.vmap(method)(log_weights, mask)
