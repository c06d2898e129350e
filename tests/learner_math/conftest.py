"""Float64 for tests of exact numbers."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
