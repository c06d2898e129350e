"""`python -m actors.relay --run RUN --index I`: the relay of one host of a run.

SIGTERM gives the host's memory back; after a kill, the next start goes on with what lies there.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
import zlib
from pathlib import Path
from urllib.parse import urlsplit

from actors.relay.server import Relay, serve
from actors.relay.versions import FolderError, Versions
from common import cli, keys
from common.addresses import Addresses, AddressesError
from common.config import RunConfig
from common.wire import PortBusy, Tls, client_context, server_context

log = logging.getLogger("actors.relay")


def folder_of(run: Path, config: RunConfig, relay: str) -> Path:
    """Where `relay` keeps versions: its own, also among runs of the same name in other folders."""
    number = zlib.crc32(str(run.resolve()).encode())
    return Path(config.weights.folder) / f"polyturn-{config.name}-{number:08x}-{relay}"


def bind(url: str) -> socket.socket:
    """Raises PortBusy."""
    parts = urlsplit(url)
    try:
        return socket.create_server((parts.hostname or "", parts.port or 0))
    except OSError as error:
        raise PortBusy(
            f"cannot listen on {parts.netloc}: {error.strerror}; stop the other process or start the run anew"
        ) from error


async def work(run: Path, config: RunConfig, index: int) -> None:
    """Until SIGTERM. Raises AddressesError, PortBusy, FolderError."""
    address, engines = Addresses.read(run).relay(index)
    tls, key = Tls(**config.tls.model_dump()), keys.of_run(run, config)
    door = bind(address.url)
    folder = folder_of(run, config, address.name)
    versions = Versions(folder, client_context(tls))
    relay = Relay(engines, versions, key)
    runner = await serve(relay, door, server_context(tls) if tls.cert else None)
    ending = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, ending.set)
    log.info("%s: listening at %s for %s, folder %s", address.name, address.url, ", ".join(engines), folder)
    await ending.wait()
    await runner.cleanup()
    await relay.close()
    await versions.close(remove=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors.relay", description="Brings a run's weights to one host of engines.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder; of it config.toml, addresses.json and the key")
    parser.add_argument("--index", type=int, default=0, help="which of the run's relays this is")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(work(arguments.run, cli.load(arguments.run / "config.toml"), arguments.index))
    except (cli.ConfigError, AddressesError, FolderError, PortBusy) as error:
        return cli.refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
