"""The learner's loop: evaluations begin when a real publisher serves their version; when a warm start ends."""

import threading
from pathlib import Path
from types import SimpleNamespace

from common.config import RunConfig
from learner import main
from tests.fakes import FakeEngine
from tests.publish.calls import save, weights
from tests.publish.test_publisher import publishing


class Control:
    """Records what the loop does. `done` warm updates were made before a resume."""

    def __init__(self, done=0):
        self.ledger = SimpleNamespace(warm_update=done)
        self.evaluation = SimpleNamespace(results=[])
        self.evaluated = []
        self.abandoned = []

    def published(self, version, update):
        pass

    def start_warm(self):
        pass

    def take(self, timeout):
        return SimpleNamespace(trajectories=[])

    def commit(self, batch):
        self.ledger.warm_update += 1

    def abandon(self, batch, reason):
        self.abandoned.append(reason)

    def evaluate(self, phase, version, stop):
        self.evaluated.append((phase, version))
        return []


def run_over(publisher, control) -> main.Run:
    config = RunConfig.model_validate(
        {"name": "x", "model": {"tokenizer": "configs/tokenizers/tiny"}, "domains": [{"name": "frozenlake"}]}
    )
    trainer = SimpleNamespace(policy=weights(1))
    return main.Run(config, Path(), None, control, trainer, publisher, None, None, lambda: False)  # type: ignore[arg-type]


def test_an_evaluation_waits_for_a_version_that_is_still_being_written(tmp_path):
    written = threading.Event()

    def slow_save(params, directory):
        written.wait(20)
        save(params, directory)

    control = Control()
    with FakeEngine() as engine, publishing(tmp_path, [engine], save=slow_save) as publisher:
        run = run_over(publisher, control)
        main.publish(run)
        later = threading.Timer(0.2, written.set)
        later.start()
        main.evaluate(run, "rl")
        later.join()
        assert control.evaluated == [("rl", 1)]
        assert engine.weight_version == "1"


class Supervised:
    """A trainer whose supervised updates have the given losses, the last of them for ever; None is a skipped update."""

    def __init__(self, *losses):
        self.losses = list(losses)
        self.rates = []

    def supervised(self, rollouts, lr):
        self.rates.append(lr)
        loss = self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]
        return {"skipped_nonfinite": 1.0} if loss is None else {"skipped_nonfinite": 0.0, "loss": loss}


def warmed(*losses, target=0.0, updates=30, done=0, cooldown=0):
    """Supervised updates that a warm start makes in all, its control, its events and the learning rates of the updates."""
    control, folder = Control(done), SimpleNamespace(events=[])
    folder.event = lambda kind, fields: folder.events.append((kind, fields))
    run = run_over(None, control)
    fields = {"updates": updates, "target_loss": target, "cooldown": cooldown, "lr": 1.0}
    config = run.config.model_copy(update={"warm": run.config.warm.model_copy(update=fields)})
    run.config, run.folder, run.trainer = config, folder, Supervised(*losses)
    main.warm_start(run)
    return control.ledger.warm_update, control, folder.events, run.trainer.rates


def test_a_warm_start_ends_when_the_mean_loss_of_eight_updates_is_below_its_target():
    # The mean of the newest 8: after update 12 it is (4·1 + 4·0)/8 = 0.5, after 13 it is 3/8.
    made, _, events, _ = warmed(*[1.0] * 8, 0.0, target=0.5)
    assert made == 13
    assert events == [("warm_target", {"updates": 13, "loss": 0.375})]
    assert warmed(0.1, target=0.5)[0] == 8  # never on less than 8
    assert warmed(0.1, target=0.0)[0] == 30
    assert warmed(float("nan"), target=0.5)[0] == 30


def test_a_resumed_warm_start_makes_what_is_left_and_counts_no_skipped_update():
    made, control, *_ = warmed(1.0, None, None, 1.0, updates=5, done=2)
    assert made == 5
    assert control.abandoned == ["nonfinite_gradient"] * 2
    assert warmed(1.0, updates=5, done=5)[0] == 5


def test_the_learning_rate_falls_over_the_cooldown_that_follows_the_target_loss():
    # left / (cooldown + 1), at most 1: 3/4, 2/4, 1/4 after the 13 updates of the test above.
    made, *_, rates = warmed(*[1.0] * 8, 0.0, target=0.5, cooldown=3)
    assert (made, rates) == (16, [1.0] * 13 + [0.75, 0.5, 0.25])


def test_without_a_target_loss_the_last_updates_are_the_cooldown():
    made, *_, rates = warmed(1.0, updates=5, cooldown=2)
    assert (made, rates) == (5, [1.0, 1.0, 1.0, 2 / 3, 1 / 3])
    made, *_, rates = warmed(0.1, target=0.5, updates=9, cooldown=4)  # the target is met in the cooldown: nothing is added
    assert (made, rates) == (9, [1.0] * 5 + [4 / 5, 3 / 5, 2 / 5, 1 / 5])
    made, *_, rates = warmed(1.0, updates=5, done=3, cooldown=3)  # a resume goes on in the middle of it
    assert (made, rates) == (5, [2 / 4, 1 / 4])
