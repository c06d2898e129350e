"""`python -m learner.serving --model-path DIR --port P ...`: one embedded engine.

Arguments, the model directory and the port are checked before JAX is imported. Exit status 2: wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

from common import keys
from learner.model.spec import ModelError, ModelSpec, eos_ids, read_config

log = logging.getLogger("learner.serving")
SHUTDOWN_S = 3.0


class UsageError(ValueError):
    """The command line cannot be served; the message is one line with the value and the fix."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Raises UsageError for sizes that do not fit each other."""
    parser = argparse.ArgumentParser(
        prog="python -m learner.serving", description="An inference engine for Polyturn's own model."
    )
    parser.add_argument("--model-path", required=True, help="directory with config.json and, unless the format is dummy, weights")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--slots", type=int, default=64, help="requests decoded together")
    parser.add_argument(
        "--cache-slots", type=int, default=0, help="sequences kept in the cache between turns; 0: four times --slots"
    )
    parser.add_argument("--max-length", type=int, default=320, help="tokens of one sequence, prompt and output")
    parser.add_argument("--decode-chunk", type=int, default=8, help="decode steps per dispatch")
    parser.add_argument("--prefill-chunk", type=int, default=64, help="prompt tokens per slot and dispatch")
    parser.add_argument("--prefill-slots", type=int, default=8, help="slots per prefill dispatch")
    parser.add_argument("--widths", default="", help="attended widths, rising, the last is --max-length; comma-separated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--api-key-file", type=Path, help="file with the key that every call but /health needs; none: no key")
    parser.add_argument("--weight-version", default="default", help="reported until the first update")
    args = parser.parse_args(arguments)
    for name in ("slots", "max_length", "decode_chunk", "prefill_chunk", "prefill_slots"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    args.cache_slots = args.cache_slots or 4 * args.slots
    if args.cache_slots < args.slots:
        raise UsageError(f"--cache-slots {args.cache_slots} is below --slots {args.slots}; every running request needs one")
    args.widths = _widths(args.widths or str(args.max_length), args.max_length)
    return args


def _widths(text: str, max_length: int) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or widths[0] < 1 or list(widths) != sorted(set(widths)) or widths[-1] != max_length:
        raise UsageError(f"--widths {text!r} must be positive integers that rise and end at --max-length {max_length}")
    return widths


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises UsageError for a busy port."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop the other process or set another --port"
        ) from error
    return sock


async def serve(args: argparse.Namespace, spec: ModelSpec, eos: tuple[int, ...], sock: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT (0), or until the engine's thread dies (1)."""
    from aiohttp import web

    from learner.serving.api import Served, Server
    from learner.serving.programs import EngineShape

    shape = EngineShape(
        args.slots, args.cache_slots, args.max_length, args.decode_chunk, args.prefill_slots, args.prefill_chunk, args.widths
    )
    served = Served(spec, eos, shape, args.dtype, args.model_path, args.load_format, args.weight_version)
    server = Server(_model(args, spec), served)
    runner = web.AppRunner(server.app(args.key), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server.start()
    log.info("listening on %s:%d", *sock.getsockname()[:2])
    while server.engine.alive and not stopping.is_set():
        try:
            await asyncio.wait_for(stopping.wait(), timeout=1.0)
        except TimeoutError:
            continue
    if not server.engine.alive:
        log.error("the engine's thread has died; its traceback is above")
        return 1
    server.engine.abort(None)  # clients get the tokens made so far
    await runner.cleanup()
    server.close()
    return 0


def _model(args: argparse.Namespace, spec: ModelSpec):  # noqa: ANN202 - the type would import JAX
    from learner.model import hf

    if args.load_format == "dummy":
        params = hf.stored(hf.random_state(spec), args.dtype)
    else:
        params = hf.on_device(hf.read(args.model_path)[1], args.dtype)
    return hf.build_stored(spec, params, args.dtype)


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it looks for TPUs, and says so when there are none
    try:
        args = parse(arguments)
        args.key = keys.read(args.api_key_file) if args.api_key_file else ""
        config = read_config(args.model_path)
        spec = ModelSpec.from_hf(config)
        if args.load_format == "auto" and not list(Path(args.model_path).glob("*.safetensors")):
            raise ModelError(f"{args.model_path} has no weights (*.safetensors); copy them there, or use --load-format dummy")
        with bind(args.host, args.port) as sock:
            return asyncio.run(serve(args, spec, eos_ids(config), sock))
    except (UsageError, ModelError, keys.KeyFileError) as error:
        print(f"polyturn: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
