"""One generation request: read from SGLang's JSON, carried through the engine, written as SGLang's JSON. No JAX here."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.types import ids_array

NO_PROMPT = -1  # SGLang's logprob_start_len without prompt logprobs
STOPS = 16  # stop tokens per request: a static size of the decode program
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

# Values that leave softmax(z / temperature) as it is. Anything else is refused: recorded logprobs could not be replayed.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "custom_params": (None,),
}
# Options about text, which this engine never produces.
TEXT_ONLY = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
KNOWN = ("max_new_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos", "sampling_seed")


class BadRequest(ValueError):
    """The client is wrong; the message is for its 400."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask of this engine."""

    vocab_size: int
    max_length: int
    eos: tuple[int, ...]


@dataclass(eq=False)
class Request:
    """The upper half is what was asked, the lower half is filled by the engine's thread."""

    rid: str
    prompt: np.ndarray  # [P] int32
    max_new_tokens: int
    temperature: float  # 0: greedy
    seed: int  # uint32
    stops: tuple[int, ...]
    return_logprob: bool
    prompt_from: int = NO_PROMPT  # the first prompt token whose successors' logprobs are asked for

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # of the prompt tokens after `prompt_from`
    switches: list[tuple[str, int]] = field(default_factory=list)  # (version, first output token made by it)
    cached_tokens: int = -1  # of the first admission; -1 before it
    retractions: int = 0
    finish: dict[str, Any] | None = None
    version: str = ""  # when it finished
    created: float = field(default_factory=time.monotonic)

    def sequence(self) -> np.ndarray:
        """Prompt and output so far, int32."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def scored(self) -> bool:
        """Prompt logprobs are asked for and still to be made: with the weights that sample the first token."""
        return self.prompt_from != NO_PROMPT and not self.output

    def append(self, ids: list[int], logprobs: list[float], version: str) -> None:
        """Take sampled tokens, and finish on the length or on a stop token (in this order, as SGLang does)."""
        if ids and (not self.switches or self.switches[-1][0] != version):
            self.switches.append((version, len(self.output)))
        self.output += ids
        self.logprobs += logprobs
        if len(self.output) >= self.max_new_tokens:
            self.finish = {"type": "length", "length": self.max_new_tokens}
        elif ids and ids[-1] in self.stops:
            self.finish = {"type": "stop", "matched": ids[-1]}

    def response(self) -> dict[str, Any]:
        """The finished request in the form of SGLang's answer without a tokenizer."""
        switches = self.switches or [(self.version, 0)]
        ends = [start for _, start in switches[1:]] + [len(self.output)]
        cached = max(self.cached_tokens, 0)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "weight_version": self.version,
            "num_retractions": self.retractions,
            "reasoning_tokens": 0,
            "completion_tokens": len(self.output),
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "weight_versions": [
                {"version": version, "start": start, "end": end} for (version, start), end in zip(switches, ends, strict=True)
            ],
            "dp_rank": None,
            "e2e_latency": time.monotonic() - self.created,
            "response_sent_to_client_ts": time.time(),
        }
        if self.return_logprob:
            meta["input_token_logprobs"] = self._prompt_pairs()
            pairs = zip(self.logprobs, self.output, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["output_token_logprobs_length"] = len(self.output)
        return {"output_ids": self.output, "meta_info": meta}

    def _prompt_pairs(self) -> list[list[Any]]:
        """SGLang's form: nothing predicts the first one."""
        if not self.output or self.prompt_from == NO_PROMPT:
            return []
        pairs = zip([None, *self.prompt_logprobs], self.prompt[self.prompt_from :].tolist(), strict=True)
        return [[logprob, token, None] for logprob, token in pairs]


def read_generate(body: Any, limits: RequestLimits) -> tuple[list[Request], bool]:
    """The requests of a /generate body, and whether it was a batch. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    if body.get("text") is not None:
        raise BadRequest("This engine has no tokenizer: send input_ids instead of text.")
    for option in ("input_embeds", "image_data", "audio_data", "video_data", "lora_path", "session_params", "token_ids_logprob"):
        if body.get(option):
            raise BadRequest(f"{option} is not supported by this engine; leave it out.")
    if body.get("stream"):
        raise BadRequest("stream=true is not supported by this engine; leave it out.")
    if body.get("top_logprobs_num"):
        raise BadRequest("Only logprobs of the tokens themselves are supported: leave top_logprobs_num out.")
    ids = body.get("input_ids")
    if ids is None:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if not isinstance(ids, list):
        raise BadRequest(f"input_ids is {type(ids).__name__}; it must be a list of integers, or a list of such lists.")
    batched = bool(ids) and isinstance(ids[0], list)
    prompts = ids if batched else [ids]
    rids = _spread(body.get("rid"), len(prompts), batched, "rid")
    params = _spread(body.get("sampling_params"), len(prompts), batched, "sampling_params")
    logprob = _spread(body.get("return_logprob"), len(prompts), batched, "return_logprob")
    starts = _spread(body.get("logprob_start_len"), len(prompts), batched, "logprob_start_len")
    if batched and isinstance(body.get("rid"), str):
        rids = [f"{body['rid']}_{index}" for index in range(len(prompts))]
    requests = [_read_one(prompt, rid, param, limits) for prompt, rid, param in zip(prompts, rids, params, strict=True)]
    for request, want, start in zip(requests, logprob, starts, strict=True):
        request.return_logprob = bool(want)
        request.prompt_from = _prompt_from(start, request) if want else NO_PROMPT
    return requests, batched


def _prompt_from(start: Any, request: Request) -> int:
    if start is None or (type(start) is int and start in (NO_PROMPT, len(request.prompt))):
        return NO_PROMPT
    if type(start) is not int or not 0 <= start < len(request.prompt):
        raise BadRequest(
            f"logprob_start_len is {start!r}; send an integer in 0..{len(request.prompt)}, or -1 for no prompt logprobs."
        )
    if not request.max_new_tokens:
        raise BadRequest("max_new_tokens is 0; logprobs of the prompt come with at least one sampled token.")
    return start


def _spread(value: Any, count: int, batched: bool, name: str) -> list[Any]:
    """One value per prompt: a list as it is, a single value for all."""
    if not isinstance(value, list):
        return [value] * count
    if not batched or len(value) != count:
        raise BadRequest(
            f"{name} is a list of {len(value)} for {count} prompt(s) in input_ids; send one per prompt, or a single value."
        )
    return value


def _read_one(prompt: Any, rid: Any, params: Any, limits: RequestLimits) -> Request:
    params = params or {}
    if not isinstance(params, dict):
        raise BadRequest(f"sampling_params is {type(params).__name__}; it must be an object.")
    if rid is not None and not isinstance(rid, str):
        raise BadRequest(f"rid is {rid!r}; it must be a string.")
    _refuse_unsupported(params)
    ids = _prompt_ids(prompt, limits)
    new = _integer(params, "max_new_tokens", min(128, limits.max_length - len(ids)), 0, 2**31 - 1)
    if len(ids) + new > limits.max_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.max_length} tokens. You requested a"
            f" total of {len(ids) + new} tokens: {len(ids)} tokens from the input messages and {new} tokens for the completion."
            " Please reduce the number of tokens in the input messages or the completion to fit within the limit."
        )
    temperature = params.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
        raise BadRequest(f"temperature must be a non-negative number, got {temperature!r}.")
    seed = params.get("sampling_seed")
    return Request(
        rid=rid or uuid.uuid4().hex,
        prompt=ids,
        max_new_tokens=new,
        temperature=float(temperature) if temperature >= 1e-6 else 0.0,  # SGLang's bound for greedy
        seed=secrets.randbits(32) if seed is None else _integer(params, "sampling_seed", 0, 0, 2**32 - 1),
        stops=_stops(params, limits),
        return_logprob=False,
    )


def _prompt_ids(prompt: Any, limits: RequestLimits) -> np.ndarray:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("input_ids cannot be empty.")
    if len(prompt) >= limits.max_length:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({limits.max_length} tokens)."
        )
    for token in prompt:
        if type(token) is not int:
            raise BadRequest(f"input_ids holds {token!r}; every id must be an integer.")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise BadRequest(f"input_ids holds {bad}; the model's vocabulary has the ids 0..{limits.vocab_size - 1}.")
    return ids_array(prompt)


def _stops(params: dict[str, Any], limits: RequestLimits) -> tuple[int, ...]:
    asked = params.get("stop_token_ids") or []
    if not isinstance(asked, list) or any(type(token) is not int for token in asked):
        raise BadRequest(f"stop_token_ids is {asked!r}; it must be a list of integers.")
    if params.get("ignore_eos"):
        return ()  # stop_token_ids too, as in SGLang
    stops = tuple(dict.fromkeys([*asked, *limits.eos]))
    if len(stops) > STOPS:
        raise BadRequest(f"stop_token_ids and eos are {len(stops)} ids; this engine checks at most {STOPS}.")
    return stops


def _refuse_unsupported(params: dict[str, Any]) -> None:
    if params.get("stop"):
        raise BadRequest("stop strings need a tokenizer, which this engine does not have: send stop_token_ids.")
    for name, value in params.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name] and value is not None:
                raise BadRequest(
                    f"{name}={value!r} is not supported: it changes the sampling distribution, so that recorded logprobs could"
                    f" not be replayed. Leave it out, or send {NEUTRAL[name][0]!r}."
                )
        elif name not in KNOWN and name not in TEXT_ONLY:
            raise BadRequest(f"sampling_params has no field {name!r}; this engine knows {', '.join(KNOWN)}.")


def _integer(params: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer in {low}..{high}, got {value!r}.")
    return value
