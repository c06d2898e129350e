"""What leaves the trainer and what comes back from engines: the canary of published weights, and the gap to what engines say."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from common.types import VersionRun
from learner.model import hf
from learner.update import Trainer
from tests.learner_math.build import SPEC, batch, config, with_behaviour


def test_the_canary_is_that_of_the_published_weights(tmp_path):
    """What the saved file says, read back and computed by a model of its own."""
    trainer = Trainer(config(), SPEC)
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    tensors, found = trainer.snapshot(ids)
    hf.write(tensors, SPEC, tmp_path, None)
    spec, state = hf.load(tmp_path)
    model = hf.build(spec, state)
    row = jnp.arange(len(ids))[None]
    logits = np.asarray(model.logits(model(ids[None], row, jnp.ones_like(row))[0]), np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    wanted = [0.0, *(logprobs[i - 1, ids[i]] for i in range(1, len(ids)))]
    np.testing.assert_allclose(found.logprobs, wanted, atol=1e-5)
    np.testing.assert_allclose(found.last_logits, logits[-1], atol=1e-5)
    assert found.ids.tolist() == ids.tolist()


def test_the_canary_of_bfloat16_weights_is_not_that_of_their_masters():
    """Masters that are bfloat16 already give it, bit for bit; masters that are not, differ from float32's by their rounding."""
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    trainer = Trainer(config(model={"dtype": "bfloat16"}), SPEC)
    found = trainer.snapshot(ids)[1]
    tree = trainer.state_tree()
    rounded = {
        n: np.asarray(jnp.asarray(a).astype(jnp.bfloat16).astype(a.dtype)) if "policy" in n else a for n, a in tree.items()
    }
    assert any((rounded[name] != tree[name]).any() for name in tree)
    trainer.restore_tree(rounded)
    assert trainer.snapshot(ids)[1].logprobs.tobytes() == found.logprobs.tobytes()
    moved = {
        name: a * (1 + 2**-10) if "policy" in name else a for name, a in rounded.items()
    }  # less than half a step of bfloat16
    trainer.restore_tree(moved)
    assert trainer.snapshot(ids)[1].logprobs.tobytes() == found.logprobs.tobytes()


def test_the_gap_is_measured_on_tokens_of_the_present_weights(grpo):
    groups = with_behaviour(grpo, batch())
    old = [with_behaviour(grpo, groups[:1], offset=-0.5)[0], *groups[1:]]
    old[0] = [replace(t, steps=tuple(replace(s, versions=(VersionRun(0, 7, "e", "main"),)) for s in t.steps)) for t in old[0]]
    start = grpo.state_tree()
    assert grpo.policy_update(old, version=1)["gap_max"] < 1e-5
    grpo.restore_tree(start)
    assert grpo.policy_update(old, version=7).get("gap_mean", 0.5) == pytest.approx(0.5, abs=1e-5)
    grpo.restore_tree(start)
    everything = grpo.policy_update(groups, version=3)
    assert everything["gap_tokens"] == 0
    assert "gap_mean" not in everything


def test_the_gap_is_a_mean_a_quantile_and_a_divergence(grpo):
    """k3 by hand: engine 0.1 above the learner, r = exp(-0.1): r - 1 - log r = 0.904837 - 1 + 0.1 = 0.004837."""
    groups = with_behaviour(grpo, batch(), offset=0.1)
    metrics = grpo.policy_update(groups)
    assert metrics["gap_mean"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["gap_p99"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["gap_k3"] == pytest.approx(0.004837, rel=1e-2)


def of_version(groups, version):
    run = (VersionRun(0, version, "e", "main"),)
    return [[replace(t, steps=tuple(replace(s, versions=run) for s in t.steps)) for t in group] for group in groups]


def test_the_gap_of_older_tokens_is_taken_under_the_weights_that_sampled_them():
    """With max_lag 2 the three newest policies are known; what was sampled by the one before is not compared with another."""
    trainer = Trainer(config(learner={"max_lag": 2}, optimizer={"lr": 0.05}), SPEC)
    sampled = {}
    for version in (1, 2, 3, 4):
        trainer.published(version)
        sampled[version] = of_version(with_behaviour(trainer, batch(), offset=0.01 * version), version)
        trainer.policy_update(with_behaviour(trainer, batch(version)), version=version)
    trainer.published(5)
    moved = trainer.policy_update(sampled[4], version=-1)["gap_mean"]  # against the present policy: they have moved apart
    assert moved > 0.1
    for version in (4, 3):
        metrics = trainer.policy_update(sampled[version], version=5)
        assert metrics["gap_mean"] == pytest.approx(0.01 * version, rel=1e-3)
        assert metrics["gap_tokens"] > 0
    assert trainer.policy_update(sampled[2], version=5)["gap_tokens"] == 0


def test_the_gap_can_be_left_to_the_newest_version():
    trainer = Trainer(config(learner={"max_lag": 2, "gap": "newest"}), SPEC)
    trainer.published(1)
    old = of_version(with_behaviour(trainer, batch()), 1)
    assert trainer.policy_update(old, version=1)["gap_tokens"] > 0
    trainer.published(2)
    assert trainer.policy_update(old, version=2)["gap_tokens"] == 0
