"""Which weights were proven on which engine."""

from learner.proofs import Proofs, Verdict


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_pair_goes_from_pending_to_proven():
    proofs = Proofs(Clock())
    assert proofs.judge([("a", 1)], 0) == (Verdict.FAILED, "version 1 on a: the engine was never brought to it")
    proofs.began("a", 1)
    assert proofs.judge([("a", 1)], 0) == (Verdict.PENDING, "version 1 on a is not proven yet")
    proofs.passed("a", 1)
    assert proofs.judge([("a", 1)], 0) == (Verdict.PROVEN, "")
    assert proofs.judge([("b", 1)], 0)[0] is Verdict.FAILED
    assert proofs.judge([], 0)[0] is Verdict.PROVEN


def test_the_worst_pair_decides():
    proofs = Proofs(Clock())
    proofs.passed("a", 1)
    proofs.began("a", 2)
    assert proofs.judge([("a", 1), ("a", 2)], 0)[0] is Verdict.PENDING
    proofs.failed("a", 3, "wrong")
    assert proofs.judge([("a", 1), ("a", 2), ("a", 3)], 0) == (Verdict.FAILED, "version 3 on a: wrong")


def test_what_was_handed_out_before_a_failure_is_refused_for_ever():
    clock = Clock()
    proofs = Proofs(clock)
    proofs.began("a", 1)
    clock.now = 5.0
    proofs.failed("a", 1, "wrong")
    clock.now = 6.0
    proofs.began("a", 1)
    assert proofs.judge([("a", 1)], 5.0) == (Verdict.FAILED, "version 1 on a: wrong")
    assert proofs.judge([("a", 1)], 5.5)[0] is Verdict.PENDING
    proofs.passed("a", 1)
    assert proofs.judge([("a", 1)], 5.0)[0] is Verdict.FAILED
    assert proofs.judge([("a", 1)], 5.5)[0] is Verdict.PROVEN


def test_an_engine_that_goes_away_loses_what_is_pending_alone():
    proofs = Proofs(Clock())
    proofs.passed("a", 1)
    proofs.began("a", 2)
    proofs.abandoned("a", "connection lost")
    assert proofs.judge([("a", 1)], 1.0)[0] is Verdict.PROVEN
    assert proofs.judge([("a", 2)], 1.0) == (Verdict.FAILED, "version 2 on a: connection lost")


def test_behind_a_router_every_engine_that_has_the_version_must_be_proven():
    clock = Clock()
    proofs = Proofs(clock)
    proofs.stands_for("router", ["a", "b", "c"])
    assert proofs.judge([("router", 1)], 0)[0] is Verdict.FAILED
    proofs.passed("a", 1)
    assert proofs.judge([("router", 1)], 0)[0] is Verdict.PROVEN
    proofs.began("b", 1)
    assert proofs.judge([("router", 1)], 0)[0] is Verdict.PENDING
    clock.now = 5.0
    proofs.failed("b", 1, "wrong")
    assert proofs.judge([("router", 1)], 0) == (Verdict.FAILED, "version 1 on router: wrong")
    assert proofs.judge([("router", 1)], 14.0)[0] is Verdict.FAILED  # it may not have left yet
    assert proofs.judge([("router", 1)], 16.0)[0] is Verdict.PROVEN
    proofs.failed("a", 1, "wrong, too")
    assert proofs.judge([("router", 1)], 99.0)[0] is Verdict.FAILED  # none is left


def test_old_pairs_are_forgotten_as_unproven():
    proofs = Proofs(Clock())
    for version in range(1, 5000):
        proofs.began("a", version)
        proofs.passed("a", version)
    assert proofs.judge([("a", 4999)], 0)[0] is Verdict.PROVEN
    assert proofs.judge([("a", 5000 - 4097)], 0)[0] is Verdict.FAILED
