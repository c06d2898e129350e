"""Every key that something else makes meaningless is refused by name, and taken where it counts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.config_algorithm import COMPARING, CRITICAL, AlgorithmConfig, KlConfig, ObservationConfig, for_domain
from common.config_tasks import CurriculumConfig, TasksConfig

GAE: dict[str, Any] = {"advantage": "gae", "critic": "shared"}
VTRACE = {"advantage": "vtrace", "critic": "shared", "old_policy": "proximal"}
PROXIMAL = {"old_policy": "proximal", "correction": "masked"}
STAGES = {"kind": "stages", "turns": [2, 4], "every": 5}

# table, keys with values that are no defaults, where they are ignored (settings, and what the refusal says they are for), where
# they count
KEYS: list[tuple[type, dict[str, Any], list[tuple[dict[str, Any], str]], list[dict[str, Any]]]] = [
    (
        KlConfig,
        {"coefficient": 0.5, "gradient": "k3", "reference": "/a/model"},
        [({}, 'where = "reward" or "loss"')],
        [{"where": "loss"}],
    ),
    (KlConfig, {"value": "k3"}, [({}, 'where = "reward" or "loss"')], [{"where": "loss"}]),
    (KlConfig, {"gradient": "k3"}, [({"where": "reward"}, "a reward has no gradient")], [{"where": "loss"}]),
    (KlConfig, {"coefficient": 0.5, "reference": "/a/model"}, [], [{"where": "reward"}]),
    (
        ObservationConfig,
        {"coefficient": 0.5, "decay_steps": 9},
        [({}, "a loss on observations")],
        [{"loss": "cross_entropy"}, {"loss": "clipped_mae"}],
    ),
    (
        ObservationConfig,
        {"bound": 0.3},
        [({}, "a loss on observations"), ({"loss": "cross_entropy"}, 'loss = "clipped_mae"')],
        [{"loss": "clipped_mae"}],
    ),
    (
        AlgorithmConfig,
        {"gae_lambda": 0.9, "value_coefficient": 0.4, "value_clip": 0.1, "critic_warmup": 3, "bootstrap_truncated": False},
        [({"advantage": name}, f"an advantage with a critic, {name} has none") for name in (*COMPARING, "reinforce_pp")],
        [{"advantage": name, "critic": "separate"} for name in ("gae", "bilevel_gae", "step_gae")] + [VTRACE],
    ),
    (
        AlgorithmConfig,
        {"gamma": 0.9},
        [({"advantage": name}, f"credit over time, {name} gives none") for name in COMPARING if name != "gigpo"],
        [GAE, VTRACE, {"advantage": "reinforce_pp"}, {"advantage": "gigpo"}],
    ),
    (
        AlgorithmConfig,
        {"std_ddof": 0},
        [({"advantage": name}, f"{name} does not divide by that std") for name in ("rloo", "dr_grpo", "reinforce_pp", "gigpo")],
        [{"advantage": "grpo"}, {"advantage": "erpo"}],
    ),
    (
        AlgorithmConfig,
        {"step_weight": 2.0, "step_std": True},
        [({}, 'advantage = "gigpo"'), (GAE, 'advantage = "gigpo"')],
        [{"advantage": "gigpo"}],
    ),
    (
        AlgorithmConfig,
        {"gamma_turn": 0.5},
        [({}, 'advantage = "bilevel_gae"'), (GAE, 'advantage = "bilevel_gae"')],
        [{**GAE, "advantage": "bilevel_gae"}],
    ),
    (
        AlgorithmConfig,
        {"vtrace_rho": 2.0, "vtrace_c": 2.0, "vtrace_policy": 2.0},
        [({}, 'advantage = "vtrace"'), (GAE, 'advantage = "vtrace"')],
        [VTRACE],
    ),
    (
        AlgorithmConfig,
        {"clip_low": 0.1, "clip_high": 0.15},
        [({"policy_loss": "reinforce", "minibatches": 1}, "a loss that clips, reinforce does not")],
        [{"policy_loss": name} for name in ("ppo", "cispo", "double_sided")],
    ),
    (
        AlgorithmConfig,
        {"correction_low": 0.5, "correction_high": 4.0},
        [({}, "a correction with bounds"), ({**PROXIMAL, "correction": "importance"}, "a correction with bounds")],
        [
            {**PROXIMAL, "correction": name}
            for name in ("truncated", "truncated_sequence", "masked", "rejected", "rejected_sequence")
        ],
    ),
    (TasksConfig, {"decay": 0.5}, [({}, "variance"), ({"sampler": "limr"}, "variance")], [{"sampler": "variance"}]),
    (
        TasksConfig,
        {"threshold": 0.2, "visits": 3},
        [({}, 'sampler = "limr"'), ({"sampler": "variance"}, 'sampler = "limr"')],
        [{"sampler": "limr"}],
    ),
    (TasksConfig, {"floor": 0.5}, [({}, '"variance" or "limr"')], [{"sampler": "variance"}, {"sampler": "limr"}]),
    (
        TasksConfig,
        {"share": 0.5},
        [({}, '"top_std" or "mass"'), ({"select": "signal"}, '"top_std" or "mass"')],
        [{"select": "top_std"}, {"select": "mass"}],
    ),
    (TasksConfig, {"form": "softmax"}, [({"select": "top_std"}, 'select = "mass"')], [{"select": "mass"}]),
    (
        TasksConfig,
        {"include_zero": True},
        [({}, 'form = "linear" or "softmax"'), ({"select": "mass"}, 'form = "linear" or "softmax"')],
        [{"select": "mass", "form": "linear"}, {"select": "mass", "form": "softmax"}],
    ),
    (
        TasksConfig,
        {"max_refills": 2},
        [({}, '"signal" or "mass"'), ({"select": "top_std"}, '"signal" or "mass"')],
        [{"select": "signal"}, {"select": "mass"}],
    ),
    (CurriculumConfig, {"preset": "babyai"}, [({"kind": "success", "turns": [2, 4]}, 'kind = "stages"')], [{"kind": "stages"}]),
    (CurriculumConfig, {"every": 7}, [({"kind": "success", "turns": [2, 4]}, 'kind = "stages"')], [STAGES]),
    (
        CurriculumConfig,
        {"mastered": 0.5, "window": 9},
        [(STAGES, 'kind = "success"'), ({}, 'kind = "success"')],
        [{"kind": "success", "turns": [2, 4]}],
    ),
    (CurriculumConfig, {"turns": [3, 6]}, [({}, '"stages" or "success"')], [STAGES, {"kind": "success"}]),
    (
        CurriculumConfig,
        {"turns": [3, 6], "every": 7},
        [({"kind": "stages", "preset": "babyai"}, 'stages without preset = "babyai"')],
        [{"kind": "stages"}],
    ),
]

IGNORED = [
    (table, {**settings, key: value}, key, told)
    for table, keys, off, _ in KEYS
    for key, value in keys.items()
    for settings, told in off
]
COUNTED = [(table, {**settings, **keys}) for table, keys, _, on in KEYS for settings in on]


@pytest.mark.parametrize(("table", "settings", "key", "told"), IGNORED)
def test_a_key_that_would_be_ignored_is_refused_by_name(table, settings, key, told):
    with pytest.raises(ValidationError) as error:
        table(**settings)
    said = str(error.value)
    assert f".{key} = {settings[key]!r} is for " in said
    assert told in said


@pytest.mark.parametrize(("table", "settings"), COUNTED)
def test_a_key_is_taken_where_it_counts(table, settings):
    found = table(**settings)
    for key, value in settings.items():
        assert getattr(found, key) == value


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{name} without a critic": ({"advantage": name}, f'"{name}" needs a critic') for name in CRITICAL},
    **{f"{name} alone": ({"advantage": name, "group_size": 1}, f"at least 2 for {name}") for name in COMPARING},
    "gspo's lower bound": ({"policy_loss": "gspo", "clip_low": 0.2}, "clip_low 0.2 and clip_high 0.0004 are bounds of one token"),
    "gspo's upper bound": ({"policy_loss": "gspo", "clip_high": 0.2}, "clip_low 0.0003 and clip_high 0.2 are bounds of one"),
    **{
        f"dual clip of {name}": ({"policy_loss": name, "dual_clip": 3}, f'not "{name}": leave it out')
        for name in ("cispo", "double_sided")
    },
    "a dual clip at the bound": ({"dual_clip": 1.28, "clip_high": 0.28}, "dual_clip 1.28 must exceed 1 + clip_high 0.28"),
    "epochs without a ratio": ({"policy_loss": "reinforce", "minibatches": 1, "epochs": 2}, "minibatches 1 x epochs 2"),
    "a divisor of nothing": ({"constant_divisor": 8}, 'goes with aggregation = "constant", and only with it'),
    "minibatches of nothing": ({"minibatches": 5, "groups_per_update": 4}, "minibatches 5 exceeds groups_per_update 4"),
    "a cache without a limit": ({"overlong_cache": 4}, "overlong_cache 4 goes with algorithm.overlong_limit 0"),
    "equal bounds": ({**PROXIMAL, "correction_low": 2.0, "correction_high": 2.0}, "correction_low 2.0 must be below"),
    "any correction of one policy": ({"correction": "truncated"}, "they are the same"),
    "a masked proximal ratio": ({"policy_loss": "double_sided", "old_policy": "proximal"}, "masks by the ratio to what sampled"),
    "an unknown preset": ({"preset": "nothing"}, "algorithm.preset 'nothing' is not known; there are agentrl, dapo, deepswe"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_go_together_is_refused(name):
    settings, told = WRONG[name]
    with pytest.raises(ValidationError) as error:
        AlgorithmConfig(**settings)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        {"policy_loss": "gspo", "dual_clip": 10.0},
        {"dual_clip": 1.3, "clip_high": 0.28},
        {"overlong_limit": 4, "overlong_cache": 4},
        {"minibatches": 4, "groups_per_update": 4},
        {"advantage": "gae", "critic": "shared", "group_size": 1},
        {"advantage": "reinforce_pp", "group_size": 1},
        {"advantage": "gigpo", "kl": {"where": "loss"}},
        {"advantage": "grpo", "kl": {"where": "reward"}},
    ],
)
def test_borders_are_taken(settings):
    AlgorithmConfig(**settings)


def test_what_is_said_beside_a_preset_counts_and_what_is_not_comes_from_it():
    """Also inside tables, and in both directions: a table that only the preset has, one that only the settings have."""
    both = AlgorithmConfig(preset="echo", observation={"coefficient": 0.005}, kl={"where": "loss"}, clip_high=0.3)
    assert (both.observation.loss, both.observation.coefficient) == ("cross_entropy", 0.005)
    assert (both.kl.where, both.clip_low, both.clip_high, both.group_size) == ("loss", 0.2, 0.3, 16)
    assert AlgorithmConfig(preset="agentrl").kl.coefficient == 1e-4
    assert AlgorithmConfig(preset="agentrl", dual_clip=4).dual_clip == 4
    gspo = AlgorithmConfig(preset="grpo", clip_low=3e-4, clip_high=4e-4, policy_loss="gspo")
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
    assert AlgorithmConfig(preset="gspo", clip_low=1e-3).clip_high == 4e-4
    beside = AlgorithmConfig(preset="grpo", policy_loss="gspo")  # whose clips of .2 are of one token
    assert (beside.clip_low, beside.clip_high, beside.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
    for loss in ("ppo", "cispo"):  # whose clips are of one token, which GSPO's of 3e-4 and 4e-4 are not
        tokens = AlgorithmConfig(preset="gspo", policy_loss=loss)
        of_a_domain = for_domain(AlgorithmConfig(), {"preset": "gspo", "policy_loss": loss})
        for found in (tokens, of_a_domain):
            assert (found.clip_low, found.clip_high) == (AlgorithmConfig().clip_low, AlgorithmConfig().clip_high)
    assert AlgorithmConfig(preset="gspo", policy_loss="gspo").clip_high == 4e-4
    assert AlgorithmConfig(preset="agentrl", kl={"where": "none"}).kl == KlConfig()
    assert AlgorithmConfig(preset="agentrl", kl={"coefficient": 0.5}).kl.where == "loss"
    assert AlgorithmConfig(preset="dr_grpo", aggregation="token_mean").constant_divisor == 0
    again = AlgorithmConfig.model_validate(both.model_dump())
    assert again == both


def test_a_table_that_is_none_is_refused_as_any():
    with pytest.raises(ValidationError, match="valid dictionary"):
        AlgorithmConfig.model_validate("dapo")
