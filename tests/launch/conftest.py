import pytest

from tests.launch.stage import Stage
from tests.processes import left_clean


@pytest.fixture
def stage(tmp_path):
    yield from left_clean(Stage(tmp_path))
