"""addresses.json of a run: where its programs listen. The launcher writes it, every program reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.files import replace_file

NAME = "addresses.json"
MAIN, STALE = "main", "stale"  # the pools of engines: with the newest weights, and with older ones on purpose
EVAL = "eval"  # of main, while an evaluation has it for itself


class AddressesError(ValueError):
    """A run's addresses.json cannot be read, or lacks what is looked for; one line with the fix."""


class EngineAddress(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    url: str  # http://host:port
    pool: str


class RelayAddress(BaseModel):
    """A host's relay, and the engines that it fetches weights for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    url: str  # http://host:port, https:// with TLS
    engines: list[str]


class Addresses(BaseModel):
    """gRPC addresses, and that of the learner's weight server, are `host:port`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learner: str
    engines: list[EngineAddress]
    router: str = ""  # http://host:port of the router in front of all engines; empty: there is none
    router_metrics: str = ""  # host:port of its Prometheus metrics
    envs: dict[str, list[str]]  # domain -> its replicas
    weights: str = ""  # empty: weights travel by disk, and there are no relays
    relays: list[RelayAddress] = []

    @classmethod
    def read(cls, run: Path) -> Addresses:
        """Raises AddressesError."""
        path = run / NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise AddressesError(f"{path}: {error.strerror}; start the run with tools/launch.py") from error
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"])) or "the file"
            raise AddressesError(f"{path}: {what}: {first['msg']}; start the run again with tools/launch.py") from error

    def write(self, run: Path) -> None:
        replace_file(run / NAME, self.model_dump_json(indent=2).encode())

    def replica(self, domain: str, index: int) -> str:
        """Raises AddressesError."""
        replicas = self.envs.get(domain)
        if replicas is None:
            raise AddressesError(f"{NAME} has no addresses for domain {domain!r}; start runs with tools/launch.py")
        if not 0 <= index < len(replicas):
            raise AddressesError(f"replica {index} of domain {domain!r}: {NAME} has {len(replicas)} of them, counted from 0")
        return replicas[index]

    def relay(self, index: int) -> tuple[RelayAddress, dict[str, str]]:
        """A relay, and its engines' urls by name. Raises AddressesError."""
        if not 0 <= index < len(self.relays):
            raise AddressesError(f'relay {index}: {NAME} has {len(self.relays)}, counted from 0; is weights.transport "relay"?')
        urls = {engine.name: engine.url for engine in self.engines}
        return self.relays[index], {name: urls[name] for name in self.relays[index].engines}

    def relay_of(self, engine: str) -> str:
        """Raises AddressesError."""
        for relay in self.relays:
            if engine in relay.engines:
                return relay.url
        raise AddressesError(f"{NAME} names no relay for {engine}; start the run again with tools/launch.py")
