"""The learner's loop: evaluations begin when a real publisher serves their version; when a warm start ends."""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config import RunConfig
from common.waits import Waits
from learner import main
from learner.__main__ import is_disk
from learner.batch import Batch, Lag
from learner.lengths import Lengths
from learner.publisher import PublishError
from learner.rollouts import Kind
from learner.update import TrainingStopped
from tests.fakes import FakeEngine
from tests.publish.calls import canary, save, weights
from tests.publish.test_publisher import publishing


class Control:
    """Records what the loop does. `done` warm updates were made before a resume."""

    def __init__(self, done=0, results=()):
        self.waits, self.incarnation = Waits(), 1
        self.deliveries = {"stored": 0}
        self.results = list(results)  # of the evaluations to come; none: all are late
        self.ledger = SimpleNamespace(warm_update=done)
        self.evaluation = SimpleNamespace(results=[])
        self.evaluated, self.weights = [], []
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

    def evaluate(self, phase, version, stop, weights):
        self.weights.append(weights)
        self.evaluated.append((phase, version))
        found = self.results.pop(0) if self.results else []
        self.evaluation.results += found
        return found

    def state(self):
        return {"warm": self.ledger.warm_update}

    def committed(self, state):
        pass

    def status(self):
        return {"sentence": "learner waits for 1 group"}


class Checkpoints:
    """Steps that were saved, and the control state in each."""

    def __init__(self):
        self.saved = []

    def wait(self):
        pass

    def save(self, step, arrays, state):
        self.saved.append((step, state["control"]))
        return True


def run_over(publisher, control) -> main.Run:
    config = RunConfig.model_validate(
        {"name": "x", "model": {"tokenizer": "configs/tokenizers/tiny"}, "domains": [{"name": "frozenlake"}]}
    )
    trainer = SimpleNamespace(snapshot=lambda ids: (weights(1), canary()), published=lambda version: None)
    publisher = publisher or SimpleNamespace(check=lambda: None)
    return main.Run(config, Path(), None, control, trainer, publisher, Checkpoints(), None, lambda: False)  # type: ignore[arg-type]


def entry(phase="rl", version=1):
    return {"phase": phase, "domain": "toy", "mode": "greedy", "success": 1.0, "ci95": [0.9, 1.0], "n": 9, "version": version}


def test_an_evaluation_waits_for_a_version_that_is_still_being_written(tmp_path):
    written = threading.Event()

    def slow_save(params, directory):
        written.wait(20)
        save(params, directory)

    control = Control(results=[[entry()]])
    with FakeEngine() as engine, publishing(tmp_path, [engine], save=slow_save) as publisher:
        run = run_over(publisher, control)
        main.publish(run)
        later = threading.Timer(0.2, written.set)
        later.start()
        main.evaluate(run, "rl")
        later.join()
        assert control.evaluated == [("rl", 1)]
        assert engine.weight_version == "1"


def test_a_late_evaluation_is_made_once_more_and_then_left_out(tmp_path):
    with FakeEngine() as engine, publishing(tmp_path, [engine]) as publisher:
        for results, tries in (([[], [entry()]], 2), ([], 2), ([[entry()]], 1)):
            control = Control(results=results)
            run = run_over(publisher, control)
            main.publish(run)
            assert main.evaluate(run, "rl") == (results[-1] if results else [])
            assert control.evaluated == [("rl", run.version)] * tries


class Sometimes:
    """A trainer whose policy updates have the given outcomes: steps taken, or an exception."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.published = lambda version: None

    def snapshot(self, ids):
        return weights(1), canary()

    def policy_update(self, groups, live, version):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        skipped = float(outcome == 0)
        return {"optimizer_steps": outcome, "skipped_nonfinite": skipped, "trained_tokens": 2.0}

    def state_tree(self):
        return {}


class Folder:
    """Updates that were recorded."""

    def __init__(self):
        self.updates = []

    def metrics(self, update, values):
        self.updates.append(update)

    def trajectories(self, update, rollouts, lags):
        pass

    def event(self, kind, fields):
        pass


class RlControl(Control):
    """Batches without end, and evaluations that are done."""

    def __init__(self):
        super().__init__()
        self.lengths = Lengths()

    def counts(self, *kinds, domain=""):
        return {"dispatched": 0, "open": 0, "failed": 0}

    def start_rl(self):
        pass

    def take(self, timeout):
        return Batch(Kind.RL, 0, (), {}, {}, Lag(2, 0.0, 0), Lag(0, 0.0, 0), 0, 2, {})

    def commit(self, batch):
        pass

    def evaluate(self, phase, version, stop, weights):
        self.results = [[entry(phase, version)]]
        return super().evaluate(phase, version, stop, weights)


def trained(tmp_path, engine, *outcomes, **learner):
    with publishing(tmp_path, [engine]) as publisher:
        run = run_over(publisher, RlControl())
        changes = {"updates": 2} | learner
        tables = {"learner": run.config.learner.model_copy(update=changes)}
        tables["eval"] = run.config.eval.model_copy(update={"init": False, "every": 1})
        tables["checkpoint"] = run.config.checkpoint.model_copy(update={"every": 1})
        run.config = run.config.model_copy(update=tables)
        run.trainer, run.folder = Sometimes(*outcomes), Folder()
        run.trainer.forget_moments = lambda: None
        try:
            main.train(run)
        except TrainingStopped:
            return run, True
        return run, False


def test_093_a_skipped_update_is_no_update(tmp_path):
    """No version, no line of metrics, no checkpoint; the loop goes on with other rollouts."""
    with FakeEngine() as engine:
        run, stopped = trained(tmp_path, engine, 2, 0, 0, 2)
        assert not stopped
        assert run.control.abandoned == ["nonfinite_gradient"] * 2
        assert run.folder.updates == [1, 2]
        assert [step for step, _ in run.checkpoints.saved] == [1, 2]
        assert run.version == 3  # of the start and of two updates
        assert engine.weight_version == "3"
        assert run.control.evaluated == [("rl", 2), ("rl", 3)]  # after the first update, and at the end
        assert run.control.weights == ["rl 1.0.1", "rl 1.0.2"]


def test_093_training_that_is_given_up_leaves_the_last_good_checkpoint(tmp_path):
    with FakeEngine() as engine:
        run, stopped = trained(tmp_path, engine, 2, 0, TrainingStopped("sick"))
        assert stopped
        assert [step for step, _ in run.checkpoints.saved] == [1]
        assert run.version == 2


def test_a_resume_makes_the_evaluation_that_was_not_done(tmp_path):
    with FakeEngine() as engine, publishing(tmp_path, [engine]) as publisher:
        run = run_over(publisher, RlControl())
        tables = {"learner": run.config.learner.model_copy(update={"updates": 2})}
        tables["eval"] = run.config.eval.model_copy(update={"every": 1})
        run.config, run.update = run.config.model_copy(update=tables), 1  # a checkpoint stands before its evaluation
        run.trainer, run.folder = Sometimes(2), Folder()
        main.train(run)
        assert run.control.evaluated == [("rl", 1), ("rl", 2)]
        assert run.control.weights == ["rl 0.0.1", "rl 1.0.2"]  # another life had made the first


def test_everything_is_closed_whatever_fails(tmp_path):
    """A server that goes on serving would keep the process alive for ever, with nobody behind it."""
    closed = []

    class Closing:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            raise OSError(28, "No space left on device")

        def stop(self, grace):
            self.close()

    run = run_over(Closing("publisher"), Control())
    run.checkpoints, run.server, run.folder = Closing("checkpoints"), Closing("server"), Closing("folder")
    main.close(run)
    assert closed == ["checkpoints", "publisher", "server", "folder"]


def test_what_no_restart_repairs():
    arrow = OSError("Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert [is_disk(error) for error in (OSError(28, "x"), OSError(30, "x"), arrow)] == [True] * 3
    assert not is_disk(ConnectionResetError(104, "reset"))


def test_silence_ends_the_run_and_says_what_it_waited_for():
    control = Control()
    control.take = lambda timeout: None
    run = run_over(None, control)
    run.config = run.config.model_copy(update={"learner": run.config.learner.model_copy(update={"give_up_s": 0.05})})
    with pytest.raises(main.Silence, match=r"no rollout came for 0.05 s: learner waits for 1 group"):
        main.take(run)


def test_deliveries_are_no_silence():
    control, left = Control(), iter(range(40))

    def take(timeout):
        time.sleep(0.005)
        number = next(left, None)
        control.deliveries["stored"] += bool(number and number % 2)  # nothing arrives during every other look
        return None if number is not None else "batch"

    control.take = take
    run = run_over(None, control)
    run.config = run.config.model_copy(update={"learner": run.config.learner.model_copy(update={"give_up_s": 0.1})})
    assert main.take(run) == "batch"


def test_a_publisher_that_failed_ends_the_wait_for_rollouts(tmp_path):
    def full(params, directory):
        raise OSError(28, "No space left on device")

    control = Control()
    control.take = lambda timeout: None
    with FakeEngine() as engine, publishing(tmp_path, [engine], save=full) as publisher:
        run = run_over(publisher, control)
        main.publish(run)
        with pytest.raises(PublishError, match="No space left on device"):
            main.take(run)


def test_checkpoint_steps_rise_over_the_warm_start_and_after_it():
    control = Control()
    run = run_over(None, control)
    run.config = run.config.model_copy(update={"warm": run.config.warm.model_copy(update={"updates": 60})})
    seen = []
    for done in (0, 7, 40):
        control.ledger.warm_update = done
        seen.append(run.step)
    run.totals.warm_end = 40  # the loss was low enough
    for run.update in (0, 1, 30):
        seen.append(run.step)
    assert seen == [0, 7, 40, 60, 61, 90]


class Supervised:
    """A trainer whose supervised updates have the given losses, the last of them for ever; None is a skipped update."""

    def __init__(self, *losses):
        self.losses = list(losses)
        self.rates = []

    def state_tree(self):
        return {}

    def published(self, version):
        pass

    def supervised(self, rollouts, lr):
        self.rates.append(lr)
        loss = self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]
        return {"skipped_nonfinite": 1.0} if loss is None else {"skipped_nonfinite": 0.0, "loss": loss}


def warmed(*losses, target=0.0, updates=30, done=0):
    """Supervised updates that a warm start makes in all, its control, its events and the learning rates of the updates."""
    control, folder = Control(done), SimpleNamespace(events=[])
    folder.event = lambda kind, fields: folder.events.append((kind, fields))
    run = run_over(None, control)
    fields = {"updates": updates, "target_loss": target, "lr": 0.5}
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


def test_a_resumed_warm_start_goes_on_with_the_losses_that_it_had():
    run = run_over(None, Control(done=8))
    fields = {"updates": 30, "target_loss": 0.5, "lr": 0.5}
    run.config = run.config.model_copy(update={"warm": run.config.warm.model_copy(update=fields)})
    run.folder, run.trainer = Folder(), Supervised(0.0)
    run.totals = type(run.totals)(**json.loads(json.dumps(asdict(run.totals) | {"warm_losses": [1.0] * 4 + [0.0] * 4})))
    main.warm_start(run)
    assert run.control.ledger.warm_update == 9  # (3·1 + 5·0)/8 is below the target at once


def test_a_warm_start_is_evaluated_as_it_ended(tmp_path):
    """A look on the way is none of what came out, although both are of update 0."""
    with FakeEngine() as engine, publishing(tmp_path, [engine]) as publisher:
        run = run_over(publisher, Control(done=8, results=[[entry("warm")], [entry("warm", 2)]]))
        main.publish(run)
        main.evaluate_once(run, "warm")
        main.evaluate_once(run, "warm")
        assert len(run.control.evaluated) == 1
        run.control.ledger.warm_update = 14
        main.publish(run)
        main.evaluate_once(run, "warm")
        assert run.control.evaluated == [("warm", 1), ("warm", 2)]
        assert run.control.weights == ["warm 0.8.0", "warm 0.14.0"]


def test_a_resumed_warm_start_makes_what_is_left_and_counts_no_skipped_update():
    made, control, *_ = warmed(1.0, None, None, 1.0, updates=5, done=2)
    assert made == 5
    assert control.abandoned == ["nonfinite_gradient"] * 2
    assert warmed(1.0, updates=5, done=5)[0] == 5


def test_a_warm_start_is_saved_on_its_way():
    """A kill in a long one does not begin it again."""
    run = run_over(None, Control())
    fields = {"updates": 25, "lr": 1.0}
    run.config = run.config.model_copy(update={"warm": run.config.warm.model_copy(update=fields)})
    run.trainer = Supervised(1.0)
    main.warm_start(run)
    assert run.checkpoints.saved == [(10, {"warm": 10}), (20, {"warm": 20})]


@pytest.mark.parametrize(
    ("successes", "made"), [([0.3], 8), ([0.1, 0.2], 10), ([0.1, 0.1, 0.1, 0.25], 14), ([0.1] * 9, 21), ([0.1] * 7 + [0.2], 21)]
)
def test_a_warm_start_goes_on_until_success_is_reached(tmp_path, successes, made):
    """The loss is low enough at update 8; from there on every other update is looked at, with its own weights."""
    with FakeEngine() as engine, publishing(tmp_path, [engine]) as publisher:
        control = Control(results=[[entry("warm") | {"success": success}] for success in successes])
        run = run_over(publisher, control)
        fields = {"updates": 21, "lr": 1.0, "target_loss": 0.5, "target_success": 0.2}
        run.config = run.config.model_copy(update={"warm": run.config.warm.model_copy(update=fields)})
        run.trainer, run.folder = Supervised(0.1), Folder()
        run.trainer.snapshot = lambda ids: (weights(1), canary())
        main.warm_start(run)
        assert control.ledger.warm_update == made
        looks = min(len(successes), 8)  # at 8, 10, ..., 20, and at the end
        assert control.evaluated == [("warm", version) for version in range(1, looks + 1)]
        assert run.totals.warm_end == (made if successes[-1] >= 0.2 else 0)
        main.evaluate_once(run, "warm")  # has been made
        assert len(control.evaluated) == looks


def test_the_learning_rate_of_a_warm_start_is_its_own():
    *_, rates = warmed(1.0, updates=3)
    assert rates == [0.5] * 3
