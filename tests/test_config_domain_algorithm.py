"""`[domains.algorithm]`: what a domain's keys, its preset and the run's keys make together, and what is refused."""

from __future__ import annotations

import pytest

from common.cli import ConfigError, dump_toml, load
from common.config_algorithm import PRESETS, RUN_WIDE, AlgorithmConfig

HEAD = '[[domains]]\nname = "frozenlake"\n[[domains]]\nname = "arithmetic"\n'


@pytest.fixture
def run(tmp_path):
    """Lines of [algorithm] and of arithmetic's own -> the configuration, which has also been written and read back."""

    def made(whole="", own="", *overrides):
        path, again = tmp_path / "run.toml", tmp_path / "again.toml"
        path.write_text(f"{HEAD}[domains.algorithm]\n{own}\n[algorithm]\n{whole}\n")
        found = load(path, list(overrides))
        again.write_text(dump_toml(found))
        assert load(again) == found
        assert load(again).algorithms == found.algorithms
        return found

    return made


def values(algorithm, *names):
    return tuple(getattr(algorithm, name) for name in names)


def test_a_domain_that_says_nothing_has_the_runs_algorithm(run):
    found = run('preset = "dapo"\nclip_low = 0.1')
    assert found.algorithms == dict.fromkeys(("frozenlake", "arithmetic"), found.algorithm)


def test_single_keys_differ_from_the_runs(run):
    whole = 'preset = "agentrl"\nentropy = 0.01'
    found = run(whole, "clip_low = 0.05\nkl = { coefficient = 0.5 }", "--domains.1.algorithm.entropy=0.02").algorithms
    run_alone, own = found["frozenlake"], found["arithmetic"]
    assert run_alone == run(whole).algorithm
    assert values(own, "preset", "clip_low", "clip_high", "dual_clip", "entropy") == ("", 0.05, 0.2, 3.0, 0.02)
    assert values(own, "normalize", "aggregation") == ("task", "token_mean")
    assert values(own.kl, "where", "coefficient", "value") == ("loss", 0.5, "k3")


def test_a_domains_preset_takes_the_place_of_the_runs_keys_and_own_keys_count_before_it(run):
    whole = "entropy = 0.5\nclip_low = 0.01\ngroup_size = 4\nminibatches = 1\nkl = { where = 'loss' }"
    own = run(whole, 'preset = "rloo"\ncorrection_high = 3.0').algorithms["arithmetic"]
    assert values(own, "preset", "advantage", "policy_loss", "correction") == ("rloo", "rloo", "reinforce", "truncated")
    assert values(own, "entropy", "clip_low", "kl") == (0.0, 0.2, AlgorithmConfig().kl)
    assert values(own, "correction_high", "group_size", "minibatches") == (3.0, 4, 1)


@pytest.mark.parametrize("preset", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_every_preset_in_a_domain_is_that_preset_but_for_what_is_the_runs(preset, run):
    alone = AlgorithmConfig(preset=preset)
    whole = "groups_per_update = 8\ngroup_size = 3\nminibatches = 1\n"
    whole += 'critic = "separate"\ncritic_warmup = 2' if alone.critic != "none" else ""
    own = run(whole, f'preset = "{preset}"').algorithms["arithmetic"]
    wide = {"groups_per_update": 8, "group_size": 3, "minibatches": 1, "critic_warmup": 2 * (alone.critic != "none")}
    assert own == alone.model_copy(update=wide)


def test_a_critic_is_the_runs_and_for_those_that_need_one(run):
    """GRPO beside PPO: the critic and its warm-up, the loss of the critic only where it is."""
    whole = 'critic = "shared"\ncritic_warmup = 5'
    found = run(whole, 'preset = "ppo"\nvalue_coefficient = 1.0').algorithms
    assert values(found["frozenlake"], "advantage", "critic", "critic_warmup") == ("grpo", "none", 0)
    assert values(found["arithmetic"], "advantage", "critic", "critic_warmup", "value_coefficient") == ("gae", "shared", 5, 1.0)
    found = run(f'advantage = "gae"\ngae_lambda = 0.5\nnormalize = "batch"\n{whole}', 'advantage = "rloo"').algorithms
    assert values(found["arithmetic"], "critic", "critic_warmup", "gae_lambda", "normalize") == ("none", 0, 0.95, "batch")


def test_settings_stay_with_the_choice_that_they_are_of(run):
    """Bounds of tokens are none of sequences, and the other way round; a divisor is of one aggregation."""
    tokens, sequences = "clip_low = 0.1\nclip_high = 0.15\ndual_clip = 2.0", 'preset = "gspo"\nminibatches = 1'
    names = ("policy_loss", "clip_low", "clip_high", "dual_clip")
    assert values(run(tokens, 'policy_loss = "gspo"').algorithms["arithmetic"], *names) == ("gspo", 3e-4, 4e-4, 0.0)
    assert values(run(sequences, 'policy_loss = "ppo"').algorithms["arithmetic"], *names) == ("ppo", 0.2, 0.28, 0.0)
    assert values(run(tokens, 'policy_loss = "ppo"').algorithms["arithmetic"], *names) == ("ppo", 0.1, 0.15, 2.0)
    whole = (
        'aggregation = "constant"\nconstant_divisor = 9.0\nold_policy = "proximal"\ncorrection = "masked"\ncorrection_low = 0.5'
    )
    own = run(whole, 'aggregation = "token_mean"\ncorrection = "importance"').algorithms["arithmetic"]
    assert values(own, "constant_divisor", "old_policy", "correction_low") == (0.0, "proximal", 0.0)
    whole = "kl = { where = 'loss', coefficient = 0.3 }\nobservation = { loss = 'clipped_mae', bound = 0.5, coefficient = 0.3 }"
    own = run(whole, "kl = { where = 'none' }\nobservation = { loss = 'cross_entropy' }").algorithms["arithmetic"]
    assert (own.kl, own.observation.coefficient) == (AlgorithmConfig().kl, 0.05)


CRITIC = 'critic = "shared"'
REFUSED = {
    "an unknown preset": ("", 'preset = "gpro"', "domains.arithmetic.algorithm: algorithm.preset 'gpro' is not known; there are"),
    "an unknown key": ("", "advantge = 'rloo'", "unknown key domains.1.algorithm.advantge; did you mean 'advantage'?"),
    "a typo in a table": ("", "kl = { were = 'loss' }", "unknown key domains.1.algorithm.kl.were; did you mean 'where'?"),
    "a type": ("", "clip_low = 'many'", "domains.1.algorithm.clip_low = 'many': Input should be a valid number"),
    "what the run's keys do not go with": (
        "",
        "gamma = 0.9",
        "domain 'arithmetic': algorithm.gamma = 0.9 is for credit over time, grpo gives none",
    ),
    "PPO without the run's critic": (
        "",
        'preset = "ppo"',
        "domain 'arithmetic': algorithm.advantage = \"gae\" needs a critic: set algorithm.critic to",
    ),
    "a critic that no domain has": (CRITIC, 'preset = "rloo"\npolicy_loss = "ppo"', "grpo and rloo has no critic: set critic"),
    "a group of one": (
        'advantage = "gae"\ngroup_size = 1\n' + CRITIC,
        'preset = "dapo"',
        "domain 'arithmetic': algorithm.group_size must be at least 2 for grpo",
    ),
    "steps without a ratio": ("", 'preset = "rloo"', "domain 'arithmetic': algorithm.policy_loss = \"reinforce\" has no ratio"),
    "off-policy without a correction": (
        "",
        'old_policy = "proximal"',
        'domains.arithmetic.algorithm.old_policy = "proximal" with learner.max_lag 2 trains on tokens of older policies',
    ),
    "two references": (
        "kl = { where = 'loss' }",
        "kl = { reference = '/models/r' }",
        "algorithm.kl.reference is '/models/r' and 'initial' in different domains",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_in_a_domain_is_refused_with_the_reason(name, run):
    whole, own, told = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        run(whole, own)
    assert told in str(error.value)


@pytest.mark.parametrize("key", RUN_WIDE)
def test_what_is_the_whole_runs_cannot_be_one_domains(key, run):
    value = {"critic": "none", "zero_advantages": True}.get(key, 1)
    with pytest.raises(ConfigError) as error:
        run("", "", f"--domains.1.algorithm.{key}={str(value).lower()}")
    assert f"domains.arithmetic.algorithm: {key} = {value!r} cannot be one domain's, since" in str(error.value)
    assert f"set algorithm.{key}" in str(error.value)


def test_a_run_whose_own_algorithm_no_domain_has_may_have_any(run):
    """Off-policy as it stands, but both domains have another loss."""
    whole = 'policy_loss = "reinforce"\nminibatches = 1'
    overrides = [f"--domains.{i}.algorithm.preset=dapo" for i in range(2)]
    assert {own.policy_loss for own in run(whole, "", *overrides).algorithms.values()} == {"ppo"}
    with pytest.raises(ConfigError, match=r'algorithm.policy_loss = "reinforce" with learner.max_lag 2'):
        run(whole, 'preset = "dapo"')
