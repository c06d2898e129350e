"""`python -m envserver --run RUN --domain NAME --replica I`: serve one replica of one domain of a run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common import cli, wire
from common.addresses import Addresses, AddressesError
from common.config import DomainConfig, RunConfig
from envserver.admission import build_catalog
from envserver.domains import load_domain
from envserver.env import Domain, DomainError
from envserver.memory import with_memory
from envserver.server import EnvServer, Settings

log = logging.getLogger("envserver")


def domain_config(config: RunConfig, name: str) -> DomainConfig:
    for domain in config.domains:
        if domain.name == name:
            return domain
    raise DomainError(f"domain {name!r} is not in this run's config; it has: {', '.join(d.name for d in config.domains)}")


async def serve(domain: Domain, config: DomainConfig, settings: Settings, run: Path) -> None:
    """Serve until SIGTERM or SIGINT. Memory comes after admission, which is about the domain alone."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sizes = {"train": config.train_tasks, "heldout": config.heldout_tasks}
    catalog = build_catalog(domain, sizes, config.admission)
    domain = with_memory(domain, config, run, {task.id for task in catalog.tasks["train"]})
    server = EnvServer(domain, catalog, settings)
    await server.start()
    log.info("serving %s on port %d: %d sessions, leases of %.0f s", config.name, server.port, config.capacity, config.lease_s)
    await stop.wait()
    log.info("draining: %d sessions are open", len(server.sessions))
    await server.drain()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envserver", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with config.toml and addresses.json")
    parser.add_argument("--domain", required=True, help="name of one of the run's [[domains]]")
    parser.add_argument("--replica", type=int, default=0, help="which of the domain's addresses to bind")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run = cli.load(arguments.run / "config.toml")
        config = domain_config(run, arguments.domain)
        settings = Settings(
            address=Addresses.read(arguments.run).replica(config.name, arguments.replica),
            capacity=config.capacity,
            threads=config.threads,
            lease_s=config.lease_s,
            late_s=config.limits.deadline_s,
            tls=wire.Tls(run.tls.cert, run.tls.key, run.tls.ca),
        )
        domain = load_domain(config.name, config.options, config.instructions)
        asyncio.run(serve(domain, config, settings, arguments.run))
    except (cli.ConfigError, AddressesError, DomainError, wire.PortBusy, FileNotFoundError) as error:  # the last: files of `tls`
        print("polyturn: error: " + " | ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
