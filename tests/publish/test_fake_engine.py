"""The fake engine obeys the rules that SGLang was measured to have; other tests rely on it."""

import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from learner.engine_api import EngineApi, EngineError, EngineGone, EngineSilent
from tests.fakes import DROP, HANG, Answer, FakeEngine
from tests.processes import until
from tests.publish.calls import TIGHT, generate, in_background


@pytest.fixture
def engine():
    with FakeEngine(slots=8, token_s=0.002) as running:
        yield running


def test_generates_and_reports_spans(engine):
    answer = generate(engine.url, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "rid": "a"})
    assert answer["output_ids"] == [7, 8, 9]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    stopped = generate(engine.url, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 9, "stop_token_ids": [8]}})
    assert stopped["output_ids"] == [7, 8]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 8}
    assert stopped["meta_info"]["cached_tokens"] == 1  # one token is always computed


def test_flush_is_refused_while_busy(engine):
    engine.token_s = 0.05
    with in_background(generate, engine.url, {"input_ids": [1], "sampling_params": {"max_new_tokens": 30}}) as running:
        until(lambda: engine.running, "the request runs")
        with pytest.raises(EngineError, match="/flush_cache answered 400: Flush cache failed"):
            EngineApi(engine.url).flush_cache()
        EngineApi(engine.url).abort_all()
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    EngineApi(engine.url).flush_cache()


def test_errors_say_which_call_and_why(engine):
    api = EngineApi(engine.url, TIGHT)
    engine.script("/update_weights_from_disk", Answer(400, {"success": False, "message": "Failed to load\nsecond line"}))
    with pytest.raises(EngineError, match=r"^/update_weights_from_disk answered 400: Failed to load$"):
        api.update_weights(Path("/nowhere"), 3)
    assert engine.calls[-1][1] == {
        "model_path": "/nowhere",
        "weight_version": "3",
        "flush_cache": True,
        "load_format": "safetensors",
    }
    engine.script("/pause_generation", Answer(400, {"error": {"message": "no such mode"}}))
    with pytest.raises(EngineError, match="no such mode"):
        api.pause()
    engine.script("/model_info", HANG)
    with pytest.raises(EngineSilent, match=r"/model_info: no answer within 1 s"):
        api.weight_version()
    engine.script("/model_info", DROP)
    with pytest.raises(EngineGone, match=engine.url):
        api.weight_version()
    engine.healthy = False
    with pytest.raises(EngineGone, match="503"):
        api.health()
    engine.stop()
    with pytest.raises(EngineGone, match="ConnectionRefusedError"):
        api.weight_version()


def test_an_update_that_answers_without_success_is_an_error(engine):
    engine.script("/update_weights_from_disk", Answer(200, {"success": False, "message": "shape mismatch"}))
    with pytest.raises(EngineError, match="shape mismatch"):
        EngineApi(engine.url).update_weights(Path("/x"), 1)


def test_a_model_info_without_version_is_an_error(engine):
    engine.script("/model_info", Answer(200, {"model_path": "x"}))
    with pytest.raises(EngineError, match="no weight_version"):
        EngineApi(engine.url).weight_version()
    with pytest.raises(ValueError, match="http://host:port"):
        EngineApi("127.0.0.1:1")


def test_a_server_that_dribbles_meets_the_deadline():
    """A byte every 20 ms: no read ever waits long, the answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dribble():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)

        with in_background(dribble), pytest.raises(EngineSilent, match="no answer within 1 s"):
            EngineApi(f"http://127.0.0.1:{server.getsockname()[1]}", TIGHT).server_info()
