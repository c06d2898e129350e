import pytest

from tests.fakes import FakeEngine


@pytest.fixture
def engine():
    with FakeEngine() as running:
        yield running
