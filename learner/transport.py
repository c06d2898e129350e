"""How published weights reach engines: by a disk that both see, or by a relay on each engine's host.

The publisher is the same; it asks the transport for the client of each engine.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from common import keys
from common.addresses import Addresses
from common.config import RunConfig
from common.types import EngineInfo
from common.wire import Tls, client_context
from learner.engine_api import Deadlines, EngineApi, EngineError
from learner.weight_server import WeightServer

SLACK_S = 5.0  # the relay answers by the deadline, with what it has so far: it is heard out


class DiskTransport:
    """Engines open the learner's files."""

    def __init__(self, key: str = "") -> None:
        self._key = key

    def connect(self, engine: EngineInfo, deadlines: Deadlines) -> EngineApi:
        return EngineApi(engine.url, deadlines, self._key)

    def close(self) -> None:
        pass


class RelayTransport:
    """Serves `weights` at `address`, and speaks to engines through their relays. Raises PortBusy."""

    def __init__(self, weights: Path, addresses: Addresses, key: str = "", tls: Tls = Tls()) -> None:
        self._addresses, self._key = addresses, key
        self._tls = client_context(tls)
        self.server = WeightServer(weights, addresses.weights, tls)

    def connect(self, engine: EngineInfo, deadlines: Deadlines) -> EngineApi:
        """Raises AddressesError for an engine without a relay."""
        url = f"{self._addresses.relay_of(engine.name)}/{engine.name}"
        direct = EngineApi(engine.url, deadlines, self._key)
        return RelayApi(url, self.server.url, direct, self._tls)

    def close(self) -> None:
        self.server.close()


Transport = DiskTransport | RelayTransport


class RelayApi(EngineApi):
    """An engine behind the relay of its host: `url` is the relay's, with the engine's name. Relays pass no /generate on: a canary
    goes to the engine itself, the way that rollouts do."""

    def __init__(self, url: str, source: str, direct: EngineApi, tls: ssl.SSLContext | None) -> None:
        super().__init__(url, direct.deadlines, direct.key, tls)
        self._source, self._direct = source, direct

    def call(self, method: str, path: str, timeout: float, body: dict[str, Any] | None = None) -> Any:
        return (self._direct.call if path == "/generate" else super().call)(method, path, timeout, body)

    def prepare(self, directory: Path, version: int) -> str:
        """Have the relay fetch `version`; the path at which it lies on the engine's host."""
        body = {"version": version, "source": self._source, "deadline_s": self.deadlines.fetch_s}
        answer = self.call("POST", "/fetch", self.deadlines.fetch_s + SLACK_S, body)
        if not isinstance(answer, dict) or not isinstance(answer.get("path"), str):
            raise EngineError("/fetch", 200, "no path in the answer; is this a relay?")
        return answer["path"]


def transport_of(config: RunConfig, addresses: Addresses, run: Path) -> Transport:
    """As the configuration chooses. Raises AddressesError, PortBusy."""
    key = keys.of_run(run, config)
    if config.weights.transport == "disk":
        return DiskTransport(key)
    (run / "weights").mkdir(exist_ok=True)
    return RelayTransport(run / "weights", addresses, key, Tls(**config.tls.model_dump()))
