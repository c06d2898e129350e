"""A client that believes nothing: it asks as actors do, and hands back what the engine said, unjudged.

SGLang's native HTTP API. Every call ends before the deadline of the whole certificate.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from actors.engines import NEUTRAL
from common import keys

CALL_S = 60.0  # one call
TOGETHER = 8  # requests at one time


class Trouble(Exception):
    """The engine gave no usable answer; the message says what it did."""


class Unreachable(Trouble):
    """Nobody answers there, or nobody that is an engine."""


class Refused(Trouble):
    """The engine answered with an error."""


class OutOfTime(Trouble):
    """The certificate's own deadline has passed."""


@dataclass(frozen=True)
class Ask:
    """One request for tokens."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    stops: tuple[int, ...] = ()
    seed: int = 1
    input_logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """The same fields that actors send."""
        sampling = {
            **NEUTRAL,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stops),
            "sampling_seed": self.seed,
        }
        body: dict[str, Any] = {"input_ids": self.prompt, "sampling_params": sampling, "return_logprob": True}
        return {**body, "logprob_start_len": 0} if self.input_logprobs else body


@dataclass(frozen=True)
class Sample:
    """What was answered: A output ids, and whatever else stands beside them."""

    ask: Ask
    ids: list[int]
    logprobs: list[float]
    logprob_ids: list[int]  # the ids that stand beside the logprobs
    finish: dict[str, Any]
    meta: dict[str, Any]

    @property
    def whole(self) -> bool:
        """Whether every id has its logprob."""
        return self.ids == self.logprob_ids


class Engine:
    """The engine at `url`. `samples` are all answers to `generate`, in order."""

    def __init__(self, url: str, seconds: float, key: str = "") -> None:
        """`key`: that the engine was started with. Raises Unreachable for what is no address."""
        try:
            parts = urlsplit(url)
            self._host, self._port, self._base = parts.hostname or "", parts.port or 80, parts.path.rstrip("/")
        except ValueError as error:
            raise Unreachable(f"--engine {url!r} is no address ({error}); write http://host:port") from error
        if parts.scheme != "http" or not self._host:
            raise Unreachable(f"--engine {url!r} is no address of an engine; write http://host:port")
        self.url, self._headers = url, {"Content-Type": "application/json", "Connection": "close", **keys.bearer(key)}
        self._until = time.monotonic() + seconds
        self.samples: list[Sample] = []

    def model_info(self) -> dict[str, Any]:
        """Raises Unreachable when there is no engine."""
        return self._info("/model_info", "/get_model_info")

    def server_info(self) -> dict[str, Any]:
        return self._info("/server_info", "/get_server_info")

    def _info(self, *paths: str) -> dict[str, Any]:
        """The first of `paths` that is known; older SGLang has other names."""
        for path in paths:
            status, answer = self._call("GET", path, None)
            if status == 401:
                raise Unreachable(f"--engine {self.url} wants another key; name the {keys.NAME} of its run by --key-file")
            if status == 503:
                raise Unreachable(f"--engine {self.url} is still starting; wait until {self.url}/health answers 200")
            if status == 200 and isinstance(answer, dict):
                return answer
        raise Unreachable(
            f"--engine {self.url} answers {paths[0]} with HTTP {status}: {_message(answer)}; give the address of an SGLang server"
            " or of an embedded engine itself, not of a router"
        )

    def generate(self, ask: Ask) -> Sample:
        """Raises Refused and other Trouble."""
        sample = read_sample(ask, self.raw(ask))
        self.samples.append(sample)
        return sample

    def raw(self, ask: Ask) -> dict[str, Any]:
        """The answer as it came."""
        return self._post(ask.body())

    def generate_all(self, asks: Sequence[Ask]) -> list[Sample]:
        """Side by side, as the requests of many rollouts are."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(self.generate, asks))

    def encode(self, text: str) -> list[int]:
        """How the engine's own tokenizer writes `text`. Raises Refused when it has none."""
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
        return input_ids(self._post(body))

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self._call("POST", "/generate", body)
        if status != 200:
            raise Refused(f"/generate answered HTTP {status}: {_message(answer)}")
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise Trouble(f"/generate answered without meta_info: {_message(answer)}")
        return answer

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        left = self._until - time.monotonic()
        if left <= 0:
            raise OutOfTime("the time of --timeout is over")
        connection = http.client.HTTPConnection(self._host, self._port, timeout=min(left, CALL_S))
        try:
            data = None if body is None else orjson.dumps(body)
            connection.request(method, self._base + path, data, self._headers)
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError as error:
            raise Unreachable(
                f"--engine {self.url} did not answer {path} within {min(left, CALL_S):.0f} s; is it paused?"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            told = f"{type(error).__name__} {error}".rstrip()
            raise Unreachable(f"--engine {self.url} cannot be reached ({told}); start it, or name another address") from error
        finally:
            connection.close()
        try:
            return response.status, orjson.loads(raw)
        except orjson.JSONDecodeError:
            return response.status, raw.decode(errors="replace")


def read_sample(ask: Ask, answer: dict[str, Any]) -> Sample:
    """Raises Trouble for an answer that cannot be read at all."""
    meta = answer["meta_info"]
    try:
        pairs = [(pair[0], pair[1]) for pair in meta.get("output_token_logprobs") or []]
        listed = [token for _, token in pairs]
        ids = [int(token) for token in answer.get("output_ids", listed)]
        finish = meta.get("finish_reason")
        finish = finish if isinstance(finish, dict) else {"type": finish}
        return Sample(ask, ids, [float(logprob) for logprob, _ in pairs], listed, finish, meta)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise Trouble(f"/generate answered what cannot be read ({error!r}): {_message(answer)}") from error


def input_ids(answer: dict[str, Any]) -> list[int]:
    """The prompt as the engine saw it, out of its input logprobs; empty when it gave none."""
    try:
        return [int(entry[1]) for entry in answer["meta_info"].get("input_token_logprobs") or []]
    except (TypeError, ValueError, IndexError) as error:
        raise Trouble(f"input_token_logprobs cannot be read ({error!r})") from error


def _message(answer: Any) -> str:
    """The server's own words, from any of the shapes that SGLang sends."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        answer = inner.get("message", inner) if isinstance(inner, dict) else inner
    return (str(answer).strip().splitlines() or ["nothing"])[0][:200]
