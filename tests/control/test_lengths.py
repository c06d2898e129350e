"""079: long rollouts that never make it are told of."""

from __future__ import annotations

from learner.lengths import FEW, Lengths
from learner.progress import RATE_WINDOW_S, Rate
from tests.control.scripted import engine, failed, hand_in, lease, publish, started, step, trajectory


def test_079_long_rollouts_that_never_train_are_an_alarm_once():
    lengths = Lengths()
    for number in range(FEW):
        lengths.played(1000 if number % 5 == 0 else 100)
    lengths.trained([100] * (FEW - 1))
    assert lengths.alarm() == ""  # too few to say anything of a tail
    lengths.trained([100])
    # Of 100 (four in five) and 1,000 (one in five) the 90th percentile is 1,000, the mean 0.8 * 100 + 0.2 * 1,000 = 280
    # (256 rollouts have 52 long ones: 282.8125).
    assert lengths.metrics() == {
        "length/played_mean": 282.8125,
        "length/played_p90": 1000.0,
        "length/trained_mean": 100.0,
        "length/trained_p90": 100.0,
    }
    why = lengths.alarm()
    assert "one rollout in ten that is played has more than 1000 tokens, of those that train more than 100" in why
    assert lengths.alarm() == ""
    lengths.trained([1000] * FEW)
    assert lengths.alarm() == ""  # they make it again
    lengths.trained([100] * 8 * FEW)
    assert lengths.alarm() == why  # and do not, once more


def test_the_rate_remembers_no_more_than_its_window_though_nobody_asks():
    rate = Rate()
    for second in range(10_000):
        rate.add(float(second), 7)
    assert len(rate._arrivals) == RATE_WINDOW_S + 1
    assert rate.per_second(9_999.0) == 7 * 31 / 30


def test_as_many_long_ones_train_as_are_played():
    lengths = Lengths()
    for number in range(FEW):
        lengths.played(1 + number)
    lengths.trained(range(1, FEW + 1))
    assert lengths.alarm() == ""
    assert Lengths().metrics() == {}


def test_what_is_played_and_what_trains(tmp_path):
    """Groups of two. A rollout of three tokens fails for good; in the second update one of five is over age when it leaves."""
    control, _, _ = started(tmp_path, learner={"max_lag": 0, "max_attempts": 1, "updates": 9})
    first, second, third, fourth = lease(control)
    for asked, ids in ((first, [3]), (second, [3, 4]), (third, [3])):
        assert hand_in(control, trajectory(asked, steps=(step(ids, [(0, 1)], 1.0),))) == "STORED"
    three = step([3, 4, 5], [(0, 1)])
    lost = failed(fourth)
    assert hand_in(control, trajectory(fourth, steps=(three,), status=lost.status, flags=lost.flags)) == "STORED"
    assert control.lengths.metrics() == {"length/played_mean": 7 / 4, "length/played_p90": 2.7}
    assert control.take(0) is None  # one group is too small to compare
    publish(control, 2, 0)
    control.set_engines([engine(2)])
    for asked in lease(control, 2):
        hand_in(control, trajectory(asked, version=2))
    batch = control.take(0)
    assert batch is not None
    control.commit(batch)
    found = control.lengths.metrics()
    assert (found["length/trained_mean"], found["length/trained_p90"]) == (7 / 4, 2.0)  # [1, 2, 2, 2]
    publish(control, 3, 1)
    control.set_engines([engine(3)])
    old, *young = lease(control, 4)
    hand_in(control, trajectory(old, steps=(step([3, 4, 5, 6, 7], [(0, 2)]),)))
    for asked in young:
        hand_in(control, trajectory(asked, version=3))
    batch = control.take(0)
    assert batch is not None
    assert (batch.stale, batch.lengths) == (1, [2, 2, 2])
