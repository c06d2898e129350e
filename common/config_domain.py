"""`[[domains]]` of a run's configuration: environments, their limits, and what the policy is shown of its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config_table import Lease, Natural, Positive, Rate, Table, unused

if TYPE_CHECKING:
    from common.types import ContextPolicy

DELEGATE = "delegate"  # the tool that calls a sub-agent: no domain with sub-agents may have one of that name


class LimitsConfig(Table):
    """Bounds of one rollout."""

    max_turns: Positive = 10
    max_new_tokens: Positive = Field(default=32, description="per turn")
    max_tokens: Positive = Field(default=320, description="of prompt and action together, at any turn")
    deadline_s: Rate = Field(default=120.0, description="no turn begins later; what is still waited for at twice that is lost")


class ContextConfig(Table):
    """What the policy is shown of its history: all of it (`append`), its newest turns (`window`), what came since it was last
    dropped (`discard`) or summed up (`summary`), or what the domain itself asks for (`domain`). The other keys go with each."""

    name: Literal["append", "window", "discard", "summary", "domain"] = "append"
    turns: Natural = Field(default=0, description="window: newest turns that are shown")
    tokens: Natural = Field(default=0, description="discard, summary: history is cut when the next prompt would be longer")
    keep: Natural = Field(default=1, description="discard, summary: newest turns that stay as they are")
    summary_tokens: Natural = Field(default=0, description="summary: tokens that it may have")
    summary_url: str = Field(
        default="", description="summary: who writes it, an OpenAI-compatible server; empty: the policy, which is trained on it"
    )
    summary_model: str = Field(default="", description="model name at summary_url")
    observations: Natural = Field(default=0, description="newest answers that are shown; older ones have a placeholder; 0: all")
    reasoning: Literal["keep", "drop", "drop_at_user"] = Field(
        default="keep",
        description="of earlier turns; drop_at_user: when a user's message follows, as Qwen3's template has it",
    )
    slack: Natural = Field(
        default=0,
        description="turns beyond turns, observations or reasoning before history is rewritten: each rewriting costs a segment",
    )
    observation_tokens: Natural = Field(
        default=0, description="of one observation's text; the middle of a longer one is left out, with a notice; 0: any number"
    )
    subagent_turns: Natural = Field(default=0, description="turns of a sub-agent, which the policy calls with a tool; 0: none")
    subagent_calls: Natural = Field(default=4, description="sub-agents of one rollout")

    @model_validator(mode="after")
    def _used(self) -> ContextConfig:
        if self.name == "domain":
            unused(self, "context", 'a named policy; name = "domain" takes the domain\'s own', *self._options())
            return self
        if self.name == "window" and not self.turns:
            raise ValueError('context.name = "window" needs context.turns, at least 1')
        if self.name != "window":
            unused(self, "context", 'name = "window"', "turns")
        if self.name in ("discard", "summary") and not self.tokens:
            raise ValueError(f'context.name = "{self.name}" needs context.tokens, the length at which history is cut')
        if self.name not in ("discard", "summary"):
            unused(self, "context", 'name = "discard" or "summary"', "tokens", "keep")
        if self.name != "summary":
            unused(self, "context", 'name = "summary"', "summary_tokens", "summary_url", "summary_model")
        elif not self.summary_tokens:
            raise ValueError('context.name = "summary" needs context.summary_tokens, the most that a summary may have')
        if self.summary_url and not self.summary_url.startswith(("http://", "https://")):
            raise ValueError(f"context.summary_url {self.summary_url!r}: write http://host:port, of an OpenAI-compatible server")
        if bool(self.summary_model) != bool(self.summary_url):
            raise ValueError("context.summary_url and summary_model go together; without them the policy itself writes summaries")
        if not (self.turns or self.observations or self.reasoning == "drop"):
            unused(self, "context", 'turns, observations or reasoning = "drop"', "slack")
        if not self.subagent_turns:
            unused(self, "context", "subagent_turns", "subagent_calls")
        elif not self.subagent_calls:
            raise ValueError("context.subagent_calls = 0 with subagent_turns: set subagent_turns = 0 to have no sub-agents")
        return self

    @property
    def policy(self) -> ContextPolicy:
        """As an assignment carries it."""
        from common.types import ContextPolicy  # NumPy comes with it, which `--help` does not wait for

        return ContextPolicy(self.name, self.model_dump(exclude={"name"}))

    def _options(self) -> list[str]:
        return [name for name in type(self).model_fields if name != "name"]


class DomainConfig(Table):
    """One `[[domains]]`: a kind of environment, its servers and its limits."""

    name: str
    weight: Rate = Field(default=1.0, description="share of the groups, relative to the other domains")
    unlock: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        default={}, description="domain -> success in training that it must have reached before groups of this one open"
    )
    replicas: Positive = Field(default=1, description="env server processes")
    capacity: Positive = Field(default=256, description="sessions per env server")
    threads: Positive = Field(default=8, description="threads per env server for blocking environment code")
    lease_s: Lease = Field(default=60.0, description="a session not renewed for so long is closed")
    train_tasks: Positive = 2048
    heldout_tasks: Positive = 128
    admission: int = Field(default=64, ge=-1, description="tasks per split that admission checks at start; -1 all, 0 none")
    instructions: str = Field(default="", description="file that replaces the domain's instructions template")
    options: dict[str, Any] = Field(default={}, description="passed to the domain, which checks them")
    memory: Literal["off", "rollout", "task"] = Field(
        default="off",
        description="notes that the agent keeps by tools: for its rollout, or for later ones of the same train task",
    )
    memory_notes: Positive = Field(default=16, description="at most so many; of more, the newest are kept for later rollouts")
    memory_characters: Positive = Field(default=1000, description="of one note")
    memory_instructions: str = Field(default="", description="file that replaces what the instructions say about memory")
    limits: LimitsConfig = LimitsConfig()
    context: ContextConfig = ContextConfig()
    algorithm: dict[str, Any] = Field(
        default={}, description="keys of [algorithm] that this domain has otherwise; a preset takes the place of the run's keys"
    )

    @model_validator(mode="after")
    def _memory(self) -> DomainConfig:
        if self.memory == "off":
            keys = ("memory_notes", "memory_characters", "memory_instructions")
            unused(self, f"domains.{self.name}", 'memory = "rollout" or "task"', *keys)
        return self
