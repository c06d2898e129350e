"""What the learner says to an inference engine, over SGLang's native HTTP API (the embedded engine speaks the same).

A small blocking client: one connection per call, every call with a deadline, every failure an EngineError that says
which call failed and what the server answered. Actors have a client of their own; all that this one generates is a canary.
"""

from __future__ import annotations

import http.client
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson

from common import keys
from learner.canary import Score

MAX_BODY_BYTES = 16 * 2**20
STARTING = 503  # the status of an engine that is not ready yet


class EngineError(Exception):
    """A call failed. `status` is the HTTP status, 0 when no answer came; `message` is the server's own."""

    def __init__(self, call: str, status: int, message: str) -> None:
        super().__init__(f"{call} answered {status}: {message}" if status else f"{call}: {message}")
        self.call = call
        self.status = status
        self.message = message


class EngineGone(EngineError):
    """Nobody is there (connection refused or lost), or the engine says that it is still starting."""


class EngineSilent(EngineError):
    """No answer before the deadline."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds allowed for each kind of call."""

    look_s: float = 10.0  # model_info, health, server_info
    pause_s: float = 30.0  # pause, continue, abort, flush
    update_s: float = 300.0
    fetch_s: float = 600.0  # until weights that travel are there
    canary_s: float = 120.0  # it stands behind the requests that the pause interrupted


class EngineApi:
    """The engine at `url` (`http://host:port`, and a path before its own where something stands between). `key` is the run's,
    empty where it has none; `tls` is for https."""

    def __init__(self, url: str, deadlines: Deadlines = Deadlines(), key: str = "", tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        scheme = "https" if tls else "http"
        if parts.scheme != scheme or not parts.hostname:
            raise ValueError(f"engine url {url!r}: write {scheme}://host:port")
        self.url = url
        self._host, self._port, self._base = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self.deadlines = deadlines
        self.key = key
        self._headers = {"Content-Type": "application/json", "Connection": "close", **keys.bearer(key)}
        self._tls = tls

    def weight_version(self) -> str:
        """The label of the weights it serves: "default" until an update gave it another."""
        info = self.call("GET", "/model_info", self.deadlines.look_s)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError("/model_info", 200, "no weight_version in the answer; is this an SGLang 0.5 server?")
        return str(info["weight_version"])

    def health(self) -> None:
        """Raises EngineGone while the engine is starting."""
        self.call("GET", "/health", self.deadlines.look_s)

    def server_info(self) -> dict[str, Any]:
        return self.call("GET", "/server_info", self.deadlines.look_s)

    def pause(self) -> None:
        """Stop generating and take running requests back into the queue: they keep their tokens, not their cache."""
        self.call("POST", "/pause_generation", self.deadlines.pause_s, {"mode": "retract"})

    def resume(self) -> None:
        self.call("POST", "/continue_generation", self.deadlines.pause_s, {})

    def prepare(self, directory: Path, version: int) -> str:
        """Bring `version`, published in `directory`, to where the engine reads it, and return that path. Here the engine sees the
        learner's disk: there is nothing to bring."""
        return str(directory)

    def update_weights(self, directory: str | Path, version: int) -> None:
        """Load `directory` and flush the prefix cache: no key or value of the old weights may serve the new ones."""
        # A server that was started with random weights would make random ones again: it is told that these are files.
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True, "load_format": "safetensors"}
        answer = self.call("POST", "/update_weights_from_disk", self.deadlines.update_s, body)
        if isinstance(answer, dict) and not answer.get("success", True):
            raise EngineError("/update_weights_from_disk", 200, _message(answer))

    def score(self, ids: np.ndarray, temperature: float) -> Score:
        """Logprobs of `ids` [N], and one token sampled after them."""
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return _score(self.call("POST", "/generate", self.deadlines.canary_s, body), len(ids))

    def abort_all(self) -> None:
        """End every request; callers get what was sampled so far with finish reason abort."""
        self.call("POST", "/abort_request", self.deadlines.pause_s, {"rid": "", "abort_all": True})

    def flush_cache(self) -> None:
        self.call("POST", f"/flush_cache?timeout={max(1, int(self.deadlines.pause_s / 2))}", self.deadlines.pause_s, {})

    def call(self, method: str, path: str, timeout: float, body: dict[str, Any] | None = None) -> Any:
        """The answer, as JSON where it is. Raises EngineError, EngineGone, EngineSilent."""
        call = path.partition("?")[0]
        if self._tls:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        until = time.monotonic() + timeout
        try:
            connection.request(method, self._base + path, None if body is None else orjson.dumps(body), self._headers)
            response = connection.getresponse()
            parts = bytearray()
            while chunk := response.read1(2**16):
                parts += chunk
                if time.monotonic() > until:  # the socket's own timeout is per read: a dribbling server never meets it
                    raise TimeoutError
                if len(parts) > MAX_BODY_BYTES:
                    raise EngineError(call, response.status, f"more than {MAX_BODY_BYTES} bytes")
            status, answer = response.status, _decode(bytes(parts))
        except TimeoutError as error:
            raise EngineSilent(call, 0, f"no answer within {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineGone(call, 0, f"cannot reach {self.url}: {error.__class__.__name__} {error}".rstrip()) from error
        finally:
            connection.close()
        if status == STARTING:
            raise EngineGone(call, status, _message(answer) or "still starting")
        if status not in (200, 202):  # 202: a router takes note, and does it soon
            raise EngineError(call, status, _message(answer))
        return answer


def _score(answer: Any, length: int) -> Score:
    """Raises EngineError when the answer lacks something."""
    try:
        meta = answer["meta_info"]
        prompt = [pair[0] for pair in meta["input_token_logprobs"]]
        logprob, token = meta["output_token_logprobs"][0][:2]
        version = str(meta["weight_versions"][0]["version"])
        logprobs = np.asarray([0.0, *prompt[1:]], np.float64)
        return Score(logprobs, int(token), float(logprob), version)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError("/generate", 200, f"no logprobs of {length} prompt tokens and one sampled: {error!r}") from error


def _decode(raw: bytes) -> Any:
    """JSON, or the text when it is not JSON (flush_cache and abort_request answer with plain text)."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace").strip()


def _message(answer: Any) -> str:
    """The first line of the server's own words, from any of the shapes that SGLang sends."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        answer = inner.get("message", inner) if isinstance(inner, dict) else inner
    return (str(answer).strip().splitlines() or [""])[0][:500]
