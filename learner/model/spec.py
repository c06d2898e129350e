"""Sizes of a Qwen3 model, to and from a Hugging Face config.json. No JAX here: the launcher reads it too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ModelConfig


class ModelError(ValueError):
    """A model directory or description cannot be used; the message is one line with the value and the fix."""


@dataclass(frozen=True)
class ModelSpec:
    """A Qwen3 architecture. Query heads come in `num_kv_heads` groups that share keys and values."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int = 32_768

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"model num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"model head_dim {self.head_dim} is odd; rotary positions need an even size")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelSpec:
        """Read a config.json. Raises ModelError for another architecture, or an option that the forward pass lacks."""
        _refuse_unknown(config)
        try:
            return cls(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10_000.0))),
                rms_eps=config.get("rms_norm_eps", 1e-6),
                tie_embeddings=config.get("tie_word_embeddings", False),
                max_positions=config.get("max_position_embeddings", 32_768),
            )
        except KeyError as error:
            raise ModelError(f"config.json has no {error.args[0]!r}; add it") from error
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json: a size is no number ({error}); write it as the model's makers did") from error

    def to_hf(self, eos_id: int | list[int] | None, dtype: str) -> dict[str, Any]:
        """A config.json for transformers, SGLang and `from_hf`. `dtype` is that of the stored tensors."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_eps,
            # transformers 5 reads rope_parameters, everything older reads rope_theta
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "use_sliding_window": False,
            "eos_token_id": eos_id,
            "torch_dtype": dtype,
        }


def spec_from_config(model: ModelConfig, vocab_size: int, max_positions: int = 32_768) -> ModelSpec:
    """The spec of a run without a model directory: sizes from its configuration, rows from its tokenizer."""
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
        max_positions=max_positions,
    )


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a model directory. Raises ModelError."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{directory} is not a model directory: no readable config.json in it; name one that has it") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not a JSON object")
    return config


def eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence, from a config.json; it may name none, one or several."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _refuse_unknown(config: dict[str, Any]) -> None:
    if config.get("model_type") != "qwen3":
        raise ModelError(f"config.json has model_type {config.get('model_type')!r}; only 'qwen3' is supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json has hidden_act {config['hidden_act']!r}; only 'silu' is supported")
    for option in ("attention_bias", "use_sliding_window"):
        if config.get(option):
            raise ModelError(f"config.json has {option} true; it is not supported, set it to false")
    kind = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if kind != "default":
        raise ModelError(f"config.json has rope type {kind!r}; only 'default' is supported")
