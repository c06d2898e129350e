import pytest

from tests.launch.stage import Stage


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    left = stage.alive()
    stage.close()
    assert left == []
