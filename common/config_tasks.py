"""`[tasks]` and `[curriculum]` of a run's configuration: which tasks are tried, which groups train, how many turns they get."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from common.config_table import Fraction, Positive, Rate, Table, unused

SHARES = {"top_std": 0.25, "mass": 0.9}  # as published: StarPO-S, RAGEN-2


class TasksConfig(Table):
    """Which task the next group works on (`sampler`), and which finished groups an update trains on (`select`). The formulas
    and their sources are in docs/tasks.md."""

    sampler: Literal["uniform", "variance", "limr"] = Field(
        default="uniform",
        description="uniform: every task once per epoch; variance: by 4p(1-p); limr: by alignment with the learning curve",
    )
    decay: float = Field(
        default=0.8, gt=0, lt=1, description="variance: what a group leaves of the weight of the outcomes before it"
    )
    floor: float = Field(default=0.05, gt=0, le=1, description="variance, limr: least weight of a task; the most is 1")
    threshold: float = Field(default=0.6, lt=1, description="limr: tasks whose alignment is not above it get the floor")
    visits: int = Field(default=4, ge=2, description="limr: epochs in which a task must have been seen before it is judged")
    select: Literal["all", "signal", "top_std", "mass"] = Field(
        default="all",
        description="signal: groups of equal rewards make room for others; top_std: of groups_per_update / share groups, those of"
        " the highest spread; mass: those that hold `share` of the spread of all",
    )
    share: Fraction = Field(default=0.0, description="top_std: of groups that train, mass: of spread; 0: 0.25 and 0.9")
    form: Literal["paper", "linear", "softmax"] = Field(
        default="paper", description="mass: over variances as in RAGEN-2's paper, or over deviations as in its code, in two ways"
    )
    include_zero: bool = Field(default=False, description='mass, form "linear" or "softmax": groups without spread take part')
    max_refills: Positive = Field(
        default=5,
        description="signal, mass: so many updates' worth of groups may be filtered in a row before there is an alarm; after ten"
        " times as many the run ends",
    )

    @property
    def kept_share(self) -> float:
        return self.share or SHARES.get(self.select, 1.0)

    @model_validator(mode="after")
    def _used(self) -> TasksConfig:
        if self.sampler != "variance":
            unused(self, "tasks", 'sampler = "variance"', "decay")
        if self.sampler != "limr":
            unused(self, "tasks", 'sampler = "limr"', "threshold", "visits")
        if self.sampler == "uniform":
            unused(self, "tasks", 'sampler = "variance" or "limr"', "floor")
        if self.select not in SHARES:
            unused(self, "tasks", 'select = "top_std" or "mass"', "share")
        if self.select != "mass":
            unused(self, "tasks", 'select = "mass"', "form")
        if self.select != "mass" or self.form == "paper":
            unused(self, "tasks", 'select = "mass" with form = "linear" or "softmax"', "include_zero")
        if self.select not in ("signal", "mass"):
            unused(self, "tasks", 'select = "signal" or "mass"', "max_refills")
        return self

    def check(self, group_size: int, groups_per_update: int, take: str) -> None:
        """Raises ValueError for a selection that the rest of the configuration does not go with."""
        what = f'tasks.select = "{self.select}"'
        if self.select != "all" and group_size < 2:
            raise ValueError(f'{what} compares the rewards of a group; algorithm.group_size is 1: set select = "all"')
        if self.select in SHARES and take == "drain":
            raise ValueError(f'{what} chooses among a fixed number of groups; set learner.take = "fixed"')
        if self.select == "top_std":
            drawn = groups_per_update / self.kept_share
            if abs(drawn - round(drawn)) > 1e-9 * drawn:
                raise ValueError(
                    f"tasks.share {self.kept_share:g} of how many groups is algorithm.groups_per_update {groups_per_update}? It"
                    f" would be {drawn:g}: choose a share that divides it into a whole number"
                )


class Stages(Table):
    """A turn budget by stage: `turns` of each, the next one after `every` updates."""

    turns: list[Positive]
    every: Positive


# ScalingInter-RL (arXiv 2509.08755), its released training scripts; the paper prints no numbers.
PRESETS = {
    "webarena": Stages(turns=[8, 12, 15], every=80),
    "searchqa": Stages(turns=[5, 8, 10], every=100),
    "textcraft": Stages(turns=[10, 20, 30], every=100),
    "sciworld": Stages(turns=[10, 20, 30], every=100),
    "babyai": Stages(turns=[6, 13, 20], every=100),
}


class CurriculumConfig(Table):
    """How many turns training rollouts get, from stage to stage; evaluations always have limits.max_turns."""

    kind: Literal["none", "stages", "success"] = Field(
        default="none", description="stages: the next one after `every` updates; success: when the present one is mastered"
    )
    preset: Literal["", "webarena", "searchqa", "textcraft", "sciworld", "babyai"] = Field(
        default="", description="stages: turns and every as ScalingInter-RL's scripts have them"
    )
    turns: list[Positive] = Field(default=[], description="most turns of a rollout in each stage, rising")
    every: int = Field(default=0, ge=0, description="stages: updates of a stage")
    mastered: Rate = Field(default=0.8, le=1, description="success: share of the rollouts in a window that ends a stage")
    window: Positive = Field(default=256, description="success: newest rollouts of a stage that are looked at")

    @model_validator(mode="after")
    def _used(self) -> CurriculumConfig:
        if self.kind != "stages":
            unused(self, "curriculum", 'kind = "stages"', "preset", "every")
        if self.kind != "success":
            unused(self, "curriculum", 'kind = "success"', "mastered", "window")
        if self.kind == "none":
            unused(self, "curriculum", 'kind = "stages" or "success"', "turns")
            return self
        if self.preset:
            unused(self, "curriculum", f'stages without preset = "{self.preset}"', "turns", "every")
        elif len(self.turns) < 2 or sorted(set(self.turns)) != self.turns:
            raise ValueError(f"curriculum.turns {self.turns} must rise from stage to stage, over at least two stages")
        elif self.kind == "stages" and not self.every:
            raise ValueError('curriculum.kind = "stages" needs curriculum.every, the updates of a stage, or a preset')
        return self

    @property
    def stages(self) -> Stages:
        return PRESETS[self.preset] if self.preset else Stages(turns=self.turns, every=max(1, self.every))

    def check(self, max_turns: int) -> None:
        """Raises ValueError when a stage has more turns than the longest domain: it would be no stage of its own."""
        if self.kind != "none" and (last := self.stages.turns[-1]) > max_turns:
            raise ValueError(
                f"curriculum.turns end at {last}, the most that a domain has is limits.max_turns {max_turns}: raise that, or"
                " lower the last stage"
            )


def check_unlock(needs: dict[str, dict[str, float]]) -> None:
    """`needs`: domain -> its domains.unlock. Raises ValueError for unknown names, and for circles, which never open."""
    for name, wanted in needs.items():
        for other in wanted:
            if other not in needs or other == name:
                raise ValueError(f"domains.{name}.unlock names {other!r}; name another of {sorted(set(needs) - {name})}")
    left = dict(needs)
    while free := [name for name, wanted in left.items() if not set(wanted) & set(left)]:
        for name in free:
            del left[name]
    if left:
        raise ValueError(f"domains.unlock of {' and '.join(sorted(left))} wait for one another; at least one must be free")
