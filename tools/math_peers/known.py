"""Every comparison that tools/bench_math.py makes, and what is known of differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from learner import advantages
from tools.math_peers import batches as b
from tools.math_peers import ours
from tools.math_peers.batches import Batch, aligned
from tools.math_peers.comparisons import Comparison, Reason

STEPS = "it takes the environment's tokens for steps"
NEIGHBOUR = "its mask passes the error on, and the value behind a token is still that of the neighbouring entry"
MIXED = "it takes λ·target + (1 − λ)·value behind a token in advantages too; IMPALA's equation takes the target"
BESSEL = "it whitens with the unbiased variance (n − 1), ε within the root"
NO_BOOTSTRAP = "it has no bootstrap value: a rollout that a limit cut off is over"
NO_SEGMENTS = "a sequence is a row, whatever contexts its tokens were sampled in"
INVERSE = "its bounds are of behaviour over proximal policy, the inverse ratio"
CLAMPED = "its k3 is at most 10, without a gradient above"
CLAMPED_VALUE = "its k3 is at most 10"
NOISE = "rewards that are equal give rounding noise over ε, and not 0"
ALL_ENTRIES = "its mean counts entries of weight 0"


def whitened(batch: Batch, x: np.ndarray) -> np.ndarray:
    """As tunix and verl do."""
    own = x[batch.mask]
    return np.where(batch.mask, (x - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8), 0)


def over(batch: Batch) -> np.ndarray:
    return np.zeros_like(batch.bootstrap)


def neighbour(batch: Batch) -> np.ndarray:
    """Errors with rewards that make up for the value of the neighbouring entry."""
    after = np.concatenate([batch.values[:, 1:], batch.bootstrap[:, None]], 1)
    last = batch.mask & (np.cumsum(batch.mask, 1) == batch.mask.sum(1, keepdims=True))
    after = np.where(last, batch.bootstrap[:, None], after)
    moved = b.GAMMA * np.where(batch.mask, after - ours.following(batch.values, batch), 0)
    return aligned(ours.vtrace_errors(batch, rewards=batch.rewards + moved), batch.span)


def mixed(batch: Batch) -> np.ndarray:
    """Advantages of V-trace from its own targets, mixed with values."""
    _, targets = ours.vtrace(batch)
    behind = b.LAMBDA * ours.following(targets, batch) + (1 - b.LAMBDA) * ours.following(batch.values, batch)
    found = np.minimum(1, np.exp(batch.log_weights)) * (batch.rewards + b.GAMMA * behind - batch.values)
    return aligned(np.where(batch.mask, found, 0), batch.mask)


def n_step(batch: Batch) -> np.ndarray:
    return ours.vtrace(batch, lam=1.0, log_weights=np.zeros_like(batch.log_weights))[1]


def of_sequences() -> list[Comparison]:
    """rlax's, of the policy's tokens alone, and of rows as they stand."""
    found: dict[str, tuple[str, Callable[[Batch, np.ndarray], np.ndarray]]] = {
        "truncated_generalized_advantage_estimation": ("GAE", lambda x, mask: ours.gae(x, mask)[0]),
        "lambda_returns": ("λ-returns", lambda x, mask: np.where(mask, ours.gae(x, mask)[1], 0)),
        "discounted_returns": ("discounted returns", ours.returns),
        "vtrace": ("V-trace, errors", ours.vtrace_errors),
    }
    out = []
    for name, (what, function) in found.items():

        def own(x: Batch, function: Callable = function) -> np.ndarray:
            return aligned(function(x, x.mask), x.mask)

        def row(x: Batch, function: Callable = function) -> np.ndarray:
            return aligned(function(x, x.mask), x.span)

        def steps(x: Batch, function: Callable = function) -> np.ndarray:
            return aligned(np.where(x.mask, function(x, x.span), 0), x.span)

        out.append(Comparison(f"{what}, of its tokens", f"rlax {name}", own))
        out.append(Comparison(f"{what}, of the row", f"rlax {name}, whole row", row, (Reason(STEPS, steps),)))
    td = "vtrace_td_error_and_advantage"
    return [
        *out,
        Comparison("V-trace, ratios 1, targets", "rlax n_step_bootstrapped_returns", lambda x: aligned(n_step(x), x.mask)),
        Comparison("V-trace, errors", f"rlax {td}, errors", lambda x: aligned(ours.vtrace_errors(x), x.mask)),
        Comparison("V-trace, advantages", f"rlax {td}, λ = 1", lambda x: aligned(ours.vtrace(x, lam=1.0)[0], x.mask)),
        Comparison(
            "V-trace, advantages", f"rlax {td}, λ < 1", lambda x: aligned(ours.vtrace(x)[0], x.mask), (Reason(MIXED, mixed),)
        ),
        Comparison(
            "V-trace, errors, of the row", "rlax vtrace, sample_mask",
            lambda x: aligned(ours.vtrace_errors(x), x.span), (Reason(NEIGHBOUR, neighbour),),
        ),
    ]  # fmt: skip


def picked(pair: Callable[[Batch], tuple[np.ndarray, np.ndarray]], which: int) -> Callable[[Batch], np.ndarray]:
    return lambda batch: pair(batch)[which]


def both(
    what: str, peer: str, pair: Callable[[Batch], tuple[np.ndarray, np.ndarray]], *changed: tuple[str, Callable]
) -> list[Comparison]:
    """A loss and its gradient; `changed` are reasons and the pair that shows each."""
    return [
        Comparison(
            f"{what}{', gradient' * which}",
            f"{peer}{', gradient' * which}",
            picked(pair, which),
            tuple(Reason(text, picked(other, which)) for text, other in changed),
        )
        for which in (0, 1)
    ]


def of_losses() -> list[Comparison]:
    """rlax's: means over tokens."""

    def all_entries(x: Batch) -> np.ndarray:
        return np.asarray(reinforced(x) * x.mask.mean(), np.float32)

    def reinforced(x: Batch) -> np.ndarray:
        return np.asarray(-(ours.logprobs(x)[0] * x.advantages)[x.mask].mean(), np.float32)

    return [
        *both("PPO's clip", "rlax clipped_surrogate_pg_loss", ours.clipped),
        *both("REINFORCE", "rlax policy_gradient_loss", ours.reinforced),
        Comparison("REINFORCE", "rlax policy_gradient_loss, w = mask", reinforced, (Reason(ALL_ENTRIES, all_entries),)),
        Comparison("entropy", "rlax entropy_loss", lambda x: -x.picked(ours.logprobs(x)[1]).mean()),
        Comparison("k1, mean over all tokens", "rlax categorical_kl_divergence", lambda x: ours.exact_kl(x, "k1")),
        Comparison("k3, mean over all tokens", "rlax categorical_kl_divergence", lambda x: ours.exact_kl(x, "k3")),
        Comparison("ratios", "rlax categorical_importance_sampling_ratios", lambda x: x.picked(ours.ratios(x))),
        Comparison("value loss, unclipped", "rlax l2_loss", ours.square),
    ]


def of_tunix() -> list[Comparison]:
    """All it has."""

    def noise(x: Batch) -> np.ndarray:
        rows = np.float32(x.scores).reshape(b.GROUPS, b.MEMBERS)
        return ((rows - rows.mean(1, keepdims=True)) / (rows.std(1, ddof=1, keepdims=True) + np.float32(1e-6))).ravel()

    def grpo(x: Batch, dtype: type) -> np.ndarray:
        return ours.grouped(advantages.grpo, dtype(x.scores), ddof=1)

    def returns(x: Batch, **more: np.ndarray) -> np.ndarray:
        return np.where(x.mask, ours.gae(x, **more)[1], 0)

    gae = "tunix compute_gae_advantages"
    return [
        Comparison("GRPO", "tunix compute_advantages", partial(grpo, dtype=np.float64)),
        Comparison("GRPO", "tunix compute_advantages, float32", partial(grpo, dtype=np.float32), (Reason(NOISE, noise),)),
        Comparison("Dr. GRPO", "tunix compute_drgrpo_advantages", lambda x: ours.grouped(advantages.dr_grpo, x.scores)),
        Comparison("RLOO", "tunix compute_rloo_advantages", lambda x: ours.grouped(advantages.rloo, x.scores)),
        Comparison("GAE, returns", f"{gae}, returns", returns, (Reason(NO_BOOTSTRAP, lambda x: returns(x, bootstrap=over(x))),)),
        Comparison(
            "GAE, whitened", f"{gae}, advantages", lambda x: ours.whiten(x, ours.gae(x)[0]),
            (
                Reason(BESSEL, lambda x: whitened(x, ours.gae(x)[0])),
                Reason(f"{BESSEL}; {NO_BOOTSTRAP}", lambda x: whitened(x, ours.gae(x, bootstrap=over(x))[0])),
            ),
        ),
        Comparison(
            "whitening", "tunix masked_whiten", lambda x: ours.whiten(x, x.advantages),
            (Reason(BESSEL, lambda x: whitened(x, x.advantages)),),
        ),
        Comparison("logprobs", "tunix selective_log_softmax", lambda x: ours.logprobs(x)[0]),
        Comparison("entropy", "tunix compute_entropy_from_logits", lambda x: ours.logprobs(x)[1]),
        *(
            Comparison(mine, f"tunix compute_kl_divergence, {its}", lambda x, mine=mine: ours.penalty(x, mine, mine)[0])
            for mine, its in (("k1", "kl"), ("k2", "mse_kl"), ("k3", "low_var_kl"))
        ),
    ]  # fmt: skip


def of_tunix_losses() -> list[Comparison]:
    """Whole losses, with gradients by the logits."""
    ppo, grpo = "tunix ppo_policy_loss_fn", "tunix grpo_loss_fn"
    of_tokens, of_rows = partial(ours.update_loss, per_token=True), partial(ours.update_loss, per_token=False)
    sequence = partial(of_rows, policy_loss="gspo", clip_low=b.GSPO_LOW, clip_high=b.GSPO_HIGH)

    def whole_row(x: Batch) -> tuple[np.ndarray, np.ndarray]:
        return sequence(x, segments=np.zeros_like(x.segments))

    def width(x: Batch) -> tuple[np.ndarray, np.ndarray]:
        return of_rows(x, aggregation="constant", divisor=b.LENGTH - 1.0)  # the first token is the prompt

    return [
        *both("PPO", ppo, of_tokens),
        *both("PPO, dual clip", f"{ppo}, dual clip", partial(of_tokens, dual_clip=b.DUAL_CLIP)),
        *both("PPO, entropy", f"{ppo}, entropy", partial(of_tokens, entropy=b.ENTROPY)),
        *both("value loss, clipped", "tunix ppo_value_loss_fn", ours.value_loss),
        *both("GRPO, token_mean", grpo, of_rows),
        *both("GRPO, KL k3", f"{grpo}, k3", partial(of_rows, kl="k3")),
        *both("GRPO, KL k2", f"{grpo}, k2", partial(of_rows, kl="k2")),
        *both("GSPO", f"{grpo}, gspo-token", sequence, (NO_SEGMENTS, whole_row)),
        *both("seq_mean_token_mean", f"{grpo}, sequence-mean-token-mean", partial(of_rows, aggregation="seq_mean_token_mean")),
        *both("seq_mean_token_sum", f"{grpo}, seq-mean-token-sum", partial(of_rows, aggregation="seq_mean_token_sum")),
        *both("constant, divisor the row's width", f"{grpo}, sequence-mean-token-scale", width),
    ]


def of_verl() -> list[Comparison]:
    """Advantages, aggregation, KL and corrections."""

    def returns(x: Batch, **more: np.ndarray) -> np.ndarray:
        return np.where(x.mask, ours.gae(x, **more)[1], 0)

    def rows(function: Callable, **more: int) -> Callable[[Batch], np.ndarray]:
        return lambda x: ours.spread(x, ours.grouped(function, x.scores, **more))

    gae, plus = "verl compute_gae_advantage_return", "verl compute_reinforce_plus_plus_outcome_advantage"
    return [
        Comparison("GRPO", "verl compute_grpo_outcome_advantage", rows(advantages.grpo, ddof=1)),
        Comparison("Dr. GRPO", "verl compute_grpo_outcome_advantage, no std", rows(advantages.dr_grpo)),
        Comparison("RLOO", "verl compute_rloo_outcome_advantage", rows(advantages.rloo)),
        Comparison("GAE, returns", f"{gae}, returns", returns, (Reason(NO_BOOTSTRAP, lambda x: returns(x, bootstrap=over(x))),)),
        Comparison(
            "GAE, whitened", f"{gae}, advantages", lambda x: ours.whiten(x, ours.gae(x)[0]),
            (
                Reason(BESSEL, lambda x: whitened(x, ours.gae(x)[0])),
                Reason(f"{BESSEL}; {NO_BOOTSTRAP}", lambda x: whitened(x, ours.gae(x, bootstrap=over(x))[0])),
            ),
        ),
        Comparison("REINFORCE++, returns", f"{plus}, returns", ours.returns),
        Comparison(
            "REINFORCE++", plus, lambda x: ours.whiten(x, ours.returns(x)),
            (Reason(BESSEL, lambda x: whitened(x, ours.returns(x))),),
        ),
        Comparison(
            "REINFORCE++-baseline", "verl compute_reinforce_plus_plus_baseline_outcome_advantage",
            lambda x: ours.whiten(x, rows(advantages.dr_grpo)(x)),
            (Reason(BESSEL, lambda x: whitened(x, rows(advantages.dr_grpo)(x))),),
        ),
        Comparison(
            "whitening", "verl masked_whiten", lambda x: ours.whiten(x, x.advantages),
            (Reason(BESSEL, lambda x: whitened(x, x.advantages)),),
        ),
        Comparison("entropy", "verl entropy_from_logits", lambda x: ours.logprobs(x)[1]),
    ]  # fmt: skip


def of_verl_losses() -> list[Comparison]:
    """Losses by logprobs, KL and off-policy corrections."""

    def whole_row(x: Batch) -> tuple[np.ndarray, np.ndarray]:
        return ours.policy_loss(x, "gspo", segments=np.zeros_like(x.segments))

    def clamped(x: Batch) -> tuple[np.ndarray, np.ndarray]:
        value, slope = ours.penalty(x, "k3", "k3")
        return np.minimum(value, 10), np.where(value < 10, slope, 0)

    straight = partial(ours.penalty, value="k3", gradient="k2")
    weight, rejection = "verl compute_rollout_correction_weights", "verl compute_rollout_rejection_mask"
    modes = {"token_mean": "token-mean", "seq_mean_token_mean": "seq-mean-token-mean", "seq_mean_token_sum": "seq-mean-token-sum"}

    def rejected(name: str, low: float, high: float) -> tuple[Callable, tuple[Reason, ...]]:
        inverse = Reason(INVERSE, lambda x: ours.correction(x, name, 1 / high, 1 / low))
        return (lambda x: ours.correction(x, name, low, high)), (inverse,)

    return [
        *both("PPO, dual clip", "verl compute_policy_loss_vanilla", partial(ours.policy_loss, name="ppo")),
        *both("GSPO", "verl compute_policy_loss_gspo", partial(ours.policy_loss, name="gspo"), (NO_SEGMENTS, whole_row)),
        *both("CISPO", "verl compute_policy_loss_cispo", partial(ours.policy_loss, name="cispo")),
        *both("value loss, clipped", "verl compute_value_loss", ours.value_loss),
        *(Comparison(mine, f"verl agg_loss, {its}", partial(ours.aggregated, aggregation=mine)) for mine, its in modes.items()),
        Comparison(
            "constant, divisor the row's width", "verl agg_loss, seq-mean-token-sum-norm",
            lambda x: ours.aggregated(x, "constant", float(b.LENGTH)),
        ),
        *both("k1", "verl kl_penalty, k1", partial(ours.penalty, value="k1", gradient="k1")),
        *both("k2", "verl kl_penalty, k2", partial(ours.penalty, value="k2", gradient="k2")),
        *both("k3", "verl kl_penalty, k3", partial(ours.penalty, value="k3", gradient="k3"), (CLAMPED, clamped)),
        Comparison(
            "k3 with the gradient of k2", "verl kl_penalty, k3+", picked(straight, 0),
            (Reason(CLAMPED_VALUE, picked(clamped, 0)),),
        ),
        Comparison("k3 with the gradient of k2, gradient", "verl kl_penalty, k3+, gradient", picked(straight, 1)),
        Comparison("truncated", f"{weight}, token", lambda x: ours.correction(x, "truncated", 0.0, b.HIGH)),
        Comparison("truncated_sequence", f"{weight}, sequence", lambda x: ours.correction(x, "truncated_sequence", 0.0, b.HIGH)),
        Comparison("masked", f"{weight}, band", lambda x: ours.correction(x, "masked", b.LOW, b.HIGH)),
        Comparison("rejected", f"{rejection}, token_k1", *rejected("rejected", b.LOW, b.HIGH)),
        Comparison("rejected_sequence", f"{rejection}, seq_mean_k1", *rejected("rejected_sequence", 0.9, 1.2)),
    ]  # fmt: skip


def comparisons() -> list[Comparison]:
    """All of them, peer by peer."""
    return [*of_sequences(), *of_losses(), *of_tunix(), *of_tunix_losses(), *of_verl(), *of_verl_losses()]
