"""What `sglang-router` 0.3.2 does and says, in front of real or fake engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from tests.fakes import Server, json_answer


class FakeRouter(Server):
    """Workers come and go in the background; `/generate` is forwarded to one after the other, once, whatever comes of it."""

    def __init__(self) -> None:
        self.forwarded = 0
        self._reset()

    def _reset(self) -> None:
        self.workers: dict[str, str] = {}  # url -> id
        self._jobs: set[asyncio.Task[None]] = set()

    async def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._generate)
        return app

    async def _list(self, http: web.Request) -> web.Response:
        rows = [{"id": id, "url": url, "model_id": "policy", "is_healthy": True} for url, id in self.workers.items()]
        return json_answer({"workers": rows, "total": len(rows)})

    async def _add(self, http: web.Request) -> web.Response:
        """Once the worker answers, it is one; until then nothing is known of it."""
        url = (await http.json())["url"]
        self._later(self._join(url))
        return json_answer({"status": "accepted", "worker_id": f"id-of-{url}", "url": url}, 202)

    async def _join(self, url: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url + "/health"):
                        break
                await asyncio.sleep(0.05)
        self.workers[url] = f"id-of-{url.rpartition(':')[2]}"

    async def _remove(self, http: web.Request) -> web.Response:
        found = [url for url, id in self.workers.items() if id == http.match_info["id"]]
        if not found:
            return json_answer({"error": "worker not found"}, 404)
        self._later(self._leave(found[0]))
        return json_answer({"status": "accepted", "worker_id": http.match_info["id"]}, 202)

    async def _leave(self, url: str) -> None:
        await asyncio.sleep(0.02)
        self.workers.pop(url, None)

    def _later(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        sampling = {key: value for key, value in body["sampling_params"].items() if value not in (None, {})}  # as it writes them
        if not self.workers:
            return json_answer({"error": {"code": "no_available_workers", "message": "No available workers"}}, 503)
        url = list(self.workers)[self.forwarded % len(self.workers)]
        self.forwarded += 1
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + "/generate", json={**body, "sampling_params": sampling, "stream": False}) as answer,
            ):
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except aiohttp.ClientError as error:
            return json_answer({"error": {"code": "call_upstream_request_error", "message": str(error)}}, 500)
