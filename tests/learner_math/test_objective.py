"""What a micro-batch contributes: invariances of the loss and its gradient on a small network."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner import objective
from learner.losses import before
from learner.objective import add, build_network, contribution, random_policy
from learner.pack import Aggregation, Shape, pack
from tests.learner_math.build import SPEC, config, example

POLICY = random_policy(SPEC, 1)
SHAPE = Shape(20, 2)


def build(**algorithm):
    run = config(algorithm=algorithm)
    network = build_network(run.model, run.algorithm, SPEC)
    params = network.initial(POLICY)
    params["value_head"]["kernel"] = jnp.asarray(np.random.default_rng(3).normal(0, 0.1, SPEC.hidden_size), jnp.float32)
    return run.algorithm, network, params


def examples(seed=0, count=5):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(4, 9))
        mask = rng.random(n) < 0.5
        mask[0] = False
        names = ("old_logprobs", "advantages", "returns", "old_values")
        floats = {name: np.where(mask, rng.normal(size=n), 0).astype(np.float32) for name in names}
        floats["old_logprobs"] = np.where(mask, floats["old_logprobs"] * 0.1 - 2.8, 0).astype(np.float32)
        out.append(example(f"r{i}", rng.integers(0, SPEC.vocab_size, n), mask, 0.7 + 0.1 * i, **floats))
    return out


class Ppo:
    """With a shared critic and an entropy bonus, compiled once for all tests."""

    def __init__(self):
        self.algorithm, self.network, self.params = build(advantage="gae", critic="shared", entropy=0.01)
        self.contribution = jax.jit(contribution(objective.policy(self.network, self.algorithm)))
        self.score_values = jax.jit(self.network.score_values)
        self.score_logprobs = jax.jit(self.network.score_logprobs)


@pytest.fixture(scope="module")
def ppo():
    return Ppo()


def one_batch(shape=SHAPE):
    (batch,) = pack(examples(), shape, Aggregation()).microbatches
    return batch


def summed(compiled, params, packed):
    total, _ = compiled(params, packed.microbatches[0])
    for batch in packed.microbatches[1:]:
        total = add(total, compiled(params, batch)[0])
    return total


def close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=0), a, b)


def test_047_order_packing_and_micro_batches_change_nothing(ppo):
    own = examples()
    expected = summed(ppo.contribution, ppo.params, pack(own, SHAPE, Aggregation("seq_mean_token_mean")))
    assert float(expected.measures["entropy"].count) == sum(e.mask.sum() for e in own)
    for shuffled, shape in ((own[::-1], SHAPE), (own, Shape(9, 1)), (own[2:] + own[:2], Shape(9, 1))):
        packed = pack(shuffled, shape, Aggregation("seq_mean_token_mean"))
        close(summed(ppo.contribution, ppo.params, packed), expected)


@pytest.mark.parametrize("poison", [1e6, np.nan])
def test_043_masked_entries_change_no_bit(ppo, poison):
    batch = one_batch()
    floats = ("old_logprobs", "reference", "advantages", "returns", "old_values", "weights", "value_weights", "observed_weights")
    sick = {name: np.where(batch.mask, getattr(batch, name), poison).astype(np.float32) for name in floats}
    padding = batch.segment_ids == 0
    assert padding.any()
    sick |= {"ids": np.where(padding, 5, batch.ids), "positions": np.where(padding, 3, batch.positions)}
    sick["temperature"] = np.where(padding, 9.0, batch.temperature).astype(np.float32)
    expected, got = (ppo.contribution(ppo.params, b) for b in (batch, batch._replace(**sick)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_on_policy_the_gradient_is_reinforce_and_the_ratio_1(ppo):
    """∇loss = -Σ w·(A·∇log p + .01·∇H) when the behaviour policy is the policy."""
    batch = one_batch()
    batch = batch._replace(old_logprobs=np.asarray(ppo.score_logprobs(ppo.params, batch)), value_weights=batch.weights * 0)

    def reinforce(params, batch):
        logprobs, entropies, _ = ppo.network.logprobs(params, batch, batch.mask)
        return -jnp.sum(batch.weights * (batch.advantages * logprobs + 0.01 * entropies))

    own, _ = ppo.contribution(ppo.params, batch)
    close(own.gradient, jax.jit(jax.grad(reinforce))(ppo.params, batch))
    assert float(own.measures["ratio_max"].value) == pytest.approx(1, abs=1e-6)
    for name in ("kl_k1", "kl_k2", "kl_k3", "clipped_low", "clipped_high"):
        assert own.measures[name].result() == pytest.approx(0, abs=1e-5)


def test_063_logprobs_do_not_know_their_neighbours(ppo):
    own = examples(count=3)

    def logprobs(chosen, shape):
        packed = pack([own[i] for i in chosen], shape, Aggregation(), keep_tails=True)
        found = packed.read([np.asarray(ppo.score_logprobs(ppo.params, batch)) for batch in packed.microbatches])
        return dict(zip(chosen, found, strict=True))

    alone = {i: logprobs([i], SHAPE)[i] for i in range(3)}
    for chosen, shape in (((0, 1, 2), SHAPE), ((2, 1, 0), SHAPE), ((1, 0, 2), Shape(40, 1)), ((0, 2, 1), Shape(40, 1))):
        for i, found in logprobs(chosen, shape).items():
            np.testing.assert_allclose(found, alone[i], atol=1e-5)
            assert (found[~own[i].mask] == 0).all()


def test_059_values_are_not_divided_by_the_temperature(ppo):
    batch = one_batch()
    values, after = ppo.score_values(ppo.params, batch)
    hot, _ = ppo.score_values(ppo.params, batch._replace(temperature=batch.temperature * 3))
    np.testing.assert_array_equal(values, hot)
    np.testing.assert_array_equal(values, before(after))


def test_values_are_trained_on_sampled_tokens_alone(ppo):
    """With old value = value nothing is clipped: ½·mean (v - R)² over trained tokens; its slope in the bias is the mean error."""
    batch = one_batch()
    values = np.asarray(ppo.score_values(ppo.params, batch)[0])
    own, _ = ppo.contribution(ppo.params, batch._replace(old_values=values))
    errors = (values - batch.returns)[batch.mask]
    np.testing.assert_allclose(own.measures["value_loss"].total, 0.5 * np.square(errors).mean(), rtol=1e-4)
    np.testing.assert_allclose(own.gradient["value_head"]["bias"], 0.5 * errors.mean(), atol=1e-5)  # coefficient .5
    assert own.measures["value_clipped"].result() == 0


def test_a_separate_critic_leaves_the_policy_alone_and_a_shared_one_does_not(ppo):
    """Without a policy loss only the value loss pulls."""
    algorithm, network, params = build(advantage="gae", critic="separate")
    separate = jax.jit(contribution(objective.policy(network, algorithm)))
    batch = one_batch()
    batch = batch._replace(weights=batch.weights * 0)
    for (own, _), pulled in (
        (separate(params, batch), {"critic", "value_head"}),
        (ppo.contribution(ppo.params, batch), {"policy", "value_head"}),
    ):
        assert {
            name for name, tree in own.gradient.items() if any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(tree))
        } == pulled
