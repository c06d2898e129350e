"""Which weights the stale pool of engines has, and what becomes of main meanwhile."""

from itertools import count

import pytest

from learner.publisher import NotReady
from learner.stale_pool import StalePool
from tests.fakes import Answer, FakeEngine
from tests.processes import until
from tests.publish.calls import Log, canary, publishing, state, weights

POOLS = ("main", "stale")


def versions_kept(refresh, updates):
    """The pool's version after each publication; versions count from 1."""
    pool, version, out = StalePool(refresh), count(1), []
    for update in updates:
        pool.written(next(version), update)
        out.append(pool.version)
    return out


def test_a_version_is_kept_until_refresh_updates_have_passed():
    assert versions_kept(3, [0, 1, 2, 3, 4, 5, 6, 7]) == [1, 1, 1, 4, 4, 4, 7, 7]


def test_the_pool_follows_the_warm_start():
    """Its publications are all of update 0. The first are random weights: they are not kept."""
    assert versions_kept(3, [0, 0, 0, 1, 2, 3]) == [1, 2, 3, 3, 3, 6]


def test_updates_that_were_skipped_count():
    """Training was faster than writing: update 3 was never written."""
    assert versions_kept(3, [0, 2, 5, 7, 8]) == [1, 1, 3, 3, 5]


def test_without_a_refresh_it_follows_the_newest():
    assert versions_kept(0, [0, 1, 2]) == [1, 2, 3]


def publish_all(publisher, first, last):
    """Updates first..last; main serves each before the next."""
    for update in range(first, last + 1):
        version = publisher.publish(update, weights(update), canary())
        assert publisher.wait_ready(version, 20) == version


def on_disk(run):
    return sorted(folder.name for folder in (run / "weights").iterdir())


def versions(publisher):
    return [engine.version for engine in publisher.engines()]


def test_the_stale_pool_is_refreshed_at_intervals_and_main_at_once(tmp_path, engine):
    log = Log()
    with FakeEngine() as stale, publishing(tmp_path, [engine, stale], log=log, pools=POOLS, refresh=3) as publisher:
        publish_all(publisher, 0, 0)
        until(lambda: state(publisher, 1) == "ready", "the stale pool has the first version")
        publish_all(publisher, 1, 2)
        assert versions(publisher) == [3, 1]
        until(lambda: on_disk(tmp_path) == ["1", "3"], "version 2 is not needed any more, 1 is as long as the pool has it")
        publish_all(publisher, 3, 3)
        until(lambda: versions(publisher) == [4, 4], "the refresh")
        publish_all(publisher, 4, 5)
        assert versions(publisher) == [6, 4]
        until(lambda: on_disk(tmp_path) == ["4", "6"], "version 1 is not needed any more")
    assert [v for s, v in log.states("engine-1") if s == "ready"] == [1, 4]


def test_a_stale_engine_that_restarts_gets_the_version_of_its_pool(tmp_path, engine):
    with FakeEngine() as stale, publishing(tmp_path, [engine, stale], pools=POOLS, refresh=9) as publisher:
        publish_all(publisher, 0, 0)
        until(lambda: state(publisher, 1) == "ready", "the stale pool has the first version")
        stale.stop()
        until(lambda: state(publisher, 1) == "starting", "it is gone")  # nobody has the pool's version now
        publish_all(publisher, 1, 8)
        assert "1" in on_disk(tmp_path)
        stale.restart()
        until(lambda: state(publisher, 1) == "ready" and stale.weight_version != "default", "it is back")
        assert (stale.weight_version, engine.weight_version) == ("1", "9")


def test_after_a_resume_both_pools_begin_with_the_weights_that_are_published_again(tmp_path, engine):
    with FakeEngine() as stale:
        with publishing(tmp_path, [engine, stale], pools=POOLS, refresh=5) as publisher:
            publish_all(publisher, 0, 2)
            until(lambda: state(publisher, 1) == "ready", "the stale pool has a version")
        with publishing(tmp_path, [engine, stale], pools=POOLS, refresh=5, incarnation=2) as publisher:
            publish_all(publisher, 2, 2)
            until(lambda: versions(publisher) == [4, 4], "both")
            publish_all(publisher, 3, 6)
            assert versions(publisher) == [8, 4]


def test_an_evaluation_holds_main_only(tmp_path, engine):
    with FakeEngine() as stale, publishing(tmp_path, [engine, stale], pools=POOLS, refresh=2) as publisher:
        publish_all(publisher, 0, 1)
        until(lambda: versions(publisher) == [2, 1], "two versions")
        with publisher.hold(60) as version:
            assert version == 2
            publisher.publish(2, weights(2), canary())
            until(lambda: versions(publisher) == [2, 3], "the stale pool is refreshed, main is held")
        until(lambda: versions(publisher) == [3, 3], "main follows")


def test_only_main_makes_a_version_ready(tmp_path, engine):
    engine.script("/pause_generation", *[Answer(500, {"message": "no"})] * 1000)
    with FakeEngine() as stale, publishing(tmp_path, [engine, stale], pools=POOLS, refresh=2) as publisher:
        version = publisher.publish(0, weights(0), canary())
        until(lambda: state(publisher, 1) == "ready", "the stale pool serves")
        with pytest.raises(NotReady, match=r"no engine serves version 1 after .*: engine-0 at [^;]* is quarantined[^;]*$"):
            publisher.wait_ready(version, 0.05)
        engine._scripts.clear()
        assert publisher.wait_ready(version, 20) == version
