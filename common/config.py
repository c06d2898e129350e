"""One typed TOML per run. Every key is known, every value is checked, derived values are properties.

A key exists because two committed configurations, or a sweep, set it differently, or because machines differ.
`common/cli.py` reads files and `--a.b=value` overrides into this. Unsupported combinations are refused here.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from common.config_algorithm import CRITICAL, AlgorithmConfig, for_domain
from common.config_cross_policy import CrossPolicyConfig
from common.config_domain import DomainConfig
from common.config_engine import EngineConfig, WeightsConfig
from common.config_table import Fraction, Lease, Natural, Port, Positive, Rate, Table, moved, unused
from common.config_tasks import CurriculumConfig, TasksConfig, check_unlock

QUEUED = 1.5  # requests at an engine for each of its slots


class TlsConfig(Table):
    """Mutual TLS for gRPC and for relays: three PEM files, or none."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsConfig:
        if len({bool(self.cert), bool(self.key), bool(self.ca)}) != 1:
            raise ValueError("tls needs cert, key and ca together, or none of them")
        return self


class ModelConfig(Table):
    """The policy. `path` names a Hugging Face directory (config.json, safetensors, tokenizer.json); without it a
    Qwen3-architecture model of the sizes below starts from random weights with the tokenizer at `tokenizer`."""

    path: str = ""
    tokenizer: str = Field(
        default="configs/tokenizers/tiny", description="directory with tokenizer.json and tokenizer_config.json"
    )
    hidden_size: Positive = 96
    intermediate_size: Positive = 256
    num_layers: Positive = 3
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 24
    rope_theta: float = Field(default=10_000.0, gt=0)
    tie_embeddings: bool = True
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of compute and published weights; masters are float32"
    )
    remat: bool = Field(default=False, description="recompute layer activations in the backward pass")

    @model_validator(mode="after")
    def _heads(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} must be even for rotary positions")
        return self


class ChatConfig(Table):
    """How the model's text is laid out. `template = "model"`: by its own chat template. "raw", for base models: one growing
    text, where an observation is put right behind what was sampled."""

    template: Literal["model", "raw"] = "model"
    tools: Literal["auto", "hermes", "llama3", "qwen3_coder", "fenced", "answer", "react"] = Field(
        default="auto", description="how calls are written; auto: as the model's chat template teaches"
    )
    options: dict[str, Any] = Field(default={}, description="passed to the chat template, such as enable_thinking")
    prompt: str = Field(default="$instructions\n\n$task\n", description="raw: has $task, may have $instructions and $tools")
    observation: str = Field(default="\n$observation\n", description="raw: has $observation")

    @model_validator(mode="after")
    def _template(self) -> ChatConfig:
        if self.template == "model":
            unused(self, "chat", 'template = "raw"', "prompt", "observation")
            return self
        unused(self, "chat", 'template = "model"', "options")
        if self.tools == "auto":
            raise ValueError('chat.tools = "auto" reads the chat template, template = "raw" has none: name a format')
        return self


class ActorsConfig(Table):
    count: Positive = 1
    rollouts: Positive = Field(default=256, description="rollouts in flight per actor process")


# Fields of SGLang's sampling_params that do more than softmax(logits / temperature).
DISTORTIONS = (
    *("top_p", "top_k", "min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor"),
)


class SamplingConfig(Table):
    """How training rollouts are sampled. Anything else that changes the distribution is refused."""

    temperature: Rate = 1.0

    @model_validator(mode="before")
    @classmethod
    def _replayable(cls, values: Any) -> Any:
        wanted = [name for name in DISTORTIONS if isinstance(values, dict) and name in values]
        if wanted:
            raise ValueError(
                f"sampling.{wanted[0]} changes the distribution that tokens are drawn from; their recorded logprobs could not be "
                "replayed, and every ratio of the loss would be biased: leave it out"
            )
        return values


class OptimizerConfig(Table):
    """AdamW with float32 masters."""

    lr: float = Field(default=5e-4, ge=0, description="0: nothing is learned, as in configs/selftest.toml")
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: Natural = Field(default=0, description="optimizer steps from 0 to lr")
    decay_steps: Natural = Field(default=0, description="optimizer step at which a cosine reaches 0")
    b1: Fraction = 0.9
    b2: Fraction = 0.99
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, ge=0, description="global gradient norm; 0 turns clipping off")
    max_skips: Positive = Field(default=5, description="updates in a row with non-finite gradients before the run stops")

    @model_validator(mode="after")
    def _schedule(self) -> OptimizerConfig:
        if self.schedule == "constant":
            unused(self, "optimizer", 'schedule = "cosine"', "decay_steps")
        if self.schedule == "cosine" and self.decay_steps <= self.warmup:
            raise ValueError(f"optimizer.decay_steps {self.decay_steps} must exceed optimizer.warmup {self.warmup} for a cosine")
        return self


class WarmConfig(Table):
    """Supervised warm start on reference rollouts, before the first RL update. 0 updates: none."""

    updates: Natural = 0
    rollouts_per_update: Positive = 128
    lr: Rate = 1e-3
    target_loss: float = Field(default=0.0, ge=0, description="ends it early when 8 updates have a mean loss below; 0: never")
    target_success: Fraction = Field(
        default=0.0, description="below target_loss, go on until held-out success (evaluated every other update) reaches this"
    )

    @model_validator(mode="after")
    def _targets(self) -> WarmConfig:
        if self.target_success and not self.target_loss:
            raise ValueError("warm.target_success is looked at below warm.target_loss; set warm.target_loss too")
        return self


class LearnerConfig(Table):
    updates: Positive = 30
    max_lag: Natural = Field(default=2, description="updates between the policy that sampled a token and the one it trains")
    on_stale: Literal["mask", "drop", "restart"] = "mask"
    take: Literal["fixed", "drain"] = "fixed"
    domain_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="several domains: so long a batch waits for the groups that one has by its weight; then others take their"
        " place, until the domain has a complete group again; 0: never wait",
    )
    max_attempts: Positive = Field(default=3, description="of one rollout, before it is failed")
    lease_s: Lease = Field(default=20.0, description="an assignment whose actor is silent for so long is issued again")
    port: Port = Field(default=0, description="0 picks a free one")
    gap: Literal["every", "newest"] = Field(
        default="every",
        description="compare engines with the learner on tokens of every version within max_lag (so many policies are kept on the"
        " device for it), or of the newest alone",
    )
    row_length: Positive = Field(default=320, description="tokens of a packed row; no rollout may be longer")
    rows_per_microbatch: Positive = 32
    stall_s: Rate = Field(default=120.0, description="a wait of the learner longer than this becomes an event")
    give_up_s: Rate = Field(
        default=1800.0,
        description="without any delivery for so long, the run ends and says what it waits for; a learner that answers nobody"
        " for so long is restarted",
    )


class EvalConfig(Table):
    """Held-out evaluation at init, after the warm start, every `every` updates (0: never between) and at the end."""

    tasks: Positive = Field(default=128, description="held-out tasks per domain, always the same")
    every: Natural = 0
    init: bool = True
    modes: list[Literal["greedy", "sampled"]] = Field(default=["greedy"], min_length=1)
    samples: Positive = Field(default=1, description="rollouts per task in mode sampled; more give pass@k and pass^k")
    temperature: float = Field(default=0.0, ge=0, description="of mode sampled; 0: sampling.temperature, what training sees")
    deadline_s: Rate = Field(default=120.0, description="of one evaluation; engines are held at its version for so long")

    @model_validator(mode="after")
    def _sampled(self) -> EvalConfig:
        if "sampled" not in self.modes:
            unused(self, "eval", 'modes = ["sampled"]', "samples", "temperature")
        return self


class CheckpointConfig(Table):
    every: Positive = Field(default=10, description="updates; the last update is always saved")
    keep: Positive = 2


class RunConfig(Table):
    """A run, whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's folder is runs/<name>")
    seed: Natural = 1
    host: str = Field(default="127.0.0.1", description="address that local processes bind and call")
    model: ModelConfig = ModelConfig()
    domains: list[DomainConfig] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    cross_policy: CrossPolicyConfig = CrossPolicyConfig()
    actors: ActorsConfig = ActorsConfig()
    chat: ChatConfig = ChatConfig()
    sampling: SamplingConfig = SamplingConfig()
    tasks: TasksConfig = TasksConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    warm: WarmConfig = WarmConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    tls: TlsConfig = TlsConfig()

    @property
    def places(self) -> int:
        """Requests in flight per actor process and engine. By itself, half again as many as there are slots, over all actors: the
        next requests are at the engine when a slot falls free. More only wait there, where nothing can be said of them. A router
        has the places of all its engines."""
        each = self.engine.concurrency or math.ceil(QUEUED * self.engine.slots / self.actors.count)
        return each * self.engine.count if self.engine.router else each

    @property
    def keyed(self) -> bool:
        """Whether engines and relays are called with the run's key: all that others may reach, and whatever relays front."""
        return self.weights.transport == "relay" or not is_loopback(self.host)

    @model_validator(mode="after")
    def _reachable(self) -> RunConfig:
        if self.weights.transport == "relay" and not is_loopback(self.host) and not self.tls.cert:
            raise ValueError(
                f'weights.transport = "relay" on host {self.host!r}, which other machines reach, needs TLS: set tls.cert, tls.key'
                ' and tls.ca, or host = "127.0.0.1"'
            )
        if self.engine.router and self.cross_policy.engines:
            raise ValueError("engine.router and cross_policy.engines cannot be used together: one router stands for all engines")
        if self.engine.router and self.keyed:
            raise ValueError(
                'engine.router cannot be used where engines want a key (weights.transport = "relay", or a host that others'
                " reach): the router would be a door without one"
            )
        return self

    @property
    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """What the rollouts of each domain are trained with."""
        return {domain.name: for_domain(self.algorithm, domain.algorithm) for domain in self.domains}

    @model_validator(mode="after")
    def _algorithms(self) -> RunConfig:
        found = []
        for index, domain in enumerate(self.domains):
            try:
                found.append(for_domain(self.algorithm, domain.algorithm))
            except ValidationError as error:
                raise moved(error, f"domain {domain.name!r}", "domains", index, "algorithm") from error
            except ValueError as error:
                raise ValueError(f"domains.{domain.name}.algorithm: {error}") from error
        if self.algorithm.critic != "none" and all(own.critic == "none" for own in found):
            names = " and ".join(sorted({own.advantage for own in found}))
            raise ValueError(f'algorithm.critic is for {", ".join(CRITICAL)}; {names} has no critic: set critic = "none"')
        references = sorted({own.kl.reference for own in found if own.kl.where != "none"})
        if len(references) > 1:
            raise ValueError(
                f"algorithm.kl.reference is {' and '.join(map(repr, references))} in different domains, but one reference policy"
                " is kept beside the policy: name the same in all"
            )
        return self

    @model_validator(mode="after")
    def _off_policy(self) -> RunConfig:
        lag, algorithms = self.learner.max_lag, self.algorithms
        for domain in self.domains if lag else ():
            own = algorithms[domain.name]
            if own.correction != "none" or own.advantage == "vtrace":
                continue
            if own.old_policy == "proximal" or own.policy_loss == "reinforce":
                where = f"domains.{domain.name}.algorithm" if domain.algorithm else "algorithm"
                what = 'policy_loss = "reinforce"' if own.policy_loss == "reinforce" else 'old_policy = "proximal"'
                raise ValueError(
                    f"{where}.{what} with learner.max_lag {lag} trains on tokens of older policies as if its own had sampled"
                    f' them: set {where}.correction (which needs old_policy = "proximal"), or learner.max_lag = 0'
                )
        return self

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        names = [domain.name for domain in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"domains {names}: a name stands twice")
        last = self.engine.port + self.engine.count - 1
        if self.engine.port and last > 65_535:
            raise ValueError(f"engine.port {self.engine.port}: the last of {self.engine.count} engines would get port {last}")
        if self.engine.port and self.engine.port <= self.learner.port <= last:
            raise ValueError(f"learner.port {self.learner.port} is an engine's too; engines get {self.engine.port} to {last}")
        if len(names) == 1:
            unused(self.learner, "learner", "several [[domains]]", "domain_wait_s")
        self.cross_policy.check(self.engine.count, self.learner.max_lag)
        self.tasks.check(self.algorithm.group_size, self.algorithm.groups_per_update, self.learner.take)
        self.curriculum.check(max(domain.limits.max_turns for domain in self.domains))
        check_unlock({domain.name: domain.unlock for domain in self.domains})
        for domain in self.domains:
            tokens, where = domain.limits.max_tokens, f"domains.{domain.name}.limits.max_tokens"
            if tokens > self.engine.max_length:
                raise ValueError(f"{where} {tokens} exceeds engine.max_length {self.engine.max_length}")
            if tokens > self.learner.row_length:
                raise ValueError(f"{where} {tokens} exceeds learner.row_length {self.learner.row_length}")
            needed = domain.context.tokens + domain.limits.max_new_tokens + domain.context.summary_tokens
            if domain.context.tokens and needed > tokens:
                raise ValueError(
                    f"domains.{domain.name}.context.tokens {domain.context.tokens} comes too late: with limits.max_new_tokens "
                    f"and context.summary_tokens it makes {needed}, {where} is {tokens}"
                )
            if domain.context.subagent_turns and self.chat.tools in ("fenced", "answer"):
                what = f"domains.{domain.name}.context.subagent_turns = {domain.context.subagent_turns}"
                why = "which has no call of delegate or no turn without a call, the sub-agent's answer"
                raise ValueError(f'{what} cannot be used with chat.tools = "{self.chat.tools}", {why}')
            if domain.memory != "off" and self.chat.tools in ("fenced", "answer"):
                what = f'domains.{domain.name}.memory = "{domain.memory}"'
                raise ValueError(
                    f'{what} cannot be used with chat.tools = "{self.chat.tools}", which writes no call of write_note'
                )
            if self.eval.tasks > domain.heldout_tasks:
                raise ValueError(
                    f"eval.tasks {self.eval.tasks} exceeds domains.{domain.name}.heldout_tasks {domain.heldout_tasks}"
                )
        return self


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
