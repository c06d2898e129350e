"""summary.json: what a finished run was and reached. Checked as it is written, so that every reader may rely on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config import Table

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]


class RolloutCounts(Table):
    """Every dispatched training rollout ended in exactly one way."""

    dispatched: Count
    trained: Count
    filtered: Count
    stale: Count
    failed: Count
    cancelled: Count

    @model_validator(mode="after")
    def _balance(self) -> RolloutCounts:
        ended = self.trained + self.filtered + self.stale + self.failed + self.cancelled
        if ended != self.dispatched:
            raise ValueError(
                f"rollouts do not balance: {self.dispatched} dispatched, but {self.trained} trained + {self.filtered} filtered"
                f" + {self.stale} stale + {self.failed} failed + {self.cancelled} cancelled = {ended}"
            )
        return self


class PassK(Table):
    """Over the tasks with at least `k` scored rollouts: the chance that one of `k` succeeds (pass@k), and that all do."""

    k: Annotated[int, Field(ge=1)]
    tasks: Count
    pass_at: Rate
    pass_at_ci95: tuple[Rate, Rate]
    pass_all: Rate
    pass_all_ci95: tuple[Rate, Rate]


class Evaluation(Table):
    """Success on one domain's held-out tasks, a mean over tasks; `n` rollouts were scored, `ci95` is an interval of the mean (of
    Wilson, over `tasks`). `pass_k` has an entry for k = 1, 2, 4, ... and `eval.samples` when that is more than 1."""

    phase: Literal["init", "warm", "rl"]
    version: Count
    split: str
    mode: Literal["greedy", "sampled"]
    domain: str
    success: Rate
    n: Count
    tasks: Count = 0  # 0: of a run that was begun before they were counted
    ci95: tuple[Rate, Rate]
    pass_k: list[PassK] = Field(default=[])


class TokenCounts(Table):
    sampled: Count  # by the policy, in delivered training rollouts
    trained: Count  # with a live mask, in committed updates


class LagStatistics(Table):
    """Updates between the policy that sampled a token and the one it trained, over trained tokens of one pool of engines."""

    mean: Annotated[float, Field(ge=0)]
    max: Count


class StalePool(Table):
    """What the stale pool of engines sampled of the trained tokens."""

    share: Rate
    lag: LagStatistics


class Summary(Table):
    config: dict[str, Any]
    seed: int
    updates: Count
    wall_seconds: Annotated[float, Field(ge=0)]
    rollouts: RolloutCounts
    domains: dict[str, RolloutCounts]  # the same of each, where there are several
    evals: list[Evaluation]
    tokens: TokenCounts
    lag: LagStatistics  # of the main pool
    stale_pool: StalePool | None  # None: without cross-policy sampling
    recompilations_after_warmup: Count | None  # None: the engines do not count (SGLang)
