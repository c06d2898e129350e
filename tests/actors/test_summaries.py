"""Summaries that another model writes: over a real HTTP server, into the context and never into the loss."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from common.record import segments
from common.types import (
    ContextKind,
    Status,
    StepKind,
)
from tests.actors.contexts import numbered, sane, spell, under
from tests.actors.servers import play
from tests.fakes import FakeEngine


class ChatEndpoint:
    """An OpenAI-compatible server that answers what it is told to, status by status."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[dict, str]] = []

    async def _answer(self, http: web.Request) -> web.Response:
        self.calls.append((await http.json(), http.headers.get("Authorization", "")))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(body, status=status)

    @asynccontextmanager
    async def serve(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def says(text: object) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_a_summary_of_another_model_is_context(monkeypatch) -> None:
    monkeypatch.setenv("POLYTURN_SUMMARY_KEY", "secret")
    endpoint = ChatEndpoint((503, {"error": "busy"}), (200, says("<think>Well.</think> he<|im_end|>llo ")))
    async with endpoint.serve() as url:
        options = {"tokens": 90, "summary_tokens": 40, "summary_url": f"{url}/v1", "summary_model": "m"}
        work = under("summary", ["a" * 30, "b" * 30, "c"], **options)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    assert [step.kind for step in record.steps] == [StepKind.ACT] * 3
    last = segments(record)[1]
    said = last.ids[last.kinds == ContextKind.SUMMARY].tolist()
    assert said == spell("he<|im_end|>llo")
    assert 2 not in said  # another's text cannot end a turn
    (_, _), (body, key) = endpoint.calls
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 40, 0)
    (message,) = body["messages"]
    turns = f"[assistant]\nhello\n\n[tool]\n{'a' * 30}\n\n[assistant]\nhellohello\n\n[tool]\n{'b' * 30}"
    assert message["content"].startswith(f"hello\n\n[user]\nhe\n\n{turns}\n\nThe conversation is about to be cut.")


async def test_another_model_is_told_what_will_not_be_shown_any_more() -> None:
    """Not the turns that stay, and of what is gone already the summary of it."""
    endpoint = ChatEndpoint((200, says("(one)")), (200, says("(two)")))
    async with endpoint.serve() as url:
        options = {"tokens": 100, "summary_tokens": 40, "summary_url": url, "keep": 1}
        work = under("summary", ["a" * 60, "b" * 60, "c" * 60, "d"], **options)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    told = [body["messages"][0]["content"].partition("\n\nThe conversation")[0] for body, _ in endpoint.calls]
    task, turn = "hello\n\n[user]\nhe\n\n", "[assistant]\n{}\n\n[tool]\n{}"
    assert told == [
        task + turn.format("hello", "a" * 60),
        task + "(one)\n\n" + turn.format("hellohello", "b" * 60),
    ]


async def test_a_longer_summary_than_allowed_loses_its_middle() -> None:
    endpoint = ChatEndpoint((200, says("x" * 100)))
    async with endpoint.serve() as url:
        work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=30, summary_url=url)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
    assert 20 < (segments(record)[1].kinds == ContextKind.SUMMARY).sum() <= 30


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {"error": "no key"}), "no key"),
        ((200, {"choices": []}), "no choices"),
        ((200, says(None)), "has no text"),
    ],
)
async def test_an_endpoint_that_gives_no_summary_fails_the_rollout(answer: tuple[int, object], why: str) -> None:
    endpoint = ChatEndpoint(answer)
    async with endpoint.serve() as url:
        work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=30, summary_url=url)
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
    assert record.status == Status.FAILED
    assert f"context.summary_url {url}" in record.flags[0]
    assert why in record.flags[0]
    assert len(endpoint.calls) == 1
