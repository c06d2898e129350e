"""The HTTP front over a real loopback port, and the process with its exits."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from flax import nnx

from learner.model import hf
from learner.serving.api import Served, Server
from tests.processes import eventually
from tests.serving.conftest import SHAPE, SPEC, make_model

ROOT = Path(__file__).parents[2]


class Client:
    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self._base, self.session = base, session

    async def post(self, path, body=None):
        async with self.session.post(self._base + path, json=body) as answer:
            return answer.status, (await answer.json() if answer.content_type == "application/json" else await answer.text())

    async def get(self, path):
        async with self.session.get(self._base + path) as answer:
            return answer.status, (await answer.json() if answer.content_type == "application/json" else await answer.text())

    async def generate(self, ids, new=6, **rest):
        params = {"max_new_tokens": new, "sampling_seed": 1, "ignore_eos": True, "top_k": -1, "top_p": 1.0} | rest.pop(
            "params", {}
        )
        return await self.post("/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True} | rest)

    async def healthy(self):
        return (await self.get("/health"))[0] == 200

    async def has_waiting(self):
        return (await self.get("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] > 0

    async def has_none_waiting(self):
        return not await self.has_waiting()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        hf.save(make_model(seed), SPEC, folder / f"m{seed}", eos_id=2)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def served(loop, models):
    """The loop, and a client of a server on a port of its own."""

    async def begin():
        model = hf.build_stored(SPEC, hf.stored(nnx.state(make_model(0), nnx.Param), "float32"), "float32")
        server = Server(model, Served(SPEC, (2,), SHAPE, "float32", str(models / "m0"), "auto", "default"))
        runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", aiohttp.ClientSession())
        assert (await client.get("/health"))[0] == 503  # listening, not ready
        server.start()
        await eventually(client.healthy)
        assert server.engine.ready.is_set()
        return server, runner, client

    server, runner, client = loop.run(begin())
    yield loop, client

    async def end():
        await client.session.close()
        await runner.cleanup()
        server.close()

    loop.run(end())


def test_generate_has_the_fields_of_sglang(served):
    loop, client = served
    status, body = loop.run(client.generate([10, 20, 30], rid="mine"))
    meta = body["meta_info"]
    assert status == 200
    assert set(body) == {"output_ids", "meta_info"}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 6, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in body["output_ids"]]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert (meta["input_token_logprobs"], meta["num_retractions"], meta["output_token_logprobs_length"]) == ([], 0, 6)
    again = loop.run(client.generate([10, 20, 30]))[1]
    assert again["output_ids"] == body["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 2
    assert again["meta_info"]["cached_tokens_details"] == {"device": 2, "host": 0}


def test_a_batch_is_a_list_in_order(served):
    loop, client = served
    status, body = loop.run(client.generate([[10, 20, 30], [7]], rid=["a", "b"]))
    single = loop.run(client.generate([7]))[1]
    assert status == 200
    assert [answer["meta_info"]["id"] for answer in body] == ["a", "b"]
    assert body[1]["output_ids"] == single["output_ids"]


def test_no_new_tokens_is_an_empty_answer(served):
    loop, client = served
    status, body = loop.run(client.generate([1, 2], new=0))
    assert (status, body["output_ids"], body["meta_info"]["finish_reason"]) == (200, [], {"type": "length", "length": 0})
    assert body["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [], "sampling_params": {"max_new_tokens": 1}}, "input_ids cannot be empty."),
        ({"input_ids": [5] * 60}, "The input (60 tokens) is longer than the model's context length (48 tokens)."),
        ({"input_idz": [9]}, "Either text, input_ids or input_embeds should be provided."),
        ([1], "The body must be a JSON object."),
    ],
)
def test_error_bodies_of_generate(served, body, message):
    loop, client = served
    assert loop.run(client.post("/generate", body)) == (400, {"error": {"message": message}})


def test_not_json(served):
    loop, client = served

    async def send():
        async with client.session.post(client._base + "/generate", data=b"{oops") as answer:
            return answer.status, await answer.json()

    status, body = loop.run(send())
    assert status == 400
    assert "not JSON" in body["error"]["message"]


def test_update_pause_continue(served, models):
    """A request sent during the pause waits, and is answered by the new version."""
    loop, client = served

    async def play():
        assert await client.post("/pause_generation", {"mode": "retract"}) == (
            200,
            {"message": "Generation paused successfully.", "status": "ok"},
        )
        late = asyncio.create_task(client.generate([10, 20, 30]))
        await eventually(client.has_waiting)
        update = await client.post(
            "/update_weights_from_disk", {"model_path": str(models / "m1"), "weight_version": "7", "flush_cache": True}
        )
        assert not late.done()
        resumed = await client.post("/continue_generation", {})
        return update, resumed, await late, (await client.get("/model_info"))[1]

    update, resumed, (_, late), info = loop.run(play())
    message = "Succeeded to update model weights. Weight version updated to 7."
    assert update == (200, {"success": True, "message": message, "num_paused_requests": 0})
    assert resumed == (200, {"message": "Generation continued successfully.", "status": "ok"})
    assert late["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 6}]
    assert late["meta_info"]["cached_tokens"] == 0
    assert (info["weight_version"], info["model_path"], info["model_type"]) == ("7", str(models / "m1"), "qwen3")
    loop.run(client.post("/update_weights_from_disk", {"model_path": str(models / "m0"), "weight_version": "default"}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model_path": "/nowhere"}, "/nowhere is not a model directory"),
        ({"model_path": "EMPTY"}, "no readable config.json"),
        ({"model_path": "OTHER"}, "is another model"),
        ({"model_path": "M0", "flush_cache": False}, "flush_cache=false is refused"),
        ({"model_path": "M0", "weight_version": 3}, "weight_version is 3; it must be a string"),
    ],
)
def test_failed_updates_change_nothing(served, models, tmp_path, body, message):
    loop, client = served
    if body["model_path"] == "OTHER":
        hf.write_config(type(SPEC)(32, 16, 32, 2, 4, 2, 8, 1e4), tmp_path, "float32", 2)
        hf.save(hf.random_state(type(SPEC)(32, 16, 32, 2, 4, 2, 8, 1e4)), type(SPEC)(32, 16, 32, 2, 4, 2, 8, 1e4), tmp_path)
    paths = {"EMPTY": str(models / "empty"), "OTHER": str(tmp_path), "M0": str(models / "m0")}
    body = body | {"model_path": paths.get(body["model_path"], body["model_path"])}
    before = loop.run(client.get("/model_info"))
    status, answer = loop.run(client.post("/update_weights_from_disk", body))
    assert (status, answer["success"], answer["num_paused_requests"]) == (400, False, 0)
    assert message in answer["message"]
    assert loop.run(client.get("/model_info")) == before


def test_update_without_a_path_is_sglangs_validation_error(served):
    loop, client = served
    status, body = loop.run(client.post("/update_weights_from_disk", {}))
    assert (status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)
    assert "model_path" in body["message"]


def test_abort_by_id_and_all(served):
    loop, client = served

    async def play(body):
        await client.post("/pause_generation", {"mode": "retract"})
        task = asyncio.create_task(client.generate([1, 2], rid="gone"))
        await eventually(client.has_waiting)
        assert (await client.generate([1], rid="gone"))[1]["error"]["message"] == "Duplicate request ID detected: gone"
        assert await client.post("/abort_request", {"rid": "unknown"}) == (200, "")
        assert await client.post("/abort_request", body) == (200, "")
        status, answer = await task
        await client.post("/continue_generation", {})
        return status, answer["meta_info"]["finish_reason"]

    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert loop.run(play({"rid": "gone"})) == (200, aborted)
    assert loop.run(play({"rid": "", "abort_all": True})) == (200, aborted)


def test_a_client_that_goes_away_aborts_its_request(served):
    loop, client = served

    async def play():
        await client.post("/pause_generation", {"mode": "retract"})
        task = asyncio.create_task(client.generate([1, 2]))
        await eventually(client.has_waiting)
        task.cancel()
        await eventually(client.has_none_waiting)
        await client.post("/continue_generation", {})

    loop.run(asyncio.wait_for(play(), 30))


def test_flush_pause_modes_and_state(served):
    loop, client = served
    status, text = loop.run(client.post("/flush_cache"))
    assert status == 200
    assert text.startswith("Cache flushed.")
    status, body = loop.run(client.post("/pause_generation", {"mode": "in_place"}))
    assert status == 400
    assert "'in_place'" in body["error"]["message"]
    assert loop.run(client.get("/health_generate"))[0] == 200
    load = loop.run(client.get("/v1/loads"))[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (0, 0, 4)


def test_flush_while_busy(served):
    loop, client = served

    async def play():
        await client.post("/pause_generation", {"mode": "retract"})
        task = asyncio.create_task(client.generate([1, 2]))
        await eventually(client.has_waiting)
        busy = await client.post("/flush_cache")
        waiting = asyncio.create_task(client.post("/flush_cache?timeout=30"))
        await client.post("/continue_generation", {})
        await task
        return busy, (await waiting)[0]

    assert loop.run(play()) == ((400, "Flush cache failed.\n"), 200)


def test_mixed_load_over_http_compiles_nothing(served, models):
    loop, client = served

    async def play():
        before = (await client.get("/server_info"))[1]
        tasks = [client.generate([i + 1] * (1 + 5 * i % 30), new=1 + i, params={"temperature": i % 2}) for i in range(12)]
        for number in ("8", "9"):
            tasks.append(client.post("/update_weights_from_disk", {"model_path": str(models / "m1"), "weight_version": number}))
        answers = await asyncio.gather(*tasks)
        return before, answers, (await client.get("/server_info"))[1]

    before, answers, after = loop.run(play())
    assert [status for status, _ in answers] == [200] * 14
    assert after["weight_version"] == "9"
    assert before["compilations"] > 0
    assert after["compilations"] == before["compilations"]


# ---- the process ------------------------------------------------------------------------------------------


def launch(*arguments):
    command = [sys.executable, "-m", "learner.serving", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_process_serves_a_directory_without_weights_when_asked_and_ends_on_sigterm(tmp_path):
    hf.write_config(SPEC, tmp_path, "float32", 2)
    port = free_port()
    sizes = ["--slots", "2", "--max-length", "32", "--prefill-chunk", "4", "--prefill-slots", "1", "--decode-chunk", "2"]
    process = launch("--model-path", str(tmp_path), "--load-format", "dummy", "--port", str(port), *sizes, "--widths", "32")

    async def play():
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{port}", session)
            while True:
                try:
                    if (await client.get("/health"))[0] == 200:
                        break
                except aiohttp.ClientConnectionError:
                    assert process.poll() is None, process.stderr.read()
                await asyncio.sleep(0.1)
            return await client.generate([1, 2, 3], new=4), (await client.get("/server_info"))[1]

    try:
        (status, body), info = asyncio.run(asyncio.wait_for(play(), 250))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert (status, len(body["output_ids"]), body["meta_info"]["weight_version"]) == (200, 4, "default")
    assert (info["cache_slots"], info["compilations_after_warmup"]) == (8, 0)


def test_wrong_input_is_one_line_and_status_2(models, tmp_path):
    hf.write_config(SPEC, tmp_path, "float32", 2)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        cases = [
            (["--model-path", str(models / "empty")], "is not a model directory: no readable config.json"),
            (["--model-path", str(tmp_path)], "has no weights"),
            (["--model-path", str(models / "m0"), "--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--model-path", str(models / "m0"), "--max-length", "32", "--widths", "16,24"], "--widths '16,24' must be"),
            (["--model-path", str(models / "m0"), "--slots", "0"], "--slots is 0"),
        ]
        processes = [launch(*arguments) for arguments, _ in cases]
        for process, (_, message) in zip(processes, cases, strict=True):
            _, errors = process.communicate(timeout=250)
            assert process.returncode == 2
            assert errors.startswith("polyturn: error: ")
            assert message in errors
            assert errors.count("\n") == 1
