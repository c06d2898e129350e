"""Float64 for tests of exact numbers, and trainers that are compiled once for all tests."""

import jax
import pytest

from learner.update import Trainer
from tests.learner_math.build import SPEC, config


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


class Fresh:
    """A trainer that every test finds as it was built; compiled once."""

    def __init__(self, **tables):
        self.trainer = Trainer(config(**tables), SPEC)
        self.start = self.trainer.state_tree()

    def __call__(self) -> Trainer:
        self.trainer.restore_tree(self.start)
        self.trainer._bad_updates = 0
        return self.trainer


@pytest.fixture(scope="session")
def grpo_fresh():
    tables = {
        "algorithm": {"minibatches": 2, "epochs": 2, "entropy": 0.01},
        "optimizer": {"lr": 1e-2, "max_skips": 2},
    }
    return Fresh(**tables)


@pytest.fixture
def grpo(grpo_fresh):
    return grpo_fresh()


@pytest.fixture(scope="session")
def ppo_fresh():
    return Fresh(
        algorithm={"advantage": "gae", "critic": "shared", "minibatches": 1, "normalize": "batch"}, optimizer={"lr": 1e-2}
    )


@pytest.fixture
def ppo(ppo_fresh):
    return ppo_fresh()
