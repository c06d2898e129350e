"""Summaries that another model writes, over an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import asyncio
import logging
import os

import aiohttp

log = logging.getLogger("actors.summaries")

PATH = "/v1/chat/completions"
KEY = "POLYTURN_SUMMARY_KEY"  # a secret, so it is in the environment
CALL_S = 120.0
TRIES = 4
FIRST_DELAY_S = 0.5


class SummaryUnavailable(Exception):
    """The endpoint gives no summary: infrastructure, never a reward."""


class Summaries:
    """Of all rollouts of a process. Use inside a running event loop; `close` it there."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def write(self, url: str, model: str, text: str, tokens: int) -> str:
        """What the model at `url` answers to `text`, greedily. Raises SummaryUnavailable after TRIES."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        why, delay = "", FIRST_DELAY_S
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(delay)
                delay *= 2
            try:
                return await self._call(
                    url.rstrip("/").removesuffix("/v1") + PATH, body, headers
                )  # with /v1, as OpenAI writes it
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
                log.info("summary from %s: %s", url, why)
                if isinstance(error, aiohttp.ClientResponseError) and 400 <= error.status < 500 and error.status != 429:
                    break  # asking again would be answered the same
        raise SummaryUnavailable(f"context.summary_url {url}: {why}")

    async def _call(self, url: str, body: dict, headers: dict[str, str]) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        async with self._session.post(url, json=body, headers=headers) as answer:
            if answer.status != 200:
                message = (await answer.text())[:300]
                raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message=message)
            reply = await answer.json()
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise SummaryUnavailable(f"context.summary_url {url}: no choices[0].message.content in {str(reply)[:200]}") from error
        if not isinstance(text, str):
            raise SummaryUnavailable(f"context.summary_url {url}: its answer has no text: {str(reply)[:200]}")
        return text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
