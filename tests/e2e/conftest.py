import pytest

from tests.e2e.launched import Launched
from tests.processes import left_clean


@pytest.fixture
def launched(tmp_path):
    yield from left_clean(Launched(tmp_path))
