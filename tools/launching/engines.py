"""Command lines of inference engines, and of the router in front of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from common import keys
from common.addresses import Addresses
from common.config import RunConfig
from common.config_engine import EngineConfig

UNSCALED = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # an environment variable of SGLang's
SERVE_ON_CPU = Path(__file__).parents[1] / "sglang_cpu" / "serve.py"
# Stock SGLang's server has no kernels of its own for a CPU: torch's attention, no grammars, nothing overlapped.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup"),
    "--sleep-on-idle",  # else a scheduler without requests takes a whole core
)
# Who is a worker is the learner's word alone, and who tries again the actors': the router does neither by itself. An engine that
# the learner added and that has died since is not waited for. Prompts of ids are matched by prefix: a rollout stays where it was.
ROUTER_FLAGS = (
    *("--policy", "cache_aware", "--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
    *("--worker-startup-timeout-secs", "30", "--worker-startup-check-interval", "1", "--log-level", "warn"),
)


def problem(engine: EngineConfig) -> str:
    """Why these engines, or their router, cannot be started here; empty when they can."""
    return _engine_problem(engine) or (_router_problem(engine) if engine.router else "")


def _router_problem(engine: EngineConfig) -> str:
    key, python = ("engine.router_python", engine.router_python) if engine.router_python else ("engine.python", engine.python)
    fix = "`make sglang` builds an environment that has it, name its Python by --engine.router_python=..."
    if not python:
        return "" if importlib.util.find_spec("sglang_router") else f"engine.router: no sglang_router in this Python; {fix}"
    if not Path(python).is_file():
        return f"{key} = {python!r}: no such file; {fix}"
    if not any(Path(python).parents[1].glob("lib/python*/site-packages/sglang_router")):
        return f"engine.router: there is no sglang_router in the environment of {key} = {python!r}; {fix}"
    return ""


def router_command(engine: EngineConfig, addresses: Addresses) -> tuple[str, ...]:
    """It starts without workers: the learner adds an engine when that serves what was published."""
    (host, port), (_, metrics) = addresses.router.removeprefix("http://").split(":"), addresses.router_metrics.split(":")
    places = ("--host", host, "--port", port, "--prometheus-host", host, "--prometheus-port", metrics)
    python = engine.router_python or engine.python or sys.executable
    return (python, "-m", "sglang_router.launch_router", *places, *ROUTER_FLAGS)


def _engine_problem(engine: EngineConfig) -> str:
    if engine.kind != "sglang":
        return ""
    if os.environ.get(UNSCALED, "").lower() in ("1", "true"):
        return f"{UNSCALED} is set: SGLang would return logprobs from before the temperature, which bias every ratio; unset it"
    if not engine.python:
        if importlib.util.find_spec("sglang"):
            return ""
        return (
            'engine.kind = "sglang": sglang is not installed in this Python; `make sglang` builds an environment for it, '
            "name its Python by --engine.python=..., or set --engine.kind=embedded"
        )
    python = Path(engine.python)
    if not python.is_file():
        return (
            f"engine.python = {engine.python!r}: no such file; name the Python of SGLang's environment (`make sglang` builds one)"
        )
    if not any(python.parents[1].glob("lib/python*/site-packages/sglang")):
        return f"engine.python = {engine.python!r}: there is no sglang in its environment; `make sglang` builds one"
    return ""


def command(config: RunConfig, run: Path, url: str, accelerator: bool) -> tuple[str, ...]:
    """Engines start with random weights: version 0, which no rollout uses; the learner publishes version 1."""
    engine, (host, port) = config.engine, url.removeprefix("http://").rsplit(":", 1)
    common = ("--model-path", str(run / "model"), "--load-format", "dummy", "--host", host, "--port", port)
    if engine.kind == "sglang":
        python = engine.python or sys.executable
        start = (python, "-m", "sglang.launch_server") if accelerator else (python, str(SERVE_ON_CPU))
        sizes = ("--context-length", str(engine.max_length), "--max-running-requests", str(engine.slots))
        room = () if accelerator else (*CPU_FLAGS, "--max-total-tokens", str(engine.slots * engine.max_length))
        # By a file, not an argument that every `ps` shows; at its usual level SGLang logs all that it was started with.
        key = ("--config", str(run / keys.NAME), "--log-level", "warning") if config.keyed else ()
        return (*start, *common, *key, "--skip-tokenizer-init", "--dtype", config.model.dtype, *sizes, *room, *engine.args)
    sizes = {
        "--slots": engine.slots,
        "--max-length": engine.max_length,
        "--decode-chunk": engine.decode_chunk,
        "--prefill-chunk": engine.prefill_chunk,
        "--prefill-slots": engine.prefill_slots,
        "--widths": ",".join(map(str, engine.widths)),
        "--dtype": config.model.dtype,
    }
    key = ("--api-key-file", str(run / keys.NAME)) if config.keyed else ()
    return (sys.executable, "-m", "learner.serving", *common, *key, *(text for pair in sizes.items() for text in map(str, pair)))
