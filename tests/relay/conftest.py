import pytest

from learner.weight_server import WeightServer
from tests.fakes import FakeEngine
from tests.relays import RelayThread, Wire

PART = 100_000


@pytest.fixture
def engine():
    with FakeEngine() as running:
        yield running


@pytest.fixture
def source(tmp_path):
    """A weight server over `weights`, with small parts."""
    (tmp_path / "weights").mkdir()
    server = WeightServer(tmp_path / "weights", "127.0.0.1:0", part_bytes=PART)
    yield server
    server.close()


@pytest.fixture
def wire(source):
    with Wire(source.url) as between:
        yield between


@pytest.fixture
def relay(tmp_path, engine):
    with RelayThread(tmp_path / "host", {"engine-0": engine.url, "engine-1": engine.url}) as running:
        yield running
