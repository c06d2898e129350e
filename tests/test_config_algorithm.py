"""`[algorithm]`: presets, what counts before them, and combinations that are refused with the reason."""

from __future__ import annotations

import pytest

from common.cli import ConfigError, dump_toml, load
from common.config_algorithm import COMPARING

MINIMAL = '[[domains]]\nname = "frozenlake"\n[algorithm]\n'
GAE = ["advantage=gae", "critic=shared"]
VTRACE = ["advantage=vtrace", "critic=shared", "old_policy=proximal"]

REFUSED = {
    "an unknown preset": (["preset=gpro"], "algorithm.preset 'gpro' is not known; there are agentrl, dapo"),
    **{
        f"{name} with a critic": ([f"advantage={name}", "critic=shared"], f'{name} has no critic: set critic = "none"')
        for name in (*COMPARING, "reinforce_pp")
    },
    "credit over time without a critic": (["advantage=bilevel_gae"], '"bilevel_gae" needs a critic'),
    "a warm-up of nothing": (["critic_warmup=3"], "algorithm.critic_warmup = 3 is for an advantage with a critic, grpo has none"),
    "a group of one": (
        ["advantage=rloo", "group_size=1"],
        "group_size must be at least 2 for rloo: a group of one has no baseline",
    ),
    "a discount of one outcome": (["gamma=0.9"], "algorithm.gamma = 0.9 is for credit over time, grpo gives none"),
    "a std that is not divided by": (["advantage=rloo", "std_ddof=0"], "std_ddof = 0 is for grpo and erpo"),
    "steps without GiGPO": (["step_weight=2"], 'step_weight = 2.0 is for advantage = "gigpo"'),
    "turns without levels": ([*GAE, "gamma_turn=0.9"], 'gamma_turn = 0.9 is for advantage = "bilevel_gae"'),
    "bounds without V-trace": ([*GAE, "vtrace_c=2"], 'vtrace_c = 2.0 is for advantage = "vtrace"'),
    "half a price of length": (["overlong_limit=9"], "overlong_cache 0 goes with algorithm.overlong_limit 9"),
    "a cache above its limit": (["overlong_limit=9", "overlong_cache=10"], "and is not above it"),
    "clips of a loss without": (
        ["policy_loss=reinforce", "minibatches=1", "clip_low=0.1"],
        "clip_low = 0.1 is for a loss that clips",
    ),
    "a step without a ratio": (
        ["policy_loss=reinforce"],
        "all but the first would be off-policy without a correction; set both to 1",
    ),
    "a token's clip for sequences": (
        ["policy_loss=gspo", "clip_high=0.28"],
        "bounds of one token; gspo's ratio is a mean over a",
    ),
    "dual clip of CISPO": (["policy_loss=cispo", "dual_clip=3"], 'dual_clip is for policy_loss "ppo" or "gspo", not "cispo"'),
    "dual clip inside": (["dual_clip=1.2"], "dual_clip 1.2 must exceed 1 + clip_high 0.28"),
    "a correction of nothing": (["correction=masked"], 'with old_policy = "behaviour" they are the same'),
    "bounds of nothing": (["correction_high=3"], "correction_high = 3.0 is for a correction with bounds"),
    "bounds that cross": (["old_policy=proximal", "correction=masked", "correction_low=3"], "correction_low 3.0 must be below"),
    "a mask of the wrong ratio": (
        ["policy_loss=double_sided", "old_policy=proximal", "correction=masked"],
        "masks by the ratio to what",
    ),
    "V-trace against what sampled": (["advantage=vtrace", "critic=shared"], "would do it twice"),
    "V-trace, corrected": ([*VTRACE, "correction=truncated"], "would weigh V-trace's advantages again"),
    "off-policy without a correction": (
        ["old_policy=proximal"],
        "learner.max_lag 2 trains on tokens of older policies as if its own",
    ),
    "off-policy without a ratio": (
        ["policy_loss=reinforce", "minibatches=1"],
        'policy_loss = "reinforce" with learner.max_lag 2',
    ),
    "a penalty of nothing": (["kl.coefficient=0.1"], 'algorithm.kl.coefficient = 0.1 is for where = "reward" or "loss"'),
    "a reward with a gradient": (["kl.where=reward", "kl.gradient=k3"], "a reward has no gradient"),
    "k3 in the reward": (["kl.where=reward", "kl.value=k3"], "only k1 is right there in its policy gradient"),
    "a KL in the rewards of GiGPO": (["advantage=gigpo", "kl.where=reward"], "compares steps by what the environment paid"),
    "k1's gradient": (["kl.where=loss", "kl.gradient=k1"], "Input should be 'k2' or 'k3'"),
    "observations of nothing": (["observation.coefficient=0.1"], "observation.coefficient = 0.1 is for a loss on observations"),
    "a bound of a cross-entropy": (["observation.loss=cross_entropy", "observation.bound=0.1"], 'is for loss = "clipped_mae"'),
    "a typo in a table": (["kl.were=loss"], "unknown key algorithm.kl.were; did you mean 'where'?"),
    "tokens without a divisor": (["aggregation=constant"], 'constant_divisor goes with aggregation = "constant"'),
}


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_with_the_reason(name, minimal):
    overrides, told = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        load(minimal, [f"--algorithm.{text}" for text in overrides])
    assert told in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy_loss=reinforce", "minibatches=1", "old_policy=proximal", "correction=truncated"],
        [*VTRACE, "policy_loss=reinforce", "minibatches=1"],
        ["policy_loss=gspo"],
        ["advantage=gigpo", "gamma=0.95", "step_weight=2"],
    ],
)
def test_what_makes_sense_is_taken(overrides, minimal):
    load(minimal, [f"--algorithm.{text}" for text in overrides])


def test_explicit_keys_count_before_a_preset_also_inside_tables(minimal, tmp_path):
    minimal.write_text(MINIMAL + 'preset = "agentrl"\nclip_low = 0.1\nkl = { coefficient = 0.5 }\n')
    own = load(minimal, ["--algorithm.dual_clip=5"]).algorithm
    assert (own.advantage, own.normalize, own.clip_high) == ("grpo", "task", 0.2)
    assert (own.clip_low, own.dual_clip) == (0.1, 5.0)
    assert (own.kl.where, own.kl.coefficient, own.kl.value, own.kl.gradient) == ("loss", 0.5, "k3", "k3")
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_toml(load(minimal)))
    assert load(resolved) == load(minimal)


def test_gspo_has_bounds_of_its_own(minimal):
    own = load(minimal, ["--algorithm.policy_loss=gspo", "--algorithm.clip_low=1e-3"]).algorithm
    assert (own.clip_low, own.clip_high) == (1e-3, 4e-4)
