"""The register of waits, with a clock set by hand."""

import threading

import pytest

from common.convert import edge_from, edge_to
from common.waits import Edge, Wait, Waits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_open_while_its_block_runs_and_however_it_ends():
    clock = Clock()
    waits = Waits(clock)
    with waits.wait("learner", "checkpoint", "the disk", 30.0, "step 4"):
        clock.now = 104.0
        (edge,) = waits.edges()
        assert (edge.owner, edge.name, edge.on, edge.why) == ("learner", "checkpoint", "the disk", "step 4")
        assert (edge.seconds, edge.deadline, edge.silent, edge.late) == (4.0, 30.0, 4.0, False)
        clock.now = 130.0
        assert not waits.edges()[0].late  # at its deadline
        clock.now = 130.5
        assert waits.edges()[0].late
    assert waits.edges() == []
    with pytest.raises(KeyError), waits.wait("learner", "checkpoint", "the disk", 30.0):
        raise KeyError
    assert waits.edges() == []


def test_silence_is_that_of_the_party_and_never_longer_than_the_wait():
    """Heard at 90, the wait begins at 100: at 103 it says 3 s, not 13; heard again at 104, at 110 6 s."""
    clock = Clock()
    waits = Waits(clock)
    clock.now = 90.0
    waits.hear("engine-0", "engine-1")
    clock.now = 100.0
    with waits.wait("r-1", "engine.generate", "engine-0", 60.0):
        clock.now = 103.0
        assert waits.edges()[0].silent == 3.0
        assert waits.silence("engine-1") == 13.0
        clock.now = 104.0
        waits.hear("engine-0")
        clock.now = 110.0
        assert (waits.edges()[0].seconds, waits.edges()[0].silent) == (10.0, 6.0)
    assert waits.silence("engine-2") == float("inf")


def test_setting_begins_another_wait_and_moving_goes_on_with_it():
    clock = Clock()
    waits = Waits(clock)
    with waits.wait("r-1", "start", "actor-0", 60.0) as wait:
        first = waits.edges()[0].number
        clock.now = 102.0
        wait.set("env.open", "env-toy-0")
        opening = waits.edges()[0]
        assert (opening.name, opening.seconds, opening.deadline, opening.number > first) == ("env.open", 0.0, 60.0, True)
        clock.now = 105.0
        wait.move("env-toy-1", "env-toy-0 is full")
        moved = waits.edges()[0]
        assert (moved.name, moved.on, moved.why, moved.seconds) == ("env.open", "env-toy-1", "env-toy-0 is full", 3.0)
        assert moved.number == opening.number
        assert str(wait) == "env.open env-toy-1 (env-toy-0 is full)"
        wait.set("engine.generate", "engine-0", deadline_s=7.0)
        assert waits.edges()[0].deadline == 7.0


def test_the_longest_comes_first():
    clock = Clock()
    waits = Waits(clock)
    with waits.wait("a", "x", "b", 1.0):
        clock.now = 101.0
        with waits.wait("b", "x", "c", 0.0):
            clock.now = 200.0
            assert [(edge.owner, edge.late) for edge in waits.edges()] == [("a", True), ("b", False)]  # 0: no deadline


def test_an_edge_survives_the_wire():
    edge = Edge("r-1", "env.step", "env-toy-0", "step 3", 1.5, 30.0, 0.25, 7)
    assert edge_from(edge_to(edge)) == edge


def test_readers_on_other_threads_see_whole_waits():
    """Every wait here is for what its name says: a reader that met a half-set one would see another pair."""
    waits, stop = Waits(), threading.Event()

    def work(owner: str) -> None:
        while not stop.is_set():
            with waits.wait(owner, "0", "0", 1.0) as wait:
                for n in range(20):
                    wait.set(str(n), str(n))

    threads = [threading.Thread(target=work, args=(f"t-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    seen = [edge for _ in range(2_000) for edge in waits.edges()]
    stop.set()
    for thread in threads:
        thread.join()
    assert seen
    assert all(edge.name == edge.on for edge in seen)
    assert waits.edges() == []


def test_a_wait_that_nobody_registered_can_be_told_as_well():
    wait = Wait("r-1", 5.0, lambda: 3.0)
    wait.set("env.step", "env-toy-0")
    assert wait.edge(10.0, 9.0) == Edge("r-1", "env.step", "env-toy-0", "", 7.0, 5.0, 1.0, wait.edge(0.0, 0.0).number)
