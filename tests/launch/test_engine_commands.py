"""How engines are started: by kind, and by what the machine has."""

import sys
from pathlib import Path

from common.cli import load
from tests.launch.stage import REPOSITORY
from tools.launching import engines, preflight

RUN, URL = Path("/runs/x"), "http://127.0.0.1:4000"
COMMON = ("--model-path", "/runs/x/model", "--load-format", "dummy", "--host", "127.0.0.1", "--port", "4000")


def config(*overrides):
    return load(REPOSITORY / "configs" / "smoke_sglang.toml", list(overrides))


def test_sglang_on_an_accelerator():
    made = engines.command(config("--engine.python=/s/bin/python", '--engine.args=["--tp","2"]'), RUN, URL, True)
    assert made[:3] == ("/s/bin/python", "-m", "sglang.launch_server")
    assert made[3 : 3 + len(COMMON)] == COMMON
    assert made[-2:] == ("--tp", "2")
    assert "--device" not in made
    assert made[made.index("--max-running-requests") + 1] == "64"
    assert made[made.index("--context-length") + 1] == "192"
    assert engines.command(config(), RUN, URL, True)[0] == sys.executable


def test_sglang_on_a_cpu():
    made = engines.command(config("--engine.python=/s/bin/python"), RUN, URL, False)
    assert made[:2] == ("/s/bin/python", str(REPOSITORY / "tools" / "sglang_cpu" / "serve.py"))
    assert Path(made[1]).is_file()
    assert made[made.index("--device") + 1] == "cpu"
    assert made[made.index("--dtype") + 1] == "float32"
    assert made[made.index("--max-total-tokens") + 1] == str(64 * 192)


def test_a_key_reaches_engines_by_a_file():
    """No `ps` shows it, and SGLang does not log it: at its usual level it logs all that it was started with."""
    key, relay = str(RUN / "engine_key.yaml"), "--weights.transport=relay"
    made = engines.command(config(relay), RUN, URL, True)
    assert made[made.index("--config") + 1] == key
    assert made[made.index("--log-level") + 1] == "warning"
    assert "--config" not in engines.command(config(), RUN, URL, True)
    made = engines.command(load(REPOSITORY / "configs" / "smoke.toml", [relay]), RUN, URL, False)
    assert made[made.index("--api-key-file") + 1] == key


def test_the_embedded_engine():
    made = engines.command(load(REPOSITORY / "configs" / "smoke.toml"), RUN, URL, False)
    assert made[:3] == (sys.executable, "-m", "learner.serving")
    assert made[made.index("--widths") + 1] == "64,128,192"


def test_the_router_stands_behind_no_worker_that_the_learner_has_not_named():
    settings = config("--engine.router=true", "--engine.count=2", "--engine.python=/s/bin/python", "--host=127.0.0.1")
    addresses = preflight.choose_addresses(settings)
    programs = {program.name: program for program in preflight.programs(settings, RUN, addresses, [])}
    made = programs["router"].argv
    assert made[:3] == ("/s/bin/python", "-m", "sglang_router.launch_router")
    port, metrics = made[made.index("--port") + 1], made[made.index("--prometheus-port") + 1]
    assert (f"http://127.0.0.1:{port}", f"127.0.0.1:{metrics}") == (addresses.router, addresses.router_metrics)
    assert len({port, metrics, *(engine.url.rpartition(":")[2] for engine in addresses.engines)}) == 4
    assert "--disable-retries" in made
    assert "--worker-urls" not in made
    assert engines.router_command(config("--engine.router=true", "--engine.router_python=/r/python").engine, addresses)[0] == (
        "/r/python"
    )
    assert "router" not in {p.name for p in preflight.programs(config(), RUN, preflight.choose_addresses(config()), [])}


def test_an_environment_that_makes_sglang_return_unscaled_logprobs_is_refused(monkeypatch):
    settings = config(f"--engine.python={sys.executable}").engine
    assert engines.UNSCALED not in engines.problem(settings)
    for value, refused in (("1", True), ("True", True), ("0", False)):
        monkeypatch.setenv(engines.UNSCALED, value)
        assert (engines.UNSCALED in engines.problem(settings)) == refused
    assert engines.problem(load(REPOSITORY / "configs" / "smoke.toml").engine) == ""
