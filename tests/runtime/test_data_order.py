"""The shuffle: every row once an epoch, at once from anywhere, evenly, and the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysched.runtime.data import order
from lazysched.runtime.data.order import shuffled


def whole(num: int, seed: int, epoch: int, purpose: str = "epoch") -> list[int]:
    return shuffled(np.arange(num), num, seed, epoch, purpose).tolist()


@settings(deadline=None)
@given(num=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_every_row_once(num: int, seed: int, epoch: int) -> None:
    assert sorted(whole(num, seed, epoch)) == list(range(num))


@settings(deadline=None)
@given(num=st.integers(1, 3000), seed=st.integers(0, 99), data=st.data())
def test_a_position_needs_no_other(num: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=9))
    found = shuffled(np.array(positions), num, seed, 3)
    assert found.tolist() == [whole(num, seed, 3)[position] for position in positions]


def test_seeking_in_more_rows_than_memory_holds() -> None:
    num = 10**15
    positions = np.array([0, 1, 10**14, num - 1])
    assert len({*shuffled(positions, num, 5, 10**6).tolist()}) == 4
    assert shuffled(positions, num, 5, 10**6).max() < num


def test_seeds_epochs_and_purposes_have_orders_of_their_own() -> None:
    keys = itertools.product((0, 1, 10), (0, 1, 11), ("epoch", "split"))
    assert len({tuple(whole(100, *key)) for key in keys}) == 18


def test_the_order_never_changes() -> None:
    """A resumed run must find what the run before it left, whichever version of whatever it has now."""
    assert whole(10, 42, 0) == PINNED[10]
    assert shuffled(np.arange(5), 10**9, 42, 7).tolist() == PINNED[10**9]


PINNED = {
    10: [3, 8, 6, 4, 9, 2, 5, 1, 0, 7],
    10**9: [379822390, 825204240, 503163800, 140388067, 303319073],
}


@pytest.mark.parametrize(("num", "limit"), [(4, 60), (5, 200)])
def test_orders_are_equally_frequent(num: int, limit: float) -> None:
    """Chi-square over all orders; its mean is their number - 1, the limits are more than six deviations above."""
    num_epochs = 3000
    counts = Counter(tuple(whole(num, 1, epoch)) for epoch in range(num_epochs))
    orders = list(itertools.permutations(range(num)))
    expected = num_epochs / len(orders)
    assert sum((counts[item] - expected) ** 2 / expected for item in orders) < limit


def test_rows_come_everywhere() -> None:
    num, num_epochs = 70, 350  # beyond the size where all numbers are permuted at once
    counts = np.zeros((num, num))
    for epoch in range(num_epochs):
        counts[np.arange(num), whole(num, 2, epoch)] += 1
    expected = num_epochs / num
    freedom = (num - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * np.sqrt(2 * freedom)


def test_small_data_and_large_are_cut_where_the_walk_begins() -> None:
    assert order._MIN_HALF_BITS == 3
    for num in (63, 64, 65):
        assert sorted(whole(num, 0, 0)) == list(range(num))
