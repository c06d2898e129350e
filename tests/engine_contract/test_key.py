"""Who may call an engine that was started with a key."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from learner.engine_api import EngineApi, EngineError
from tests.engine_contract.conftest import Served

POSTS = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/abort_request", "/flush_cache")
GETS = ("/model_info", "/server_info", "/v1/loads")  # SGLang's server_info would tell the key


@pytest.mark.parametrize("shown", ["", "another"])
def test_without_the_key_only_health_answers(engine: Served, shown: str) -> None:
    stranger = EngineApi(engine.url, key=shown)
    stranger.health()
    for method, paths in (("POST", POSTS), ("GET", GETS)):
        for path in paths:
            with pytest.raises(EngineError, match="Unauthorized") as refusal:
                stranger.call(method, path, 20, {} if method == "POST" else None)
            assert refusal.value.status == 401, path
    assert engine.api.weight_version() == "1"


def test_with_the_key_everybody_is_heard(engine: Served) -> None:
    request = urllib.request.Request(f"{engine.url}/v1/loads", headers={"Authorization": f"Bearer {engine.key}"})
    assert json.load(urllib.request.urlopen(request, timeout=20))["loads"]
    request.headers["Authorization"] = f"Basic {engine.key}"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=20)


def test_the_key_is_in_no_log_and_no_command_line(engine: Served) -> None:
    assert engine.key not in engine.log.read_text()
    assert engine.key not in " ".join(map(str, engine.process.args))
