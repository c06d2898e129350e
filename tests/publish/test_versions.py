"""Which version engines get and which stay on disk: skipped ones, resumed runs, holds, pins, the end."""

import threading

import pytest

from learner.publisher import PublishError
from tests.fakes import Answer, FakeEngine
from tests.processes import until
from tests.publish.calls import Log, canary, publishing, save, state, weights


def test_newest_wins_and_skipped_versions_are_never_reused(tmp_path, engine):
    gate, saved, log = threading.Event(), [], Log()

    def slow(params, folder):
        gate.wait(20)
        saved.append(float(params["model.norm.weight"][0]))
        save(params, folder)

    with publishing(tmp_path, [engine], save=slow, log=log) as publisher:
        first = publisher.publish(0, weights(0), canary())
        until(lambda: publisher._pending is None, "the writer took the first")
        rest = [publisher.publish(update, weights(update), canary()) for update in range(1, 6)]
        gate.set()
        assert publisher.wait_ready(rest[-1], 20) == 6
    assert [first, *rest] == [1, 2, 3, 4, 5, 6]
    assert saved == [0.0, 5.0]
    assert [f for kind, f in log.events if kind == "publish_skipped"] == [{"version": v, "newer": v + 1} for v in (2, 3, 4, 5)]
    with publishing(tmp_path, [engine], incarnation=2) as publisher:
        assert [publisher.update_of(version) for version in range(1, 7)] == [0, 1, 2, 3, 4, 5]
        assert publisher.publish(3, weights(3), canary()) == 7  # a rollback to update 3 gets a number of its own
        assert publisher.wait_ready(7, 20) == 7
        assert publisher.update_of(7) == 3
        with pytest.raises(PublishError, match="version 8 was never published; known are 1 to 7"):
            publisher.update_of(8)


def test_an_engine_that_serves_the_old_timeline_is_not_ready_after_a_resume(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(9, weights(9), canary()), 20)
    with publishing(tmp_path, [engine], incarnation=2) as publisher:
        until(lambda: publisher.engines()[0].version == 1, "the engine is seen")
        assert state(publisher) == "starting"
        publisher.wait_ready(publisher.publish(5, weights(5), canary()), 20)
        assert engine.weight_version == "2"


def test_clean_up_keeps_the_newest_what_engines_hold_and_pins(tmp_path, engine):
    def stored():
        return sorted(int(path.name) for path in (tmp_path / "weights").iterdir())

    with FakeEngine() as stuck, publishing(tmp_path, [engine, stuck]) as publisher:
        publisher.publish(0, weights(0), canary())
        until(lambda: {e.version for e in publisher.engines()} == {1}, "both serve version 1")
        stuck.script("/pause_generation", *[Answer(400, {"message": "no"})] * 10_000)
        publisher.wait_ready(publisher.publish(1, weights(1), canary()), 20)
        with publisher.pin(2):
            for update in range(2, 6):
                publisher.wait_ready(publisher.publish(update, weights(update), canary()), 20)
            until(lambda: stored() == [1, 2, 6], "the stuck engine's, the pinned and the newest are left")
        until(lambda: stored() == [1, 6], "the pin is gone")
        stuck._scripts.clear()
        until(lambda: stored() == [6], "the stuck engine has moved on")


def test_clean_up_spares_a_version_that_is_whole_and_not_yet_called_newest(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(0), canary()), 20)
        publisher._folder.write(publisher._folder.allocate(1), lambda folder: save(weights(1), folder))  # the writer, so far
        publisher._collect()  # an engine's thread
        assert publisher._folder.stored() == [1, 2]


def told(log):
    """The newest table: each engine's pool and version."""
    return [(engine.pool, engine.version) for engine in (log.tables or [[]])[-1]]


def test_of_several_engines_one_is_held_and_the_others_serve_training(tmp_path, engine):
    log = Log()
    with FakeEngine() as other, publishing(tmp_path, [engine, other], log=log) as publisher:
        publisher.publish(0, weights(0), canary())
        until(lambda: told(log) == [("main", 1), ("main", 1)], "both to serve version 1")
        with publisher.hold(20, version=1):
            assert told(log) == [("main", 1), ("eval", 1)]
            version = publisher.publish(1, weights(1), canary())
            assert publisher.wait_ready(version, 20) == 2  # a hold keeps nobody waiting who trains
            until(lambda: told(log) == [("main", 2), ("eval", 1)], "the other one to go on")
            other.restart()
            until(lambda: other.weight_version == "1" and told(log) == [("main", 2), ("eval", 1)], "the held version again")
        assert told(log)[1][0] == "main"
        until(lambda: told(log) == [("main", 2), ("main", 2)], "both to serve version 2")


def test_the_engine_that_is_held_is_one_that_serves_the_version(tmp_path, engine):
    log = Log()
    with FakeEngine() as other, publishing(tmp_path, [engine, other], log=log) as publisher:
        other.script("/pause_generation", *[Answer(500, {"error": {"message": "no"}})] * 1000)
        assert publisher.wait_ready(publisher.publish(0, weights(0), canary()), 20) == 1
        with publisher.hold(20, version=1):
            assert told(log)[0] == ("eval", 1)


def test_behind_a_router_all_engines_are_held(tmp_path, engine):
    log = Log()
    with FakeEngine() as other, publishing(tmp_path, [engine, other], log=log, hold_one=False) as publisher:
        publisher.publish(0, weights(0), canary())
        until(lambda: told(log) == [("main", 1), ("main", 1)], "both to serve version 1")
        with publisher.hold(20, version=1):
            version = publisher.publish(1, weights(1), canary())
            until(lambda: (tmp_path / "weights" / "2" / "DONE").exists(), "it is written meanwhile")
            with pytest.raises(PublishError, match="evaluation holds version 1"):
                publisher.wait_ready(version, 0.1)
            assert told(log) == [("main", 1), ("main", 1)]


def test_an_engine_whose_hold_has_ended_by_itself_is_everybodys_again(tmp_path, engine):
    log = Log()
    with FakeEngine() as other, publishing(tmp_path, [engine, other], log=log) as publisher:
        publisher.publish(0, weights(0), canary())
        until(lambda: told(log) == [("main", 1), ("main", 1)], "both to serve version 1")
        with publisher.hold(0.1, version=1):
            until(lambda: told(log) == [("main", 1), ("main", 1)], "the hold to end")


def test_hold_keeps_the_only_engine_at_its_version(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(0), canary()), 20)
        with publisher.hold(20) as held:
            assert held == 1
            version = publisher.publish(1, weights(1), canary())
            until(lambda: (tmp_path / "weights" / "2" / "DONE").exists(), "it is written meanwhile")
            with pytest.raises(PublishError, match=r"no engine serves version 2 .*evaluation holds version 1"):
                publisher.wait_ready(version, 0.1)
            engine.restart()  # comes back with the held version, not with the newest
            until(lambda: engine.weight_version == "1" and state(publisher) == "ready", "the held version again")
            with pytest.raises(PublishError, match="version 1 is held already"), publisher.hold(1):
                pass
            assert publisher.wait_ready(1, 1) == 1
        assert publisher.wait_ready(version, 20) == 2


def test_a_hold_ends_at_its_deadline(tmp_path, engine):
    log = Log()
    with publishing(tmp_path, [engine], log=log) as publisher:
        with pytest.raises(PublishError, match="cannot hold version 0"), publisher.hold(1):
            pass
        publisher.wait_ready(publisher.publish(0, weights(0), canary()), 20)
        with publisher.hold(0.1):
            assert publisher.wait_ready(publisher.publish(1, weights(1), canary()), 20) == 2
    assert [fields["version"] for kind, fields in log.events if kind == "hold_expired"] == [1]


def test_hold_brings_engines_back_to_an_earlier_version(tmp_path, engine):
    with publishing(tmp_path, [engine]) as publisher:
        publisher.wait_ready(publisher.publish(0, weights(0), canary()), 20)
        with publisher.pin(1):
            publisher.wait_ready(publisher.publish(1, weights(1), canary()), 20)
            with publisher.hold(20, version=1):
                assert publisher.wait_ready(1, 20) == 1
                assert engine.weight_version == "1"
        publisher.wait_ready(2, 20)
        assert engine.weight_version == "2"


def test_close_writes_what_is_pending_and_refuses_more(tmp_path, engine):
    gate = threading.Event()

    def slow(params, folder):
        gate.wait(20)
        save(params, folder)

    with publishing(tmp_path, [engine], save=slow) as publisher:
        publisher.publish(0, weights(0), canary())
        until(lambda: publisher._pending is None, "the writer took it")
        publisher.publish(1, weights(1), canary())
        gate.set()
        publisher.close()
        assert (tmp_path / "weights" / "2" / "DONE").exists()
        with pytest.raises(PublishError, match="closed"):
            publisher.publish(2, weights(2), canary())
        assert not engine.paused
