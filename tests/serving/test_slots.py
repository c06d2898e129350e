"""Placement of sequences in cache slots, against a model that keeps plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.serving.slots import Placement, SlotTable


def ids(*tokens):
    return np.asarray(tokens, np.int32)


def take(table, *tokens):
    """As the engine does without prompt logprobs: decoding starts with the last token."""
    return table.take(ids(*tokens), len(tokens) - 1)


def filled(*sequences):
    """A table whose slots hold the sequences, freed in this order."""
    table = SlotTable(len(sequences), 16)
    for sequence in sequences:
        place = take(table, *sequence, 0)
        table.extend(place.slot, sequence[place.common :])
    for slot in range(len(sequences)):
        table.release(slot)
    return table


def test_a_sequence_continues_in_the_slot_that_it_extends():
    table = filled([1, 2, 3], [4, 5, 6])
    assert take(table, 4, 5, 6, 7, 8) == Placement(1, 1, 3)


def test_no_more_is_taken_than_usable():
    table = filled([1, 2, 3], [4])
    assert take(table, 1, 2, 3).common == 2
    table.release(0)
    assert table.take(ids(1, 2, 3), 1).common == 1
    assert table.take(ids(1, 2, 3), 0).common == 0


def test_a_fork_goes_to_the_slot_that_was_free_for_longest():
    table = filled([9], [1, 2, 3, 4])
    assert take(table, 1, 2, 7, 7) == Placement(0, 1, 2)


def test_a_busy_slot_is_a_source_but_never_a_place():
    table = filled([1, 2, 3], [8])
    assert take(table, 1, 2, 3, 4) == Placement(0, 0, 3)
    assert take(table, 1, 2, 3, 4) == Placement(1, 0, 3)
    with pytest.raises(ValueError, match="empty"):
        take(table, 5, 6)


def test_nothing_is_shared_after_forget():
    table = filled([1, 2, 3], [4])
    table.forget()
    assert take(table, 1, 2, 3, 4).common == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.booleans()), max_size=25))
def test_common_is_always_a_true_prefix_and_the_longest(script):
    """`True` releases the oldest busy slot first. The model: a dict of slot -> list of tokens."""
    table, held, busy = SlotTable(3, 12), {slot: [] for slot in range(3)}, []
    for tokens, release in script:
        if busy and (release or len(busy) == 3):
            table.release(busy.pop(0))
        place = take(table, *tokens)
        longest = max(_common(tokens[:-1], other) for other in held.values())
        assert place.common == longest == _common(tokens[:-1], held[place.source])
        assert place.slot not in busy
        held[place.slot] = list(tokens)
        busy.append(place.slot)
        table.extend(place.slot, tokens[place.common :])


def _common(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
