"""What the objective counts as a token: metrics and logprobs of the policy's own, whatever else the network was asked about."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config_algorithm import AlgorithmConfig
from learner import objective
from learner.objective import contribution
from learner.pack import Aggregation, Shape, pack
from tests.learner_math.build import example
from tests.learner_math.test_objective_terms import WORDS, Bigram, examples, params, softmax_logprob

pytestmark = pytest.mark.usefixtures("x64")


def one_batch(own, aggregation=Aggregation(observations=0.3)):
    (batch,) = pack(own, Shape(30, 2), aggregation, keep_tails=True).microbatches
    return batch


def contributed(batch, **algorithm):
    """Measures and logprobs, without compiling."""
    chosen = AlgorithmConfig(**algorithm)
    found, logprobs = contribution(objective.policy(Bigram(chosen.critic), chosen))(params(), batch)  # type: ignore[arg-type]
    return found.measures, np.asarray(logprobs)


@pytest.mark.parametrize("loss", ["cross_entropy", "clipped_mae"])
def test_057_observed_tokens_are_in_no_metric_of_the_policy(loss):
    """The network is asked about them too; entropy, ratios and logprobs are those of sampled tokens, and their own loss is a mean
    over them alone."""
    own = examples()
    batch = one_batch(own)
    measures, logprobs = contributed(batch, observation={"loss": loss})
    assert (batch.observed & ~batch.mask).any()
    assert (logprobs[~batch.mask] == 0).all()
    assert (logprobs[batch.mask] < 0).all()
    tables = [softmax_logprob(e, t, e.temperature) for e in own for t in np.flatnonzero(e.mask)]
    assert measures["entropy"].result() == pytest.approx(np.mean([-(np.exp(x) * x).sum() for x in tables]), abs=1e-6)
    plain, _ = contributed(batch)
    for name in ("entropy", "kl_k1", "kl_k2", "kl_k3", "ratio_max", "ratio_min", "effective_sample", "clipped_low"):
        assert measures[name].result() == plain[name].result(), name
    told = np.array([softmax_logprob(e, t, 1.0)[e.ids[t]] for e in own for t in np.flatnonzero(e.observed)])
    errors = -told if loss == "cross_entropy" else 1 - np.minimum(np.exp(told), 0.2)
    assert measures["observation_loss"].result() == pytest.approx(errors.mean(), abs=1e-6)


@pytest.mark.parametrize("shift", [0.5, -0.5])
@pytest.mark.parametrize("policy_loss", ["ppo", "double_sided", "cispo", "reinforce"])
def test_extremes_and_shares_of_ratios_are_over_sampled_tokens(policy_loss, shift):
    """All ratios are e^shift; a token that was not sampled has 1, which would be the smallest, or the largest."""
    own = examples()
    for e in own:
        found = [softmax_logprob(e, t, e.temperature)[e.ids[t]] for t in np.flatnonzero(e.mask)]
        e.old_logprobs[e.mask] = np.asarray(found) - shift
    measures, _ = contributed(one_batch(own), policy_loss=policy_loss, minibatches=1)
    for name in ("ratio_max", "ratio_min"):
        assert measures[name].result() == pytest.approx(np.exp(shift), rel=1e-6), name
    assert measures["effective_sample"].result() == pytest.approx(1, abs=1e-6)
    bad = np.mean([e.advantages[t] < 0 for e in own for t in np.flatnonzero(e.mask)])
    low, high = (0.0, 1 - bad if policy_loss == "ppo" else 1.0) if shift > 0 else (bad if policy_loss == "ppo" else 1.0, 0.0)
    assert 0 < bad < 1
    if policy_loss == "reinforce":  # clips nothing
        assert not {"clipped_low", "clipped_high"} & measures.keys()
        return
    assert (measures["clipped_low"].result(), measures["clipped_high"].result()) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("target", "loss", "slope"), [(1.0, 0.045, 0.0), (0.0, 0.405, 0.9)])
def test_058_the_clipped_share_is_of_the_unclipped_change(target, loss, slope):
    """Old value .5, new one .9, clip .2: clipped, whether the loss has a slope or not. With a clip of .5 it is not; a clip of 0
    is none."""

    class Known(Bigram):
        def values(self, params, batch, hidden):
            return jnp.zeros(batch.ids.shape) + params["value"][0]

    own = example("a", [1, 2, 3], [False, True, True], 1.0, old_values=np.full(3, 0.5), returns=np.full(3, target))
    batch = one_batch([own], Aggregation())
    weights = {"table": jnp.zeros((WORDS, WORDS)), "value": jnp.full(1, 0.9)}
    for clip, share in ((0.2, 1.0), (0.5, 0.0), (0.0, 0.0)):
        chosen = AlgorithmConfig(advantage="gae", critic="shared", value_clip=clip, value_coefficient=1.0)
        found, _ = contribution(objective.policy(Known("shared"), chosen))(weights, batch)  # type: ignore[arg-type]
        assert found.measures["value_clipped"].result() == share
        if clip == 0.2:
            assert found.measures["value_loss"].total == pytest.approx(loss, rel=1e-6)
            np.testing.assert_allclose(found.gradient["value"], [slope], atol=1e-6)


def test_a_separate_pass_for_single_tokens_reads_nothing_outside_of_the_mask():
    """What a replay prints: losses of single tokens, which add up to the policy's loss."""
    batch = one_batch(examples(), Aggregation())
    chosen = AlgorithmConfig()
    run = jax.jit(objective.token_losses(Bigram(), chosen))  # type: ignore[arg-type]
    losses, logprobs = run(params(), batch)
    measures, own = contributed(batch)
    np.testing.assert_allclose(np.asarray(losses).sum(), measures["policy_loss"].total, rtol=1e-6)
    np.testing.assert_allclose(logprobs, own, rtol=1e-6)
    sick = {
        name: np.where(batch.mask, getattr(batch, name), np.nan).astype(np.float32)
        for name in ("weights", "advantages", "old_logprobs")
    }
    assert np.asarray(run(params(), batch._replace(**sick))[0]).tobytes() == np.asarray(losses).tobytes()
    assert (np.asarray(losses)[~batch.mask] == 0).all()


def test_038_a_group_of_equal_rewards_still_pays_the_kl():
    """Advantages of 0: no policy loss, but its tokens are in the denominator and the penalty pulls them to the reference."""
    own = examples()
    for e in own:
        e.advantages[:] = 0
    penalty = {"where": "loss", "coefficient": 0.5, "value": "k2", "gradient": "k2"}
    found, _ = contribution(objective.policy(Bigram(), AlgorithmConfig(kl=penalty)))(  # type: ignore[arg-type]
        params(), one_batch(own, Aggregation())
    )
    logs = [softmax_logprob(e, t, e.temperature)[e.ids[t]] - e.reference[t] for e in own for t in np.flatnonzero(e.mask)]
    assert found.measures["policy_loss"].total == 0
    assert found.measures["loss"].total == pytest.approx(0.5 * np.mean(np.square(logs) / 2), rel=1e-5)
    assert np.abs(found.gradient["table"]).max() > 1e-3
