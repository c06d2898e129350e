"""Every term of the policy's objective against a loop in NumPy, in float64, whatever the packing; and the measures that add
up."""

from __future__ import annotations

import itertools
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config_algorithm import AlgorithmConfig
from learner import objective, reducers
from learner.losses import before
from learner.objective import add, contribution
from learner.pack import Aggregation, Shape, pack
from learner.reducers import Last, results
from tests.learner_math.build import example

pytestmark = pytest.mark.usefixtures("x64")

WORDS = 6


class Bigram:
    """A policy whose logits are a row of a table, chosen by the token before; its critic reads the same row."""

    def __init__(self, critic="none"):
        self.critic = critic

    def logprobs(self, params, batch, wanted):
        hidden = params["table"][jnp.asarray(batch.ids)]
        logits = before(hidden) / jnp.asarray(batch.temperature)[..., None]
        table = jax.nn.log_softmax(logits)
        found = jnp.take_along_axis(table, jnp.asarray(batch.ids)[..., None], -1)[..., 0]
        entropy = -(jnp.exp(table) * table).sum(-1)
        return jnp.where(wanted, found, 0), jnp.where(wanted, entropy, 0), hidden

    def values(self, params, batch, hidden):
        return hidden @ params["value"]


def params():
    rng = np.random.default_rng(7)
    return {"table": jnp.asarray(rng.normal(size=(WORDS, WORDS))), "value": jnp.asarray(rng.normal(size=WORDS))}


def examples(seed=0, count=6):
    """Rollouts a and b have two segments; observed tokens lie between sampled ones and behind them."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(4, 10))
        kind = rng.integers(0, 3, n)
        kind[0] = 0
        mask = kind == 1
        names = ("old_logprobs", "reference", "advantages", "returns", "old_values")
        floats = {name: np.where(mask, rng.normal(size=n), 0).astype(np.float32) for name in names}
        floats["old_logprobs"] = np.where(mask, floats["old_logprobs"] * 0.4 - 2, 0).astype(np.float32)
        floats["reference"] = np.where(mask, floats["reference"] * 0.4 - 2, 0).astype(np.float32)
        observed = kind == 2
        more = {"observed": observed, "answers": int(observed.sum()) + i % 2}
        out.append(example("aabbcd"[i], rng.integers(0, WORDS, n), mask, 0.7 + 0.1 * i, **floats, **more))
    return out


def softmax_logprob(own, at, heat):
    """Log-probabilities of all words at position `at` of an example."""
    logits = np.asarray(params()["table"])[own.ids[at - 1]] / heat
    return logits - np.log(np.exp(logits).sum())


def slow_loss(chosen, algorithm, aggregation):
    """The objective, token by token."""
    rollouts = sorted({own.rollout for own in chosen if any(e.mask.any() for e in chosen if e.rollout == own.rollout)})
    count = {r: sum(int(e.mask.sum()) for e in chosen if e.rollout == r) for r in rollouts}
    answers = {e.rollout: sum(x.answers for x in chosen if x.rollout == e.rollout) for e in chosen}
    predicting = {e.rollout for e in chosen if e.observed.any()}
    total = sum(count.values())
    out = 0.0
    for own in chosen:
        logs = {t: softmax_logprob(own, t, own.temperature) for t in np.flatnonzero(own.mask)}
        ratio = {t: logs[t][own.ids[t]] - float(own.old_logprobs[t]) for t in logs}
        mean = np.mean(list(ratio.values())) if ratio else 0.0
        for t, table in logs.items():
            logprob, gain = table[own.ids[t]], float(own.advantages[t])
            rho = np.exp(mean if algorithm.policy_loss == "gspo" else ratio[t])
            low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
            match algorithm.policy_loss:
                case "ppo" | "gspo":
                    loss = max(-gain * rho, -gain * min(max(rho, low), high))
                    if algorithm.dual_clip and gain < 0:
                        loss = min(loss, -gain * algorithm.dual_clip)
                case "cispo":
                    loss = -min(max(rho, low), high) * gain * logprob
                case "double_sided":
                    loss = -rho * gain * logprob if low < rho < high else 0.0
                case _:
                    loss = -gain * logprob
            if algorithm.kl.where == "loss":
                lr = logprob - float(own.reference[t])
                loss += algorithm.kl.coefficient * {"k1": lr, "k2": lr**2 / 2, "k3": np.exp(-lr) - 1 + lr}[algorithm.kl.value]
            loss += algorithm.entropy * float((np.exp(table) * table).sum())
            weight = {
                "token_mean": 1 / total,
                "seq_mean_token_mean": 1 / (len(rollouts) * count[own.rollout]),
                "seq_mean_token_sum": 1 / len(rollouts),
                "constant": 1 / (len(rollouts) * max(aggregation.divisor, 1)),
            }[aggregation.name]
            out += weight * aggregation.policy * loss
            if algorithm.critic != "none":
                value, old, target = (
                    float(np.asarray(params()["table"])[own.ids[t - 1]] @ np.asarray(params()["value"])),
                    float(own.old_values[t]),
                    float(own.returns[t]),
                )
                near = old + min(max(value - old, -algorithm.value_clip), algorithm.value_clip)
                error = 0.5 * max((value - target) ** 2, (near - target) ** 2)
                out += algorithm.value_coefficient * error / total
        if algorithm.observation.loss != "none":
            for t in np.flatnonzero(own.observed):
                logprob = softmax_logprob(own, t, 1.0)[own.ids[t]]
                mae = 1 - min(np.exp(logprob), algorithm.observation.bound)
                error = -logprob if algorithm.observation.loss == "cross_entropy" else mae
                out += aggregation.observations * error / (len(predicting) * answers[own.rollout])
    return out


KL = {"where": "loss", "coefficient": 0.1, "value": "k3", "gradient": "k2"}
CASES = {
    "ppo": ({}, Aggregation()),
    "dual clip": ({"dual_clip": 1.5, "entropy": 0.01}, Aggregation("seq_mean_token_mean")),
    "gspo": ({"policy_loss": "gspo", "clip_low": 0.01, "clip_high": 0.04}, Aggregation("seq_mean_token_mean")),
    "cispo": ({"policy_loss": "cispo"}, Aggregation("seq_mean_token_sum")),
    "double_sided": ({"policy_loss": "double_sided", "clip_low": 0.5, "clip_high": 0.9}, Aggregation("constant", 8.0)),
    "reinforce": ({"policy_loss": "reinforce", "minibatches": 1}, Aggregation("token_mean", policy=0.5)),
    "kl": ({"kl": KL}, Aggregation()),
    "observations": ({"observation": {"loss": "cross_entropy"}}, Aggregation(observations=0.3)),
    "clipped_mae": ({"observation": {"loss": "clipped_mae", "bound": 0.2}}, Aggregation(observations=0.3)),
    "critic": ({"advantage": "gae", "critic": "shared", "kl": KL}, Aggregation()),
}
PACKINGS = [(slice(None), Shape(30, 1)), (slice(None, None, -1), Shape(12, 2)), (slice(None), Shape(10, 5))]


@pytest.fixture(scope="module")
def compiled():
    """Per algorithm, once for all packings and poisons."""
    found = {}

    def get(name):
        if name not in found:
            algorithm = AlgorithmConfig(**CASES[name][0])
            found[name] = jax.jit(contribution(objective.policy(Bigram(algorithm.critic), algorithm)))  # type: ignore[arg-type]
        return found[name]

    return get


def summed(run, packed):
    return reduce(add, [run(params(), batch)[0] for batch in packed.microbatches])


@pytest.mark.parametrize("name", CASES)
def test_the_objective_is_its_definition_however_it_is_packed(name, compiled):
    """Loss within 1e-6 of the loop in float64 (weights and records are float32), gradients and measures of packings within
    1e-6."""
    settings, aggregation = CASES[name]
    algorithm = AlgorithmConfig(**settings)
    wanted = slow_loss(examples(), algorithm, aggregation)
    found = [summed(compiled(name), pack(examples()[order], shape, aggregation)) for order, shape in PACKINGS]
    for own in found:
        assert float(own.measures["loss"].total) == pytest.approx(wanted, abs=1e-6)
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(found[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert results([own.measures]).keys() == results([found[0].measures]).keys()


@pytest.mark.parametrize(("name", "poison"), itertools.product(CASES, [1e6, np.nan]))
def test_043_masked_entries_change_no_bit(name, poison, compiled):
    aggregation = CASES[name][1]
    (batch,) = pack(examples(), Shape(30, 2), aggregation, keep_tails=True).microbatches
    floats = ("old_logprobs", "reference", "advantages", "returns", "old_values", "weights", "value_weights")
    sick = {field: np.where(batch.mask, getattr(batch, field), poison).astype(np.float32) for field in floats}
    sick["observed_weights"] = np.where(batch.observed, batch.observed_weights, poison).astype(np.float32)
    own, other = (compiled(name)(params(), b)[0] for b in (batch, batch._replace(**sick)))
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_metrics_are_those_of_all_tokens_together(compiled):
    chosen = examples()
    _, aggregation = CASES["critic"]
    numbers = [results([summed(compiled("critic"), pack(chosen, shape, aggregation)).measures]) for _, shape in PACKINGS]
    logs, entropies = [], []
    for own in chosen:
        for t in np.flatnonzero(own.mask):
            table = softmax_logprob(own, t, own.temperature)
            logs.append((table[own.ids[t]] - own.old_logprobs[t], own.advantages[t], table[own.ids[t]] - own.reference[t]))
            entropies.append(-(np.exp(table) * table).sum())
    lr, gain, to_reference = np.array(logs, float).T
    rho = np.exp(lr)
    wanted = {
        "entropy": np.mean(entropies),
        "kl_k1": np.mean(-lr),
        "kl_k2": np.mean(lr**2 / 2),
        "kl_k3": np.mean(rho - 1 - lr),
        "reference_kl": np.mean(np.exp(-to_reference) - 1 + to_reference),
        "ratio_max": rho.max(),
        "ratio_min": rho.min(),
        "effective_sample": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "clipped_low": np.mean((gain < 0) & (rho < 0.8)),
        "clipped_high": np.mean((gain > 0) & (rho > 1.28)),
    }
    for own in numbers:
        assert {name: own[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert 0 < wanted["clipped_low"] < 1
    assert 0 < wanted["clipped_high"] < 1


def test_two_steps_are_a_mean_over_tokens_and_a_mean_over_steps(compiled):
    """Halves of the data as two steps: token means weigh tokens, losses weigh steps; without data nothing is said."""
    run = compiled("ppo")
    start = reducers.start(run(params(), pack(examples(), Shape(30, 2), Aggregation()).microbatches[0])[0].measures)
    parts = [
        reducers.merge(start, summed(run, pack(half, Shape(30, 2), Aggregation())).measures)
        for half in (examples()[:2], examples()[2:])
    ]
    both, alone = results(parts), [results([part]) for part in parts]
    counts = [sum(int(e.mask.sum()) for e in half) for half in (examples()[:2], examples()[2:])]
    assert both["entropy"] == pytest.approx(np.average([a["entropy"] for a in alone], weights=counts))
    assert both["policy_loss"] == pytest.approx(np.mean([a["policy_loss"] for a in alone]))
    assert both["ratio_max"] == max(a["ratio_max"] for a in alone)
    assert both["ratio_min"] == min(a["ratio_min"] for a in alone)
    assert results([start]) == {"loss": 0, "policy_loss": 0}
    assert results([]) == {}
    assert results([{"lr": Last(2.0, 1)}, {"lr": Last(1.0, 0)}]) == {"lr": 2.0}
    assert results([{"lr": Last.start()}]) == {}
