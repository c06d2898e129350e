"""Presets have the numbers that were published: each is said once more here, as the paper or the authors' code has it."""

from __future__ import annotations

import pytest

from common.config import RunConfig
from common.config_algorithm import GSPO_CLIP, PRESETS, AlgorithmConfig
from common.config_cross_policy import CrossPolicyConfig
from common.config_tasks import TasksConfig
from learner.advantages import EPSILON
from learner.losses import LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_BOUND
from learner.selection import SLACK, ZERO
from learner.temporal import Bounds

PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
PUBLISHED = {
    "grpo": {"advantage": "grpo", "std_ddof": 1, "aggregation": "seq_mean_token_mean", **PPO_CLIP},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant", **PPO_CLIP},
    "rloo": {"advantage": "rloo", "policy_loss": "reinforce", "minibatches": 1},
    "reinforce_pp": {"advantage": "reinforce_pp", "normalize": "batch", "gamma": 1.0, **PPO_CLIP},
    "dapo": {"advantage": "grpo", "std_ddof": 1, "aggregation": "token_mean", "kl.where": "none", **HIGHER},
    "gspo": {
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "minibatches": 4,
        "aggregation": "seq_mean_token_mean",
    },
    "erpo": {"advantage": "erpo", "group_size": 8},
    "agentrl": {
        "advantage": "grpo",
        "normalize": "task",
        "dual_clip": 3.0,
        "aggregation": "token_mean",
        "group_size": 8,
        "entropy": 0.0,
        "kl.where": "loss",
        "kl.coefficient": 1e-4,
        "kl.value": "k3",
        **PPO_CLIP,
    },
    "deepswe": {
        "advantage": "rloo",
        "aggregation": "seq_mean_token_sum",
        "compact_filter": True,
        "entropy": 0.0,
        "kl.where": "none",
        **HIGHER,
    },
    "echo": {"observation.loss": "cross_entropy", "observation.coefficient": 0.05, "group_size": 16, **PPO_CLIP},
    "glm5_async": {"policy_loss": "double_sided", "advantage": "dr_grpo", "old_policy": "behaviour", "group_size": 32},
    "glm52_ppo": {"advantage": "gae", "critic": "separate", "group_size": 1, "aggregation": "token_mean"},
    "ppo": {"advantage": "gae", "gamma": 1.0, "gae_lambda": 0.95, "value_clip": 0.2, "normalize": "batch", **PPO_CLIP},
    "ppo_bilevel": {"advantage": "bilevel_gae", "gamma": 1.0, "gamma_turn": 0.95, "gae_lambda": 1.0, "normalize": "batch"},
    "starpo": {
        "advantage": "gae",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "entropy": 1e-3,
        "group_size": 16,
        "kl.where": "loss",
        "kl.coefficient": 1e-3,
        "kl.value": "k1",
        **PPO_CLIP,
    },
    "starpo_s": {"advantage": "gae", "gamma": 1.0, "gae_lambda": 1.0, "kl.where": "none", "entropy": 1e-3, **HIGHER},
}


def test_every_preset_has_its_numbers_here():
    assert set(PUBLISHED) == {file.stem for file in PRESETS.glob("*.toml")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name):
    found = AlgorithmConfig(preset=name)
    for key, value in PUBLISHED[name].items():
        table, _, inner = key.rpartition(".")
        assert getattr(getattr(found, table) if table else found, inner) == value, key


@pytest.mark.parametrize(
    ("preset", "turns", "every"),
    [
        ("webarena", [8, 12, 15], 80),
        ("searchqa", [5, 8, 10], 100),
        ("textcraft", [10, 20, 30], 100),
        ("sciworld", [10, 20, 30], 100),
        ("babyai", [6, 13, 20], 100),
    ],
)
def test_stages_are_those_of_scaling_inter_rl(preset, turns, every):
    domain = {"name": "a", "limits": {"max_turns": 30}}
    stages = RunConfig.model_validate({"domains": [domain], "curriculum": {"kind": "stages", "preset": preset}}).curriculum.stages
    assert (stages.turns, stages.every) == (turns, every)


def test_defaults_are_the_published_numbers():
    """LIMR's threshold, StarPO-S's and RAGEN-2's shares with its code's slack, AgentRL's stale pool, GSPO's bounds, GRPO's
    epsilon, verl's bounds of log-ratios, V-trace's thresholds."""
    assert TasksConfig(sampler="limr").threshold == 0.6
    assert (TasksConfig(select="top_std").kept_share, TasksConfig(select="mass").kept_share) == (0.25, 0.9)
    assert (SLACK, ZERO) == (0.01, 1e-10)
    pool = CrossPolicyConfig(engines=1)
    assert (pool.share, pool.refresh) == (0.25, 25)
    assert GSPO_CLIP == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert (EPSILON, LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_BOUND) == (1e-6, 20, 10)
    assert Bounds() == (1.0, 1.0, 1.0, 1.0)
