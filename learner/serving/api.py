"""The HTTP front: SGLang's native endpoints and error bodies over the engine's thread.

Runs on one asyncio loop. A request is a future here and a `Request` there; finished ones come back in one wake-up per
dispatch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from flax import nnx

from common import keys
from learner.model import hf
from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelError, ModelSpec
from learner.serving.engine import Engine
from learner.serving.programs import EngineShape
from learner.serving.request import BadRequest, Request, RequestLimits, read_generate

log = logging.getLogger(__name__)
MAX_BODY = 64 * 2**20
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


@dataclass(frozen=True)
class Served:
    """What this server was started with."""

    spec: ModelSpec
    eos: tuple[int, ...]
    shape: EngineShape
    dtype: str
    model_path: str
    load_format: str
    weight_version: str


class Server:
    """Endpoints over one engine. Make it inside a running loop, `start` it, serve `app`, `close` it.

    `model` is of hf.build_stored: its parameters lie as those of an update do.
    """

    def __init__(self, model: Qwen3, served: Served) -> None:
        self._served = served
        self._model_path = served.model_path
        self._limits = RequestLimits(served.spec.vocab_size, served.shape.max_length, served.eos)
        self._loop = asyncio.get_running_loop()
        self._futures: dict[str, asyncio.Future[Request]] = {}
        self._updating = asyncio.Lock()
        self.engine = Engine(model, served.shape, served.weight_version, self._delivered)

    def start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        self.engine.stop()

    def app(self, key: str = "") -> web.Application:
        """With a key, every call but /health needs it, as in SGLang with --api-key."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_guard(key)])
        for path, post in {
            "/generate": self.generate,
            "/update_weights_from_disk": self.update_weights,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
        }.items():
            app.router.add_post(path, _answering_bad_requests(post))
        for path, get in {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
        }.items():
            app.router.add_get(path, get)
        return app

    # ---- generation ---------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.Response:
        """A client that goes away cancels this coroutine, and that aborts what it asked for."""
        requests, batched = read_generate(await _body(http), self._limits)
        rids = [request.rid for request in requests]
        for rid in rids:
            if rid in self._futures or rids.count(rid) > 1:
                raise BadRequest(f"Duplicate request ID detected: {rid}")
        futures = [self._loop.create_future() for _ in requests]
        self._futures.update(zip(rids, futures, strict=True))
        try:
            self.engine.submit(requests)
            results = [request.response() for request in await asyncio.gather(*futures)]
        except asyncio.CancelledError:
            for rid in rids:
                self.engine.abort(rid)
            raise
        finally:
            for rid in rids:
                del self._futures[rid]
        return _json(results if batched else results[0])

    def _delivered(self, requests: Sequence[Request]) -> None:
        self._loop.call_soon_threadsafe(self._resolve, requests)

    def _resolve(self, requests: Sequence[Request]) -> None:
        for request in requests:
            future = self._futures.get(request.rid)
            if future is not None and not future.done():
                future.set_result(request)

    async def abort(self, http: web.Request) -> web.Response:
        body = await _body(http)
        rid = body.get("rid")
        if not body.get("abort_all") and not isinstance(rid, str):
            raise BadRequest("abort_request needs rid, a string, or abort_all=true.")
        await asyncio.wrap_future(self.engine.abort(None if body.get("abort_all") else rid))
        return web.Response()

    # ---- weights ------------------------------------------------------------------------------------------

    async def update_weights(self, http: web.Request) -> web.Response:
        """Load beside the running engine, then swap between two dispatches. On a CPU the new weights are the mapped file, so
        old and new ones together are all the memory it takes."""
        body = await _body(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            return _json(
                {"object": "error", "message": "model_path: Field required", "type": "Bad Request", "param": None, "code": 400},
                400,
            )
        if version is not None and not isinstance(version, str):
            return _update_failed(f"weight_version is {version!r}; it must be a string")
        if body.get("flush_cache") is False:
            return _update_failed("flush_cache=false is refused: keys made by old weights would serve new requests; send true")
        async with self._updating:
            try:
                params = await self._loop.run_in_executor(None, self._load, path)
            except ModelError as error:
                return _update_failed(str(error))
            if body.get("abort_all_requests"):
                await asyncio.wrap_future(self.engine.abort(None))
            running = await asyncio.wrap_future(self.engine.update(params, version))
            self._model_path = path
        log.info("weights from %s, version %s", path, self.engine.version)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return _json({"success": True, "message": message, "num_paused_requests": running})

    def _load(self, path: str) -> nnx.State:
        spec, tensors = hf.read(path)
        ours = replace(self._served.spec, max_positions=spec.max_positions)
        if spec != ours:
            raise ModelError(f"{path} is another model: it has {spec}, this engine serves {ours}")
        return hf.on_device(tensors, self._served.dtype)

    async def pause(self, http: web.Request) -> web.Response:
        mode = (await _body(http)).get("mode", "abort")
        if mode not in ("abort", "retract"):
            raise BadRequest(f"mode is {mode!r}; this engine pauses with 'abort' or 'retract'.")
        await asyncio.wrap_future(self.engine.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: web.Request) -> web.Response:
        await _body(http)
        await asyncio.wrap_future(self.engine.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, http: web.Request) -> web.Response:
        """`?timeout=S` waits so long for running requests to finish."""
        try:
            deadline = self._loop.time() + float(http.query.get("timeout", 0))
        except ValueError:
            raise BadRequest(f"timeout is {http.query['timeout']!r}; it must be seconds.") from None
        while not await asyncio.wrap_future(self.engine.flush()):
            if self._loop.time() >= deadline:
                return web.Response(status=400, text="Flush cache failed.\n")
            await asyncio.sleep(0.05)
        return web.Response(text=FLUSHED)

    # ---- state --------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.ready.is_set() and self.engine.alive else 503)

    async def health_generate(self, http: web.Request) -> web.Response:
        """Ready, and the engine's thread answers."""
        if not self.engine.ready.is_set() or not self.engine.alive:
            return await self.health(http)
        await asyncio.wrap_future(self.engine.call(lambda: None))
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        return _json(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._served.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": self._served.load_format,
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        served, shape, engine = self._served, self._served.shape, self.engine
        ready = engine.ready.is_set()
        return _json(
            {
                "engine": "polyturn-embedded",
                "model_path": self._model_path,
                "load_format": served.load_format,
                "dtype": served.dtype,
                "weight_version": engine.version,
                "skip_tokenizer_init": True,
                "context_length": shape.max_length,
                "max_running_requests": shape.rows,
                "cache_slots": shape.cache_slots,
                "max_total_tokens": shape.cache_slots * shape.max_length,
                "chunked_prefill_size": shape.prefill_chunk,
                "prefill_max_requests": shape.prefill_rows,
                "decode_chunk": shape.decode_chunk,
                "widths": list(shape.widths),
                "paused": engine.paused,
                "compilations": engine.compilations.total,
                "compilations_after_warmup": engine.compilations.total - engine.compilations_at_warm_up if ready else 0,
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        load, shape = self.engine.load(), self._served.shape
        row = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.held_tokens,
            "max_total_num_tokens": shape.cache_slots * shape.max_length,
            "max_running_requests": shape.rows,
            "token_usage": load.held_tokens / (shape.cache_slots * shape.max_length),
        }
        return _json({"timestamp": datetime.now(UTC).isoformat(), "version": "polyturn", "num_accelerators": 1, "loads": [row]})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _update_failed(message: str) -> web.Response:
    return _json({"success": False, "message": message, "num_paused_requests": 0}, 400)


async def _body(http: web.Request) -> dict[str, Any]:
    """The JSON object of a request; nothing is an empty one. Raises BadRequest."""
    data = await http.read()
    try:
        body = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


Endpoint = Callable[[web.Request], Awaitable[web.Response]]


def _guard(key: str) -> Middleware:
    """Lets in who shows `key`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/health") or keys.shown(request.headers.get("Authorization", ""), key):
            return await handler(request)
        return _json({"error": {"message": "Unauthorized: the call shows no key, or another than this engine's"}}, 401)

    return check


def _answering_bad_requests(endpoint: Endpoint) -> Endpoint:
    return partial(_answer, endpoint)


async def _answer(endpoint: Endpoint, http: web.Request) -> web.Response:
    try:
        return await endpoint(http)
    except BadRequest as error:
        return _json({"error": {"message": str(error)}}, 400)
