import pytest

from tests.e2e.launched import Launched
from tests.processes import left_clean


@pytest.fixture
def launched(tmp_path):
    yield from left_clean(Launched(tmp_path))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Environment with which programs that one process compiled need not be compiled by the next."""
    folder = tmp_path_factory.mktemp("compiled")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
