"""The client of inference engines: SGLang's native HTTP API, token ids in, token ids out.

One call of `generate` is one HTTP request; nothing here retries, nor does aiohttp (a POST is not repeated) or a redirect (none is
followed). Which engine it goes to is the matter of `places`. However a request ends, it is ended on the engine too: by its
answer, by an abort, or by a connection that is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

import aiohttp
import numpy as np
import orjson

from actors.places import PlaceRules, Places
from common import keys
from common.types import EngineInfo, Finish, Json, VersionRun
from common.validate import LOGPROB_SLACK, Vocabulary
from common.waits import Waits

log = logging.getLogger("actors.engines")

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
GRACE_S = 5.0  # for the answer to a request that was aborted because it took too long
# What leaves softmax(logits / temperature) as it is. All of it is said: a server may have other defaults of its own.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "n": 1,
    "logit_bias": None,
    **dict.fromkeys(("stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")),
}


class EngineRefused(Exception):
    """The engine will not serve this request, now or later (HTTP 400, or ids outside its vocabulary)."""


class EngineUnavailable(Exception):
    """The engine did not serve this request; another one, or a later try, may."""


class EngineFault(Exception):
    """The engine answered, and the answer breaks a rule of the record."""


@dataclass(frozen=True)
class Request:
    rid: str
    ids: np.ndarray  # [T] int32
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Generation:
    """What one request sampled: A ids, A logprobs, and runs of versions over them."""

    ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionRun, ...]
    finish: Finish
    cached: int  # prompt tokens that the engine took from its cache


class Engines:
    """The connections. Use inside a running event loop; `close` it there."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        timeout_s: float,
        rules: PlaceRules,
        index: int = 0,
        key: str = "",
        waits: Waits | None = None,
    ) -> None:
        """`timeout_s`: of one request; `index`: of this actor process; `waits`: its register, which hears of answers."""
        self._vocabulary = vocabulary
        self.timeout_s = timeout_s
        self._waits = waits or Waits()
        self.places = Places(rules, index)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),  # SGLang's server drops idle connections after 5 s
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=keys.bearer(key),
        )
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, engine: EngineInfo, request: Request) -> Generation:
        """One turn, or a part of one when the engine aborts it; the caller holds a place at `engine`.

        A request that takes longer than `timeout_s` is aborted; what it has sampled until then comes back, with finish ABORT.
        Raises EngineRefused, EngineUnavailable, EngineFault. When the caller is cancelled, so is the request.
        """
        self._check_ids(request)
        sampling = {
            **NEUTRAL,
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": request.stop_token_ids,
            "sampling_seed": request.seed,
        }
        asked = {"rid": request.rid, "input_ids": request.ids, "sampling_params": sampling, "return_logprob": True}
        body = orjson.dumps(asked, option=orjson.OPT_SERIALIZE_NUMPY)
        begun = time.monotonic()
        late = asyncio.get_running_loop().call_later(self.timeout_s, self._abort_soon, engine, request.rid)
        try:
            async with asyncio.timeout(self.timeout_s + min(GRACE_S, self.timeout_s)):
                status, data = await self._post(engine, "/generate", body)
            self._waits.hear(engine.name)
        except asyncio.CancelledError:
            self._abort_soon(engine, request.rid)
            raise
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self.places.failed(engine.name, begun)
            if not isinstance(error, aiohttp.ClientError):
                raise EngineUnavailable(f"{engine.name} did not answer in {self.timeout_s:g} s, nor when aborted") from error
            if not isinstance(error, aiohttp.ClientConnectorError):
                self._abort_soon(engine, request.rid)  # it may have heard of the request, and not that nobody waits for it
            raise EngineUnavailable(f"{engine.name} at {engine.url}: {type(error).__name__}: {error}") from error
        finally:
            late.cancel()
        try:
            generation = self._read(engine, status, data, request)
        except EngineUnavailable:
            self.places.failed(engine.name, begun)
            raise
        self.places.answered(engine.name, begun)
        return generation

    async def _post(self, engine: EngineInfo, path: str, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(engine.url + path, data=body, headers=headers, allow_redirects=False) as response:
            return response.status, await response.read()

    def _check_ids(self, request: Request) -> None:
        """An id outside the vocabulary can end a whole engine: it must not be sent."""
        if not len(request.ids):
            raise EngineRefused("the prompt is empty")
        low, high = int(request.ids.min()), int(request.ids.max())
        if low < 0 or high >= self._vocabulary.rows:
            bad = low if low < 0 else high
            raise EngineRefused(
                f"prompt id {bad} is outside 0..{self._vocabulary.rows - 1}; use the tokenizer that belongs to the model"
            )

    def _read(self, engine: EngineInfo, status: int, data: bytes, request: Request) -> Generation:
        if status >= 500 or status in (408, 429):
            raise EngineUnavailable(f"{engine.name} answered HTTP {status}: {_message(data)}")
        if status != 200:
            raise EngineRefused(f"{engine.name} answered HTTP {status}: {_message(data)}")
        try:
            answer = orjson.loads(data)
            meta = answer["meta_info"]
            pairs = meta.get("output_token_logprobs") or []
            ids = [pair[1] for pair in pairs]
            logprobs = [pair[0] for pair in pairs]
            listed = answer.get("output_ids", ids)
            cached = int(meta.get("cached_tokens") or 0)
            kind, spans = meta["finish_reason"]["type"], meta["weight_versions"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineFault(f"{engine.name}: an answer without {error}: {data[:200]!r}") from error
        if listed != ids:
            raise EngineFault(f"{engine.name}: {len(listed)} output_ids, but {len(ids)} token logprobs, or of other ids")
        if (counted := meta.get("completion_tokens", len(ids))) != len(ids):  # a parser on the way has eaten some
            raise EngineFault(f"{engine.name}: completion_tokens is {counted}, with {len(ids)} ids")
        self._check_tokens(engine, ids, logprobs)
        finish = FINISH.get(kind)
        if finish is None or (finish == Finish.STOP and not ids) or len(ids) > request.max_new_tokens:
            raise EngineFault(f"{engine.name}: finish {kind!r} with {len(ids)} of at most {request.max_new_tokens} tokens")
        return Generation(ids, logprobs, _version_runs(engine, spans, len(ids)), finish, cached)

    def _check_tokens(self, engine: EngineInfo, ids: list[int], logprobs: list[float]) -> None:
        for token, logprob in zip(ids, logprobs, strict=True):
            if type(token) is not int or not 0 <= token < self._vocabulary.sampleable:
                raise EngineFault(f"{engine.name} sampled id {token}, the tokenizer has 0..{self._vocabulary.sampleable - 1}")
            if not isinstance(logprob, int | float) or not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
                raise EngineFault(f"{engine.name}: logprob {logprob} of id {token}")

    def _abort_soon(self, engine: EngineInfo, rid: str) -> None:
        """Tell the engine to stop, without holding up whoever is being cancelled."""
        task = asyncio.get_running_loop().create_task(self._abort(engine, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine: EngineInfo, rid: str) -> None:
        try:
            async with asyncio.timeout(2):
                await self._post(engine, "/abort_request", orjson.dumps({"rid": rid}))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("abort of %s on %s: %s", rid, engine.name, error)

    async def close(self) -> None:
        self.places.close()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2)
        await self._session.close()


def _version_runs(engine: EngineInfo, spans: list[Json], length: int) -> tuple[VersionRun, ...]:
    """SGLang's `weight_versions` as runs that cover `length` tokens. Raises EngineFault, EngineUnavailable."""
    runs: list[VersionRun] = []
    at = 0
    for span in spans:
        start, end, version = span.get("start"), span.get("end"), str(span.get("version"))
        if start == end:
            continue
        if start != at or end < start:
            raise EngineFault(f"{engine.name}: weight_versions {spans} do not cover {length} tokens")
        if not version.isascii() or not version.isdigit() or int(version) < 1:
            # A restarted engine serves "default" until the learner has given it weights; what it samples is nobody's policy.
            raise EngineUnavailable(f"{engine.name} serves version {version!r}, which is no published version")
        runs.append(VersionRun(start, int(version), engine.name, engine.pool))
        at = end
    if at != length:
        raise EngineFault(f"{engine.name}: weight_versions {spans} do not cover {length} tokens")
    return tuple(runs)


def _message(data: bytes) -> str:
    """The message in SGLang's error body, or the body."""
    try:
        return str(orjson.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")
