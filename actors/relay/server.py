"""The relay of one host on the wire: fetches weights for its engines, and passes the learner's control calls on to them.

    POST /ENGINE/fetch   {"version", "source", "deadline_s"} → {"path"}: the version's folder on this host, whole
    /ENGINE/CALL         the call of the engine's own API; of update_weights_from_disk only with a path from fetch
    GET /health          of the relay itself, without a key

/generate is not passed on: who samples asks the engine itself.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.relay.download import FetchError
from actors.relay.versions import Versions
from common import keys

UPDATE = "update_weights_from_disk"
CALLS = {
    **dict.fromkeys(("health", "model_info", "server_info"), "GET"),
    **dict.fromkeys(("pause_generation", "continue_generation", "abort_request", "flush_cache", UPDATE), "POST"),
}


class FetchCall(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(ge=1)
    source: str  # the learner's weight server
    deadline_s: float = Field(gt=0)


class UpdateCall(BaseModel):
    """What is looked at; the rest is the engine's business."""

    model_config = ConfigDict(frozen=True)

    model_path: str
    weight_version: str


Call = TypeVar("Call", bound=BaseModel)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Relay:
    """Use inside one event loop; `close` it there. `engines`: name to url, all on this host."""

    def __init__(self, engines: Mapping[str, str], versions: Versions, key: str = "") -> None:
        self._engines, self._versions, self._key = dict(engines), versions, key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a call is rare, and must not meet a stale connection
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),  # the learner has the deadlines
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=keys.bearer(key),
        )

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_post("/{engine}/fetch", self._fetch)
        app.router.add_post(f"/{{engine}}/{UPDATE}", self._update)
        app.router.add_route("*", "/{engine}/{call}", self._pass_on)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != "/health" and not keys.shown(request.headers.get("Authorization", ""), self._key):
                what = "another key than that of this relay" if "Authorization" in request.headers else "no key"
                raise Refused(401, f"the call shows {what}; it is in {keys.NAME} of the run's folder")
            return await handler(request)
        except Refused as refused:
            return _json({"error": {"message": refused.message}}, refused.status)
        except FetchError as error:
            return _json({"error": {"message": str(error)}}, error.status)

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _fetch(self, http: web.Request) -> web.Response:
        name, _ = self._engine(http)
        call = _read(FetchCall, await http.read())
        path = await self._versions.fetch(name, call.source, call.version, call.deadline_s)
        return _json({"path": str(path)})

    async def _update(self, http: web.Request) -> web.Response:
        name, _ = self._engine(http)
        call = _read(UpdateCall, await http.read())
        version = self._versions.version_at(call.model_path)
        if not version:
            raise Refused(400, f"model_path {call.model_path!r} is nothing that this relay has fetched; call fetch first")
        if call.weight_version != str(version):
            raise Refused(400, f"weight_version {call.weight_version!r}: {call.model_path} holds version {version}")
        self._versions.begin_load(name, version)
        answer = await self._pass_on(http)
        if answer.status == 200:
            self._versions.loaded(name)
        elif answer.status < 500:
            self._versions.refused(name, version)
        return answer

    async def _pass_on(self, http: web.Request) -> web.Response:
        name, url = self._engine(http)
        call = http.path.rpartition("/")[2]
        if CALLS.get(call) != http.method:
            raise Refused(404, f"{http.method} {call} is not passed on; what is: {', '.join(CALLS)}")
        try:
            async with self._session.request(
                http.method,
                f"{url}/{call}",
                params=http.query,
                data=await http.read() or None,
                headers={"Content-Type": "application/json"},
            ) as answer:
                kind = answer.content_type if answer.content_type else "application/json"
                return web.Response(status=answer.status, body=await answer.read(), content_type=kind)
        except (aiohttp.ClientError, OSError) as error:
            cause = type(getattr(error, "os_error", error)).__name__
            raise Refused(503, f"the relay cannot reach {name} at {url}: {cause} {error}") from error

    def _engine(self, http: web.Request) -> tuple[str, str]:
        name = http.match_info["engine"]
        if name not in self._engines:
            raise Refused(404, f"no engine {name!r} on this host; there are {', '.join(sorted(self._engines))}")
        return name, self._engines[name]

    async def close(self) -> None:
        await self._session.close()


async def serve(relay: Relay, door: socket.socket, tls: ssl.SSLContext | None) -> web.AppRunner:
    """Serve on the bound socket `door` until the runner is cleaned up. A caller that hangs up waits for nothing any more."""
    runner = web.AppRunner(relay.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, door, ssl_context=tls).start()
    return runner


def _read(kind: type[Call], data: bytes) -> Call:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(400, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
