"""Inference engines in a run's configuration, and how weights get to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from common.config_table import Natural, Port, Positive, Rate, Table, unused


class EngineConfig(Table):
    """Inference engines. `embedded` serves the learner's Flax model; `sglang` is a stock SGLang server."""

    kind: Literal["embedded", "sglang"] = "embedded"
    count: Positive = 1
    port: Port = Field(default=0, description="of the first engine, the next ones follow; 0 picks free ports")
    slots: Positive = Field(default=64, description="requests decoded together")
    max_length: Positive = Field(default=320, description="tokens of one sequence, prompt and output")
    decode_chunk: Positive = Field(default=8, description="decode steps per dispatch")
    prefill_chunk: Positive = Field(default=64, description="prompt tokens per slot and dispatch")
    prefill_slots: Positive = Field(default=8, description="slots per prefill dispatch")
    widths: list[Positive] = Field(default=[128, 192, 256, 320], description="attended widths, rising; the last is max_length")
    timeout_s: Rate = Field(
        default=60.0, description="of one /generate call; then it is aborted, and goes on after what it has sampled"
    )
    concurrency: Natural = Field(
        default=0, description="requests in flight per actor process and engine; 0: its share of what keeps the slots full"
    )
    choice: Literal["prefix", "least_loaded"] = Field(
        default="prefix", description="prefix: a rollout goes back to the engine that holds its cached prefix"
    )
    update: Literal["together", "rolling"] = Field(
        default="together", description="of weights: all engines at once, or one after another while the others serve"
    )
    python: str = Field(
        default="", description="sglang: the Python of its environment, as `make sglang` builds one; empty: this one"
    )
    args: list[str] = Field(default=[], description="further arguments for an SGLang server")

    router: bool = Field(
        default=False, description="SGLang's router in front of all engines: it chooses one by prefix and load, for all actors"
    )
    router_python: str = Field(
        default="", description="the Python that has sglang-router; empty: engine.python, or where that is empty this one"
    )

    @model_validator(mode="after")
    def _router(self) -> EngineConfig:
        if not self.router:
            unused(self, "engine", "router = true", "router_python")
        elif self.choice != "prefix":
            raise ValueError(
                f'engine.choice = "{self.choice}" cannot be used with engine.router: the router chooses; leave it out'
            )
        return self

    @model_validator(mode="after")
    def _widths(self) -> EngineConfig:
        if self.kind == "sglang":
            unused(self, "engine", 'kind = "embedded"', "decode_chunk", "prefill_chunk", "prefill_slots", "widths")
            return self
        unused(self, "engine", 'kind = "sglang"', "python", "args")
        if self.widths != sorted(set(self.widths)) or not self.widths or self.widths[-1] != self.max_length:
            raise ValueError(f"engine.widths {self.widths} must rise and end at engine.max_length {self.max_length}")
        return self


class WeightsConfig(Table):
    """How published weights reach engines. `disk`: engines see the learner's disk. `relay`: a relay on each engine's host
    pulls them from the learner over HTTP into `folder`."""

    transport: Literal["disk", "relay"] = "disk"
    folder: str = Field(default="/dev/shm", description="relay: of each engine's host, in memory; two versions must fit")
    fetch_s: Rate = Field(default=600.0, description="relay: a version has to reach a host within")

    @model_validator(mode="after")
    def _transport(self) -> WeightsConfig:
        if self.transport == "disk":
            unused(self, "weights", 'transport = "relay"', "folder", "fetch_s")
        return self
