"""Measures that add up: parts in any order and grouping, and steps of many parts, against plain arithmetic."""

from __future__ import annotations

import itertools
from functools import reduce

import jax.numpy as jnp
import numpy as np
import pytest

from learner.reducers import EffectiveSize, Largest, Last, Mean, PerStep, Smallest, merge, results, start

# Three parts of a step: sums over 2, 3 and 1 tokens with ratios .5 1, 2 1 1 and .5.
PARTS = [
    {
        "entropy": Mean(3.0, 2.0),
        "loss": PerStep(0.5),
        "max": Largest(1.0),
        "min": Smallest(0.5),
        "n": EffectiveSize(1.5, 1.25, 2.0),
    },
    {
        "entropy": Mean(1.5, 3.0),
        "loss": PerStep(-1.0),
        "max": Largest(2.0),
        "min": Smallest(1.0),
        "n": EffectiveSize(4.0, 6.0, 3.0),
    },
    {
        "entropy": Mean(1.5, 1.0),
        "loss": PerStep(2.0),
        "max": Largest(0.5),
        "min": Smallest(0.5),
        "n": EffectiveSize(0.5, 0.25, 1.0),
    },
]
WHOLE = {"entropy": 6 / 6, "loss": 1.5, "max": 2.0, "min": 0.5, "n": 36 / (6 * 7.5)}


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_parts_of_a_step_add_up_in_any_order_and_grouping(order):
    """A step begins with `start`, which alone counts as a step: three parts of a loss are one loss, not a third of it."""
    a, b, c = (PARTS[i] for i in order)
    begun = start(a)
    for whole in (reduce(merge, [begun, a, b, c]), merge(begun, merge(a, merge(b, c))), merge(merge(merge(c, b), a), begun)):
        assert results([whole]) == pytest.approx(WHOLE)


def test_steps_are_a_mean_of_their_sums_and_tokens_of_all_steps_one_mean():
    """Losses 1.5 and 4.5 are 3; entropies 6 of 6 tokens and 2 of 4 are 8 of 10."""
    one = reduce(merge, [start(PARTS[0]), *PARTS])
    other = merge(
        start(PARTS[0]),
        {
            "entropy": Mean(2.0, 4.0),
            "loss": PerStep(4.5),
            "max": Largest(9.0),
            "min": Smallest(0.25),
            "n": EffectiveSize(4.0, 4.0, 4.0),
        },
    )
    wanted = {"entropy": 0.8, "loss": 3.0, "max": 9.0, "min": 0.25, "n": 100 / (10 * 11.5)}
    for parts in ([one, other], [other, one]):
        assert results(parts) == pytest.approx(wanted)
    assert results([one, other, start(PARTS[0])])["loss"] == pytest.approx(2.0)  # a step without parts has a loss of 0


def test_what_was_not_measured_is_left_out():
    assert results([]) == {}
    nothing = start(PARTS[0] | {"lr": Last(1.0, 3)})
    assert results([nothing]) == {"loss": 0.0}
    assert Mean(0.0, 0.0).result() is None
    assert PerStep(1.0).result() is None  # a part is no step
    assert Largest(-5.0).result() == -5.0
    assert Smallest(5.0).result() == 5.0


def test_a_part_may_lack_what_others_measure():
    assert merge({"x": Mean(3.0, 2.0), "y": Mean(1.0, 1.0)}, {"x": Mean(1.0, 2.0)}) == {"x": Mean(4.0, 4.0), "y": Mean(1.0, 1.0)}


def test_extremes_begin_beyond_any_number():
    assert results([merge(start({"x": Largest(0.0)}), {"x": Largest(-3.0)})]) == {"x": -3.0}
    assert results([merge(start({"x": Smallest(0.0)}), {"x": Smallest(3.0)})]) == {"x": 3.0}


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_the_last_one_is_that_of_the_newest_step(order):
    steps = [Last(5.0, 0), Last(7.0, 1), Last(6.0, 2)]
    found = reduce(Last.merge, [Last.start(), *(steps[i] for i in order)])
    assert (found.result(), float(found.at)) == (6.0, 2.0)
    assert Last.start().merge(Last(5.0, 0)).result() == 5.0  # the first step is number 0
    assert Last.start().result() is None
    assert np.isnan(Last.start().value)


def test_equal_ratios_are_worth_their_number_and_one_of_many_a_share():
    assert EffectiveSize(8.0, 16.0, 4.0).result() == 1.0  # four ratios of 2
    assert EffectiveSize(3.0, 9.0, 4.0).result() == 0.25  # 3, 0, 0, 0
    assert jnp.float32(0) == EffectiveSize.start().count
