"""A run's `[cross_policy]`: some engines keep older weights on purpose, and sample a part of the turns."""

from __future__ import annotations

from pydantic import Field, model_validator

from common.config_table import Natural, Table, unused


class CrossPolicyConfig(Table):
    """Cross-policy sampling (AgentRL, arXiv 2510.04206; its numbers are the defaults): each turn of a training rollout is
    sampled by the stale pool with probability `share`."""

    engines: Natural = Field(default=0, description="of engine.count, how many form the stale pool; 0: none")
    share: float = Field(default=0.25, gt=0, lt=1, description="probability that a turn is sampled by the stale pool")
    refresh: int = Field(default=25, ge=2, description="updates after which the stale pool gets the newest weights")
    max_lag: Natural = Field(default=27, description="learner.max_lag of tokens that the stale pool sampled")

    @model_validator(mode="after")
    def _off(self) -> CrossPolicyConfig:
        if not self.engines:
            unused(self, "cross_policy", "engines of at least 1", "share", "refresh", "max_lag")
        return self

    def check(self, engines: int, max_lag: int) -> None:
        """Beside `engine.count` and `learner.max_lag`. Raises ValueError."""
        if not self.engines:
            return
        if self.engines >= engines:
            raise ValueError(
                f"cross_policy.engines {self.engines} of engine.count {engines} leave none in the main pool: "
                f"set engine.count to {self.engines + 1} or more"
            )
        oldest = self.refresh + max_lag
        if self.max_lag < oldest:
            raise ValueError(
                f"cross_policy.max_lag {self.max_lag} is too low: tokens of the stale pool are up to refresh {self.refresh} "
                f"updates old when sampled, and wait for up to learner.max_lag {max_lag} more; set it to {oldest} or more"
            )
