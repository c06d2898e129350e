"""A real server with scripted behaviour: FakeEngine is an inference engine that speaks SGLang's native HTTP API.

It generates in slots, token by token, has a queue, a prefix cache whose entries carry the version that made them, and
the same rules as SGLang for pausing, flushing and weight updates. Every call can be scripted to fail, to hang or to drop
the connection. It runs on a thread of its own, on a loopback port that survives `restart()`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from aiohttp import web

from common import keys

Reply = Callable[[list[int], dict[str, Any]], list[int]]  # prompt and sampling_params -> the tokens to sample


@dataclass(frozen=True)
class Answer:
    """Answer a call with this instead of doing it."""

    status: int
    body: Any = field(default_factory=dict)
    location: str = ""


HANG = "hang"  # never answer
DROP = "drop"  # close the connection without an answer
LOSE = "lose"  # do it, then close the connection without an answer


@dataclass(eq=False)
class Request:
    rid: str
    prompt: list[int]
    plan: list[int]  # tokens it will sample, already cut at max_new_tokens
    finish: dict[str, Any]  # the finish reason when the plan is done
    output: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # of each output token
    cached: int = 0
    retractions: int = 0
    scored: bool = False  # its prompt's logprobs are wanted
    ended: dict[str, Any] | None = None


LOGPROB = -0.5  # of every token


def count_up(prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    """The default policy: the last prompt token + 1, + 2, ..., modulo 100, up to max_new_tokens."""
    return [(prompt[-1] + 1 + i) % 100 for i in range(sampling.get("max_new_tokens", 128))]


class Door(socket.socket):
    """A listening socket that knows whom it let in. A process's sockets close with it; an event loop forgets those that it
    accepted right before its server closed, and their clients would wait until a deadline."""

    def __init__(self, port: int) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.accepted: list[socket.socket] = []
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", port))

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.accepted.append(connection)
        return connection, address

    def close_all(self) -> None:
        for connection in self.accepted:
            connection.close()


class Server:
    """On a thread of its own; `with` starts and stops it. What it serves is said by `_app`."""

    port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="fake-server", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """The process is gone: connections are refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def restart(self) -> None:
        """A new process on the same port, which remembers nothing."""
        self.stop()
        self._reset()
        self.start()

    def _reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    async def _app(self) -> web.Application:
        raise NotImplementedError

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(
            await self._app(), shutdown_timeout=0.01, handler_cancellation=True
        )  # 0 would wait for every answer
        await runner.setup()
        door = Door(self.port)
        site = web.SockSite(runner, door)
        await site.start()
        self.port = door.getsockname()[1]
        ready.set()
        await self._ending.wait()
        await runner.cleanup()
        door.close_all()


class FakeEngine(Server):
    """`with FakeEngine() as engine: ... engine.url ... engine.calls`."""

    def __init__(self, *, slots: int = 8, token_s: float = 0.0, reply: Reply = count_up, vocabulary: int = 2**31) -> None:
        self.slots, self.token_s, self.reply, self.vocabulary = slots, token_s, reply, vocabulary
        self.calls: list[tuple[str, dict[str, Any]]] = []  # path and body of every POST, in order
        self.queries: list[str] = []  # of every POST, in order
        self.trace: list[tuple[str, str]] = []  # ("update", version), ("flush", ""), ("token", rid), in order
        self.reused: list[tuple[str, str]] = []  # (version that reads, version that wrote) of every prefix cache hit
        self.healthy = True
        self.key = ""  # that every call but /health needs
        self.server_info: dict[str, Any] = {}
        self.prompt_logprob = LOGPROB  # what it says of every token of a canary
        self._scripts: defaultdict[str, deque[Answer | str]] = defaultdict(deque)
        self._reset()

    def _reset(self) -> None:
        self.weight_version = "default"
        self.model_path = "start"
        self.paused = False
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.cache: list[tuple[tuple[int, ...], str]] = []  # tokens and the version whose KV it is

    def script(self, path: str, *answers: Answer | str) -> None:
        """The next calls of `path` get these answers, one each; then it behaves again."""
        self._scripts[path].extend(answers)

    def unscript(self) -> None:
        """From now on it behaves."""
        self._scripts.clear()

    def posts(self) -> list[str]:
        """Paths of the control calls so far (not /generate), in order."""
        return [path for path, _ in self.calls if path != "/generate"]

    # ---- HTTP ------------------------------------------------------------------------------------------------

    async def _app(self) -> web.Application:
        app = web.Application()
        for path in ("/model_info", "/server_info", "/health", "/v1/loads"):
            app.router.add_get(path, self._get)
        for path in POSTS:
            app.router.add_post(path, self._post)
        return app

    def _locked_out(self, http: web.Request) -> web.Response | None:
        """As SGLang answers with --api-key."""
        if http.path == "/health" or keys.shown(http.headers.get("Authorization", ""), self.key):
            return None
        return json_answer({"error": "Unauthorized"}, 401)

    async def _get(self, http: web.Request) -> web.Response:
        if locked_out := self._locked_out(http):
            return locked_out
        if scripted := await self._scripted(http):
            return scripted
        match http.path:
            case "/health":
                return web.Response(status=200 if self.healthy else 503)
            case "/model_info":
                return json_answer({"model_path": self.model_path, "weight_version": self.weight_version, "is_generation": True})
            case "/server_info":
                return json_answer({"weight_version": self.weight_version, **self.server_info})
            case _:
                return json_answer({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": len(self.waiting)}]})

    async def _post(self, http: web.Request) -> web.Response:
        raw = await http.read()
        body = orjson.loads(raw) if raw else {}
        if locked_out := self._locked_out(http):
            return locked_out
        self.calls.append((http.path, body))
        self.queries.append(http.query_string)
        lose = self._scripts[http.path] and self._scripts[http.path][0] == LOSE
        if lose:
            self._scripts[http.path].popleft()
        elif scripted := await self._scripted(http):
            return scripted
        answer = await getattr(self, POSTS[http.path])(body)
        if lose:
            return _drop(http)
        return answer

    async def _scripted(self, http: web.Request) -> web.Response | None:
        if not self._scripts[http.path]:
            return None
        answer = self._scripts[http.path].popleft()
        if answer == HANG:
            await asyncio.Event().wait()
        if not isinstance(answer, Answer):
            return _drop(http)
        response = json_answer(answer.body, answer.status)
        if answer.location:
            response.headers["Location"] = answer.location
        return response

    # ---- control ---------------------------------------------------------------------------------------------

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        self.paused = True
        mode = body.get("mode", "abort")
        if mode == "retract":
            for request in self.running:
                request.retractions += 1
            self.waiting, self.running = self.running + self.waiting, []
        elif mode == "abort":
            self._abort("")
        return json_answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, body: dict[str, Any]) -> web.Response:
        self.paused = False
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, body: dict[str, Any]) -> web.Response:
        while self.running and not self.paused:  # noqa: ASYNC110 - without a pause an update waits for running requests
            await asyncio.sleep(0.001)
        self.model_path = body["model_path"]
        self.trace.append(("update", body["weight_version"]))
        if body.get("flush_cache", True) and not self._flush():
            message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
            return json_answer({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.weight_version = body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {self.weight_version}."
        return json_answer({"success": True, "message": message, "num_paused_requests": 0})

    def _flush(self) -> bool:
        if self.running:
            return False
        self.cache.clear()
        self.trace.append(("flush", ""))
        return True

    async def _flush_cache(self, body: dict[str, Any]) -> web.Response:
        if self.waiting or not self._flush():
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(text="Cache flushed.\n")

    async def _abort_request(self, body: dict[str, Any]) -> web.Response:
        self._abort("" if body.get("abort_all") else body["rid"])
        return web.Response()

    def _abort(self, rid: str) -> None:
        for request in self.running + self.waiting:
            if not rid or request.rid == rid:
                request.ended = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        self.running = [r for r in self.running if not r.ended]
        self.waiting = [r for r in self.waiting if not r.ended]

    # ---- generation ------------------------------------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        ids = body["input_ids"]
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = ids if batched else [ids]
        for prompt in prompts:
            if not prompt or not all(0 <= i < self.vocabulary for i in prompt):
                return json_answer({"error": {"message": f"input_ids {prompt[:8]} are empty or outside the vocabulary"}}, 400)
        requests = [self._request(prompt, body, index) for index, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(self._serve(request) for request in requests))
        return json_answer(results if batched else results[0])

    def _request(self, prompt: list[int], body: dict[str, Any], index: int) -> Request:
        sampling = body.get("sampling_params", {})
        limit, stops = sampling.get("max_new_tokens", 128), set(sampling.get("stop_token_ids", ()))
        plan = self.reply(prompt, sampling)[:limit]
        stop_at = next((i for i, token in enumerate(plan) if token in stops), None)
        finish = {"type": "length", "length": len(plan)}
        if stop_at is not None:
            plan, finish = plan[: stop_at + 1], {"type": "stop", "matched": plan[stop_at]}
        elif len(plan) < limit:
            finish = {"type": "stop", "matched": plan[-1] if plan else None}
        rid = body.get("rid") or f"fake-{len(self.calls)}-{index}"
        scored = body.get("logprob_start_len", -1) == 0
        return Request(rid if isinstance(rid, str) else rid[index], prompt, plan, finish, scored=scored)

    async def _serve(self, request: Request) -> dict[str, Any]:
        self.waiting.append(request)
        try:
            while not request.ended:
                if not self.paused and request in self.running:
                    self._sample(request)
                elif not self.paused and len(self.running) < self.slots:
                    self.waiting.remove(request)
                    self.running.append(request)
                    request.cached = self._prefix(request)
                await asyncio.sleep(self.token_s or 0.0005)
        finally:  # also when the client closed its connection
            self.running = [r for r in self.running if r is not request]
            self.waiting = [r for r in self.waiting if r is not request]
        return self._result(request)

    def _sample(self, request: Request) -> None:
        if len(request.output) < len(request.plan):
            request.output.append(request.plan[len(request.output)])
            request.versions.append(self.weight_version)
            self.trace.append(("token", request.rid))
        if len(request.output) == len(request.plan):
            request.ended = request.finish
            self.cache.append((tuple(request.prompt + request.output), self.weight_version))

    def _prefix(self, request: Request) -> int:
        """How many leading tokens stand in the cache already; says which version wrote them."""
        tokens, best = request.prompt + request.output, 0
        for entry, version in self.cache:
            common = next(
                (i for i, (a, b) in enumerate(zip(entry, tokens, strict=False)) if a != b), min(len(entry), len(tokens))
            )
            if common:
                self.reused.append((self.weight_version, version))
            best = max(best, common)
        return min(best, len(tokens) - 1)

    def _result(self, request: Request) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(request.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        meta = {
            "id": request.rid,
            "finish_reason": request.ended,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached,
            "num_retractions": request.retractions,
            "weight_version": self.weight_version,
            "weight_versions": spans,
            "output_token_logprobs": [[LOGPROB, token, None] for token in request.output],
        }
        if request.scored:
            rest = [[self.prompt_logprob, token, None] for token in request.prompt[1:]]
            meta["input_token_logprobs"] = [[None, request.prompt[0], None], *rest]
        return {"text": "", "output_ids": request.output, "meta_info": meta}


POSTS = {
    "/pause_generation": "_pause",
    "/continue_generation": "_continue",
    "/update_weights_from_disk": "_update",
    "/flush_cache": "_flush_cache",
    "/abort_request": "_abort_request",
    "/generate": "_generate",
}


def json_answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _drop(http: web.Request) -> web.Response:
    if http.transport is not None:
        http.transport.abort()
    return web.Response(status=500)
