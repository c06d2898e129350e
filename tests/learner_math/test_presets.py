"""Every published algorithm, and every part that a trainer adds to one, through whole updates of a small model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.config_algorithm import PRESETS, AlgorithmConfig
from common.types import Status
from learner.credit import _over_time
from learner.model import hf
from learner.report import Report
from learner.update import Trainer
from tests.learner_math.build import SPEC, batch, chain, config, random_rollout, rollout, with_behaviour

SIZES = {"groups_per_update": 4, "minibatches": 1, "critic_warmup": 0}


def preset(name, **more):
    algorithm = AlgorithmConfig(preset=name)
    sizes = SIZES if algorithm.critic != "none" else {k: v for k, v in SIZES.items() if k != "critic_warmup"}
    return config(algorithm={"preset": name, **sizes, **more}, learner={"max_lag": 2})


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_a_preset_makes_an_update(name):
    trainer = Trainer(preset(name), SPEC)
    start = trainer.state_tree()
    groups = with_behaviour(trainer, batch(), offset=0.1)
    metrics = trainer.policy_update(groups)
    assert metrics["optimizer_steps"] == 1
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert metrics["trained_tokens"] == sum(len(s.action_ids) for g in groups for t in g for s in t.steps)
    moved = {n for n, array in trainer.state_tree().items() if array.tobytes() != start[n].tobytes()}
    assert any(n.startswith("params/policy") for n in moved)
    assert any(n.startswith("params/value_head") for n in moved) == (trainer._config.algorithm.critic != "none")
    on_policy = trainer._config.algorithm.old_policy == "proximal"
    assert metrics["ratio_max"] == pytest.approx(1.0 if on_policy else np.exp(-0.1), rel=1e-4)
    if trainer._config.algorithm.correction != "none":
        assert metrics["correction_mean"] == pytest.approx(np.exp(-0.1), rel=1e-4)


class Parts:
    """One trainer with a reference in the loss, a loss on observations and a detached critic that warms up."""

    def __init__(self):
        self.tables = {
            "algorithm": {
                "advantage": "gae",
                "critic": "detached",
                "critic_warmup": 1,
                "minibatches": 1,
                "kl": {"where": "loss", "coefficient": 0.5, "value": "k3"},
                "observation": {"loss": "cross_entropy", "coefficient": 0.1, "decay_steps": 2},
            },
            "optimizer": {"lr": 1e-2},
        }
        self.trainer = Trainer(config(**self.tables), SPEC)
        self.start = self.trainer.state_tree()


@pytest.fixture(scope="module")
def parts():
    return Parts()


def policy_moved(before, after):
    return any(before[n].tobytes() != after[n].tobytes() for n in before if n.startswith("params/policy"))


def scaled(trainer):
    """The aggregation of its only part at its next step."""
    (part,) = trainer._parts
    return part.aggregation(1.0, trainer.step)


def test_a_critic_warms_up_a_reference_stays_and_observations_fade(parts):
    trainer = parts.trainer
    trainer.restore_tree(parts.start)
    groups = with_behaviour(trainer, batch())
    assert scaled(trainer).policy == 0.0
    assert scaled(trainer).observations == pytest.approx(0.1)
    first = trainer.policy_update(groups)
    assert first["policy_loss"] == 0
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    trained = trainer.state_tree()
    assert scaled(trainer).policy == 1.0
    assert scaled(trainer).observations == pytest.approx(0.05)
    second = trainer.policy_update(groups)
    assert second["policy_loss"] != 0
    assert second["reference_kl"] > 0  # observations alone have moved the policy before
    assert scaled(trainer).observations == 0.0
    assert {n for n in trained if n.startswith("reference/")}
    for name, array in trainer.state_tree().items():
        if name.startswith("reference/"):
            assert array.tobytes() == parts.start[name].tobytes() == parts.start[name.replace("reference", "params")].tobytes()


def test_a_resumed_run_has_its_reference_and_a_new_one_begins_with_its_own(parts):
    """What a checkpoint holds, in a trainer that went another way; RL begins: the reference is the policy of that moment."""
    trainer = parts.trainer
    trainer.restore_tree(parts.start)
    groups = with_behaviour(trainer, batch())
    trainer.policy_update(groups)
    saved = trainer.state_tree()
    wanted = trainer.policy_update(groups)
    trainer.forget_moments()
    tree = trainer.state_tree()
    for name in (n for n in tree if n.startswith("reference/")):
        assert tree[name].tobytes() == tree[name.replace("reference", "params")].tobytes() != saved[name].tobytes()
    trainer.restore_tree(saved)
    assert trainer.policy_update(groups) == wanted
    with pytest.raises(ValueError, match="does not fit this configuration: reference/"):
        trainer.restore_tree({n: a for n, a in saved.items() if not n.startswith("reference/")})


def test_a_reference_can_be_a_model(tmp_path):
    """In the reward: against itself the penalty is 0; against another model it changes the advantages."""
    one, other = Trainer(config(), SPEC), Trainer(config(seed=5), SPEC)
    for trainer, name in ((one, "one"), (other, "other")):
        hf.write(trainer.snapshot(np.arange(4))[0], SPEC, tmp_path / name, None)
    groups = with_behaviour(one, batch())

    def penalised(name):
        kl = {"where": "reward", "coefficient": 0.3, "reference": str(tmp_path / name)}
        trainer = Trainer(config(algorithm={"advantage": "dr_grpo", "kl": kl, "minibatches": 1}), SPEC)
        assert not any(n.startswith("reference/") for n in trainer.state_tree())
        return trainer.policy_update(groups)

    plain = Trainer(config(algorithm={"advantage": "dr_grpo", "minibatches": 1}), SPEC).policy_update(groups)
    same, far = penalised("one"), penalised("other")
    assert same["advantage_std/frozenlake"] == pytest.approx(plain["advantage_std/frozenlake"], abs=1e-5)
    assert same["reference_kl"] == pytest.approx(0, abs=1e-5)
    assert far["advantage_std/frozenlake"] != pytest.approx(plain["advantage_std/frozenlake"], abs=1e-3)
    assert abs(far["reference_kl"]) > 1e-3  # k1 of tokens that neither sampled: of either sign
    wide = replace(SPEC, hidden_size=24)
    trainer = Trainer(config(), wide)
    hf.write(trainer.snapshot(np.arange(4))[0], wide, tmp_path / "wide", None)
    with pytest.raises(ValueError, match=r"algorithm\.kl\.reference .* has other sizes than the policy"):
        penalised("wide")


def test_a_detached_critic_leaves_the_trunk_alone(parts):
    """In the warm-up without a loss on observations: the value head moves, nothing else does."""
    tables = parts.tables["algorithm"] | {"observation": {}, "kl": {}, "entropy": 0.0}
    trainer = Trainer(config(algorithm=tables), SPEC)
    head = {n: np.full_like(a, 0.1) for n, a in trainer.state_tree().items() if n.startswith("params/value_head")}
    trainer.restore_tree(trainer.state_tree() | head)
    before = trainer.state_tree()
    assert trainer.policy_update(with_behaviour(trainer, batch()))["optimizer_steps"] == 1
    after = trainer.state_tree()
    assert not policy_moved(before, after)
    assert all(before[n].tobytes() != after[n].tobytes() for n in head)


def test_what_leaves_the_loss_and_what_stays_in_its_group():
    """Compact filtering: of four rollouts one was cut off, with a reward of 1: three are trained on, against a mean of a half."""
    trainer = Trainer(preset("deepswe", advantage="dr_grpo", aggregation="token_mean"), SPEC)
    rng = np.random.default_rng(0)
    group = [rollout(chain([([1], [int(rng.integers(16))], r)]), f"r{i}") for i, r in enumerate((1.0, 1.0, 0.0, 0.0))]
    group[0] = replace(group[0], status=Status.TRUNCATED)
    metrics = trainer.policy_update(with_behaviour(trainer, [group]))
    assert metrics["trained_tokens"] == 3
    assert metrics["policy_loss"] == pytest.approx((-0.5 + 0.5 + 0.5) / 3, abs=1e-5)
    assert metrics["group_reward_std"] == pytest.approx(0.5)


def test_a_batch_of_any_size_is_credited_by_one_program():
    """Rollouts of one to three turns, one to three groups: up to 16 rollouts of up to 16 tokens are one shape."""
    trainer = Trainer(config(algorithm={"advantage": "gae", "critic": "shared", "minibatches": 1}), SPEC)
    before = _over_time._cache_size()
    for size in (1, 2, 3):
        rng = np.random.default_rng(size)
        trainer.prepare([[random_rollout(rng, f"{g}", turns=1 + g)] for g in range(size)], {}, Report())
    assert _over_time._cache_size() - before <= 1
