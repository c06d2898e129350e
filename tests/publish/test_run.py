"""What a learner takes up again when it resumes."""

from dataclasses import asdict
from types import SimpleNamespace

from learner.batch import Lag
from learner.run import Totals
from tests.publish.test_loop import Control, run_over


def test_time_that_was_lost_counts_as_time(tmp_path):
    """The checkpoint was made at 20 s, and metrics were written at 50 s: those 30 s passed."""
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "seconds": 15.5}\n{"update": 2, "seconds": 50.0}\n')
    control = Control()
    control.restore = lambda state: None
    run = run_over(None, control)
    totals = asdict(run.totals) | {"seconds": 20.0, "lag_tokens": 3.0}
    run.path, run.folder = tmp_path, SimpleNamespace(incarnation=2)
    run.trainer.restore_tree = lambda arrays: None
    run.checkpoints = SimpleNamespace(latest=lambda: 1, restore=lambda: (1, {}, {"update": 1, "control": {}, "totals": totals}))
    run.restore()
    assert (run.totals.seconds, run.totals.lag_tokens, run.update) == (50.0, 3.0, 1)


def test_the_summary_tells_the_pools_apart():
    """Updates with 6 and 2 tokens of main (lags 1 and 0 in the mean), with 2 and 6 of the stale pool (lags 4 and 5)."""
    totals = Totals()
    totals.add(Lag(6, 1.0, 2), Lag(2, 4.0, 6))
    totals = Totals(**asdict(totals))  # as a checkpoint keeps it
    totals.add(Lag(2, 0.0, 0), Lag(6, 5.0, 5))
    assert (totals.lag_tokens / totals.tokens, totals.lag_max) == (6 / 8, 2)
    assert totals.stale_pool() == {"share": 0.5, "lag": {"mean": 38 / 8, "max": 6}}
    assert Totals().stale_pool() == {"share": 0.0, "lag": {"mean": 0.0, "max": 0}}
