import pytest

from tests.e2e.launched import Launched


@pytest.fixture
def launched(tmp_path):
    launched = Launched(tmp_path)
    yield launched
    left = launched.alive()
    launched.close()
    assert left == []
