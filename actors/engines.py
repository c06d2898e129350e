"""The client of inference engines: SGLang's native HTTP API, token ids in, token ids out.

One call of `generate` is one HTTP request; nothing here retries. The engine table comes from the learner; `pick` keeps a
rollout on the engine that holds its prefix, else takes the one with the fewest requests of this process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
import numpy as np
import orjson

from common.types import EngineInfo, Finish, Json, VersionRun
from common.validate import LOGPROB_SLACK, Vocabulary

log = logging.getLogger("actors.engines")

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
REST_S = 0.5  # an engine that did not answer is left alone for so long


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
    """The engine table and the connections. Use inside a running event loop; `close` it there."""

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._vocabulary = vocabulary
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),  # SGLang's server drops idle connections after 5 s
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=5),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._table: dict[str, EngineInfo] = {}
        self._running: Counter[str] = Counter()
        self._rests: dict[str, float] = {}  # until when (monotonic)
        self._changed = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()

    def update(self, table: Iterable[EngineInfo]) -> None:
        """Take over the learner's table."""
        new = {engine.name: engine for engine in table}
        if new != self._table:
            self._table = new
            self._changed.set()

    def ready(self) -> list[EngineInfo]:
        """Engines that may serve rollouts now: ready, with published weights, and not resting after a failure."""
        now = time.monotonic()
        return [e for e in self._table.values() if e.state == "ready" and e.version >= 1 and self._rests.get(e.name, 0.0) <= now]

    async def pick(self, preferred: str, pool: str = "main") -> EngineInfo:
        """Of `pool`: `preferred` while it is ready, else the least loaded ready engine. Waits for one; the caller sets the
        deadline."""
        while True:
            ready = [engine for engine in self.ready() if engine.pool == pool]
            if ready:
                kept = [engine for engine in ready if engine.name == preferred]
                return kept[0] if kept else min(ready, key=lambda engine: (self._running[engine.name], engine.name))
            self._changed.clear()
            try:
                async with asyncio.timeout(REST_S):  # a resting engine comes back without a message
                    await self._changed.wait()
            except TimeoutError:
                pass

    def states(self) -> str:
        """The table in words, for errors and waits."""
        rows = [" ".join(filter(None, (e.name, e.state, f"version {e.version}", e.reason))) for e in self._table.values()]
        return ", ".join(rows) or "no engine in the table"

    async def generate(self, engine: EngineInfo, request: Request) -> Generation:
        """One turn, or a part of one when the engine aborts it.

        Raises EngineRefused, EngineUnavailable, EngineFault. When the caller is cancelled, so is the request.
        """
        self._check_ids(request)
        body = orjson.dumps(
            {
                "rid": request.rid,
                "input_ids": request.ids,
                "sampling_params": {
                    "max_new_tokens": request.max_new_tokens,
                    "temperature": request.temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "stop_token_ids": request.stop_token_ids,
                    "sampling_seed": request.seed,
                },
                "return_logprob": True,
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        self._running[engine.name] += 1
        try:
            status, data = await self._post(engine, "/generate", body)
        except asyncio.CancelledError:
            self._abort_soon(engine, request.rid)
            raise
        except TimeoutError as error:
            self._abort_soon(engine, request.rid)  # the old request ends before a new one starts
            raise EngineUnavailable(f"{engine.name} did not answer within {self._session.timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            self._rests[engine.name] = time.monotonic() + REST_S
            raise EngineUnavailable(f"{engine.name} at {engine.url}: {type(error).__name__}: {error}") from error
        finally:
            self._running[engine.name] -= 1
        return self._read(engine, status, data, request)

    async def _post(self, engine: EngineInfo, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._session.post(engine.url + path, data=body, headers={"Content-Type": "application/json"}) as response:
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
            self._rests[engine.name] = time.monotonic() + REST_S
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
