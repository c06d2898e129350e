"""Credit, losses and corrections in a run's configuration: `[algorithm]`, the presets that fill it, and what domains change.

docs/algorithms.md has the formula and the source of each choice. What cannot go together is refused here, with the reason; what
only a rollout shows (concurrent branches), where it shows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config_table import Fraction, Natural, Positive, Table, unused

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "algorithms"

COMPARING = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "erpo", "gigpo")  # rollouts of a group: no critic
CRITICAL = ("gae", "bilevel_gae", "step_gae", "vtrace")  # along a rollout, with a critic
CLIPPING = ("ppo", "gspo")  # dual clip is for losses with a clip on one side
GSPO_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}  # of a mean over a sequence: a thousandth of a token's

# Keys that all domains of a run have in common, with the reason.
RUN_WIDE = {
    "group_size": "since capacity and selection count groups of one size",
    **dict.fromkeys(("groups_per_update", "minibatches", "epochs"), "since an optimizer step is over the groups of all domains"),
    "critic": "since all domains train one network (a domain whose advantage needs no critic has none)",
    "critic_warmup": "since all domains train one network (a domain without a critic waits for nothing)",
    "zero_advantages": "since it makes a control run of all of it",
}
# The settings of a choice: a domain that chooses otherwise than the run does not have them from the run.
SETTINGS = {
    "advantage": (
        *("std_ddof", "step_weight", "step_std", "gamma", "gae_lambda", "gamma_turn", "vtrace_rho", "vtrace_c", "vtrace_policy"),
        *("bootstrap_truncated", "value_coefficient", "value_clip"),
    ),
    "policy_loss": ("clip_low", "clip_high", "dual_clip"),
    "correction": ("correction_low", "correction_high"),
    "aggregation": ("constant_divisor",),
}
OF_A_LOSS = ("policy_loss", "correction", "aggregation")  # whose settings a preset keeps to itself; γ goes with any credit
CHOICES = {"kl": "where", "observation": "loss"}  # tables, and the key of theirs that all others are settings of


class KlConfig(Table):
    """A penalty for leaving a reference policy, by estimators from sampled tokens (learner/kl.py says what each is right for)."""

    where: Literal["none", "reward", "loss"] = Field(
        default="none", description="reward: subtracted from the reward of each action token; loss: added to their losses"
    )
    coefficient: float = Field(default=1e-3, gt=0)
    value: Literal["k1", "k2", "k3"] = Field(default="k1", description="whose value it has")
    gradient: Literal["k2", "k3"] = Field(
        default="k2", description="loss: whose gradient it has; k2: of KL(policy, reference), k3: of KL(reference, policy)"
    )
    reference: str = Field(
        default="initial", description="the policy when RL began, or the folder of a Hugging Face model of the same sizes"
    )

    @model_validator(mode="after")
    def _used(self) -> KlConfig:
        if self.where == "none":
            unused(self, "algorithm.kl", 'where = "reward" or "loss"', "coefficient", "value", "gradient", "reference")
        if self.where == "reward":
            unused(self, "algorithm.kl", 'where = "loss", a reward has no gradient', "gradient")
            if self.value != "k1":
                raise ValueError(
                    f'algorithm.kl.value = "{self.value}" cannot be used in the reward: only k1 is right there in its policy'
                    ' gradient; set value = "k1"'
                )
        return self


class ObservationConfig(Table):
    """A loss on what the environment answered, beside the policy's: it predicts what its actions bring about."""

    loss: Literal["none", "cross_entropy", "clipped_mae"] = Field(default="none", description="ECHO's, or PaW's")
    coefficient: float = Field(default=0.05, gt=0, description="0.05 is ECHO's; larger models were stable at 0.005 only")
    decay_steps: Natural = Field(default=0, description="optimizer steps after which it has fallen to 0, in a line; 0: constant")
    bound: Fraction = Field(default=0.2, description="clipped_mae: a token of a higher probability is learnt no further")

    @model_validator(mode="after")
    def _used(self) -> ObservationConfig:
        if self.loss == "none":
            unused(self, "algorithm.observation", "a loss on observations", "coefficient", "decay_steps", "bound")
        if self.loss == "cross_entropy":
            unused(self, "algorithm.observation", 'loss = "clipped_mae"', "bound")
        return self


class AlgorithmConfig(Table):
    """Credit and losses. `preset` names a file of configs/algorithms; keys that are given here count before its own."""

    preset: str = Field(default="", description="a published algorithm, see configs/algorithms; what is set beside it differs")
    group_size: Positive = 8
    groups_per_update: Positive = 32
    minibatches: Positive = Field(default=2, description="optimizer steps per update, each on its own groups")
    epochs: Positive = 1

    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "erpo", "gigpo",
        "gae", "bilevel_gae", "step_gae", "vtrace",
    ] = Field(default="grpo", description="how rewards become advantages of tokens")  # fmt: skip
    std_ddof: Literal[0, 1] = Field(default=1, description="of GRPO's and ERPO's std: 1 as in published code, 0 population")
    step_weight: float = Field(default=1.0, ge=0, description="GiGPO: of the comparison of steps in the same state")
    step_std: bool = Field(default=False, description="GiGPO: divide both comparisons by their std")
    normalize: Literal["none", "batch", "task"] = Field(
        default="none", description="advantages at last: whiten over the update's action tokens, or over those of each domain"
    )
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    gamma_turn: Fraction = Field(default=0.95, description="bilevel_gae: from turn to turn")
    vtrace_rho: float = Field(default=1.0, gt=0, description="bound of the ratios that weigh the errors of V-trace")
    vtrace_c: float = Field(default=1.0, gt=0, description="bound of those that trace them back")
    vtrace_policy: float = Field(default=1.0, gt=0, description="bound of those in its advantages")
    bootstrap_truncated: bool = Field(
        default=True, description="critic: a rollout that a limit cut off goes on at the critic's value; false: it is over"
    )
    zero_advantages: bool = Field(default=False, description="control run: every advantage is 0")
    overlong_limit: Natural = Field(default=0, description="action tokens of a rollout from which its reward is 1 less; 0: none")
    overlong_cache: Natural = Field(default=0, description="below that limit the reward falls over so many tokens (DAPO)")
    compact_filter: bool = Field(
        default=False, description="rollouts that a limit ended leave the loss; their rewards stay in statistics (DeepSWE)"
    )

    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce", "double_sided"] = "ppo"
    clip_low: Fraction = Field(default=0.2, description="of the loss's ratio; gspo: 3e-4 unless it is set")
    clip_high: float = Field(default=0.28, ge=0, description="DAPO's 0.28; gspo: 4e-4 unless it is set")
    dual_clip: float = Field(
        default=0.0, ge=0, description="a token's loss is at most so many advantages where that is bad; 0: off"
    )
    old_policy: Literal["behaviour", "proximal"] = Field(
        default="behaviour",
        description="whose logprobs the loss's ratio is against: those recorded when a token was sampled, or those of the weights"
        " that the update began with, computed again",
    )
    correction: Literal["none", "importance", "truncated", "truncated_sequence", "masked", "rejected", "rejected_sequence"] = (
        Field(default="none", description="weight of a token from proximal over behaviour policy")
    )
    correction_low: float = Field(default=0.0, ge=0)
    correction_high: float = Field(default=2.0, gt=0)
    entropy: float = Field(default=0.0, ge=0, description="coefficient of the entropy bonus on action tokens")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = Field(
        default="token_mean", description="of token losses; a sequence is a rollout, however many segments it has"
    )
    constant_divisor: float = Field(default=0.0, ge=0, description="of aggregation = constant: tokens per rollout")
    kl: KlConfig = KlConfig()
    observation: ObservationConfig = ObservationConfig()

    critic: Literal["none", "shared", "detached", "separate"] = Field(
        default="none", description="a value head on the trunk, on a trunk that it does not move, or a network of its own"
    )
    critic_warmup: Natural = Field(default=0, description="optimizer steps at the beginning that train the critic alone")
    value_coefficient: float = Field(default=0.5, ge=0)
    value_clip: float = Field(default=0.2, ge=0, description="0 turns value clipping off")

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        """What the preset says where nothing else is said, and GSPO's bounds, before those of a preset for tokens."""
        if not isinstance(values, dict):
            return values
        if values.get("policy_loss") == "gspo":
            values = GSPO_CLIP | values
        if preset := values.get("preset"):
            values = _merged(_fitting(read_preset(preset), values, OF_A_LOSS), values)
        return values

    @model_validator(mode="after")
    def _credit(self) -> AlgorithmConfig:
        name = self.advantage
        if name in CRITICAL and self.critic == "none":
            raise ValueError(f'algorithm.advantage = "{name}" needs a critic: set algorithm.critic to "shared" or "separate"')
        if name not in CRITICAL:  # a critic may be there for another domain, with its warm-up
            keys = ("gae_lambda", "value_coefficient", "value_clip", "bootstrap_truncated")
            keys += ("critic_warmup",) if self.critic == "none" else ()
            unused(self, "algorithm", f"an advantage with a critic, {name} has none", *keys)
        if name in COMPARING and self.group_size < 2:
            raise ValueError(f"algorithm.group_size must be at least 2 for {name}: a group of one has no baseline")
        if name not in (*CRITICAL, "reinforce_pp", "gigpo"):
            unused(self, "algorithm", f"credit over time, {name} gives none", "gamma")
        if name not in ("grpo", "erpo"):
            unused(self, "algorithm", f"grpo and erpo, {name} does not divide by that std", "std_ddof")
        if name != "gigpo":
            unused(self, "algorithm", 'advantage = "gigpo"', "step_weight", "step_std")
        if name != "bilevel_gae":
            unused(self, "algorithm", 'advantage = "bilevel_gae"', "gamma_turn")
        if name != "vtrace":
            unused(self, "algorithm", 'advantage = "vtrace"', "vtrace_rho", "vtrace_c", "vtrace_policy")
        if name == "gigpo" and self.kl.where == "reward":
            raise ValueError(
                'algorithm.kl.where = "reward" cannot be used with gigpo, which compares steps by what the environment paid: set'
                ' it to "loss"'
            )
        if (self.overlong_limit > 0) != (self.overlong_cache > 0) or self.overlong_cache > self.overlong_limit:
            raise ValueError(
                f"algorithm.overlong_cache {self.overlong_cache} goes with algorithm.overlong_limit {self.overlong_limit},"
                " and is not above it"
            )
        return self

    @model_validator(mode="after")
    def _loss(self) -> AlgorithmConfig:
        if self.policy_loss == "reinforce":
            unused(self, "algorithm", "a loss that clips, reinforce does not", "clip_low", "clip_high")
        if self.policy_loss == "reinforce" and self.minibatches * self.epochs > 1:
            raise ValueError(
                f'algorithm.policy_loss = "reinforce" has no ratio: of minibatches {self.minibatches} x epochs {self.epochs}'
                " optimizer steps, all but the first would be off-policy without a correction; set both to 1"
            )
        if self.policy_loss == "gspo" and max(self.clip_low, self.clip_high) > 0.05:
            raise ValueError(
                f"algorithm.clip_low {self.clip_low} and clip_high {self.clip_high} are bounds of one token; gspo's ratio is a"
                " mean over a sequence and never gets there: leave them out (3e-4 and 4e-4)"
            )
        if self.dual_clip and self.policy_loss not in CLIPPING:
            raise ValueError(f'algorithm.dual_clip is for policy_loss "ppo" or "gspo", not "{self.policy_loss}": leave it out')
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"algorithm.dual_clip {self.dual_clip} must exceed 1 + clip_high {self.clip_high}: 3 is usual")
        if (self.aggregation == "constant") != (self.constant_divisor > 0):
            raise ValueError('algorithm.constant_divisor goes with aggregation = "constant", and only with it')
        if self.minibatches > self.groups_per_update:
            raise ValueError(f"algorithm.minibatches {self.minibatches} exceeds groups_per_update {self.groups_per_update}")
        return self

    @model_validator(mode="after")
    def _off_policy(self) -> AlgorithmConfig:
        if self.correction in ("none", "importance"):
            unused(self, "algorithm", "a correction with bounds", "correction_low", "correction_high")
        elif self.correction_low >= self.correction_high:
            raise ValueError(
                f"algorithm.correction_low {self.correction_low} must be below correction_high {self.correction_high}"
            )
        if self.correction != "none" and self.old_policy == "behaviour":
            raise ValueError(
                f'algorithm.correction = "{self.correction}" weighs the proximal against the behaviour policy; with old_policy ='
                ' "behaviour" they are the same: set old_policy = "proximal", or leave the correction out'
            )
        if self.policy_loss == "double_sided" and self.old_policy != "behaviour":
            raise ValueError(
                'algorithm.policy_loss = "double_sided" masks by the ratio to what sampled the token: set old_policy ='
                ' "behaviour"'
            )
        if self.advantage == "vtrace" and self.old_policy != "proximal":
            raise ValueError(
                'algorithm.advantage = "vtrace" weighs by the ratio of the update\'s first policy to what sampled the token, and'
                ' a loss against the latter would do it twice: set old_policy = "proximal"'
            )
        if self.advantage == "vtrace" and self.correction != "none":
            raise ValueError(f'algorithm.correction = "{self.correction}" would weigh V-trace\'s advantages again: leave it out')
        return self


def read_preset(name: str) -> dict[str, Any]:
    """Raises ValueError."""
    path = PRESETS / f"{name}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in PRESETS.glob("*.toml"))
        raise ValueError(f"algorithm.preset {name!r} is not known; there are {', '.join(known)}")
    return tomllib.loads(path.read_text())["algorithm"]


def for_domain(run: AlgorithmConfig, own: dict[str, Any]) -> AlgorithmConfig:
    """A domain's algorithm: its `own` keys, on top of the preset that they name, else of the run's keys.

    What is run-wide is the run's, whatever the preset says; there is a critic where the advantage needs one. Raises ValueError,
    or ValidationError for what AlgorithmConfig refuses.
    """
    for key in (key for key in own if key in RUN_WIDE):
        raise ValueError(f"{key} = {own[key]!r} cannot be one domain's, {RUN_WIDE[key]}: set algorithm.{key}")
    if own.get("preset"):
        base = _fitting(read_preset(own["preset"]), own, OF_A_LOSS)
    else:
        base = _fitting(run.model_dump() | ({"preset": ""} if own else {}), own, SETTINGS)
    values = _merged(base, own) | {key: getattr(run, key) for key in RUN_WIDE}
    if values.get("advantage", AlgorithmConfig.model_fields["advantage"].default) not in CRITICAL:
        values |= {"critic": "none", "critic_warmup": 0}
    return AlgorithmConfig.model_validate(values)


def _fitting(base: dict[str, Any], own: dict[str, Any], choices: Iterable[str]) -> dict[str, Any]:
    """The keys of `base` without the settings of those `choices`, and of the tables, that `own` makes otherwise: a clip of
    sequences is none of tokens."""
    for choice in choices:
        if choice in own and own[choice] != base.get(choice, AlgorithmConfig.model_fields[choice].default):
            base = {key: value for key, value in base.items() if key not in SETTINGS[choice]}
    for table, choice in CHOICES.items():
        chosen, before = own.get(table), base.get(table, {}).get(choice, "none")
        if isinstance(chosen, dict) and chosen.get(choice, before) != before:
            base = {key: value for key, value in base.items() if key != table}
    return base


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` counts, also inside of tables."""
    both = {key: _merged(base[key], over[key]) for key in base if isinstance(base[key], dict) and isinstance(over.get(key), dict)}
    return {**base, **over, **both}
