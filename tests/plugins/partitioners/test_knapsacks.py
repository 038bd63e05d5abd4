"""The best sets of shards around each: compared with all sets there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_plugins.packing.knapsacks import Joint, Knapsacks

# Parts of 64 are whole cells, so nothing is lost by rounding.
PARTS = 64
kinds = st.lists(
    st.tuples(st.integers(4, 50), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=5, unique=True
)


def columns_of(some):
    size, most, price = (np.array(column) for column in zip(*some, strict=True))
    return size[:, None] / PARTS, most.astype(np.int64), price.astype(np.float64)


def all_sets(size, most, room):
    """Every set of no more than there are that fits."""
    sets = np.array(list(product(*[range(number + 1) for number in most])), dtype=np.float64)
    return sets[(sets @ size <= room + 1e-9).all(axis=1)]


@settings(max_examples=150, deadline=None)
@given(kinds, st.integers(32, PARTS))
def test_knapsacks_hold_what_is_worth_most_and_no_more_than_there_is(some, parts):
    size, most, prices = columns_of(some)
    room = np.array([parts / PARTS])
    wanted = all_sets(size, most, room)
    tables = Knapsacks(size, most, 0).tables(prices)
    found = tables.best(prices, room, np.arange(tables.num_units))
    assert (found @ size <= room + 1e-9).all()
    assert (found <= most).all()
    assert tables.most_worth(room) == pytest.approx((wanted @ prices).max())
    assert (found @ prices).max(initial=0.0) == pytest.approx((wanted @ prices).max())
    for kind in np.flatnonzero(size[:, 0] <= room[0]).tolist():
        best = (wanted[wanted[:, kind] > 0] @ prices).max()
        assert (found[found[:, kind] > 0] @ prices).max() == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(kinds, kinds)
def test_joint_sets_of_two_tiers_are_the_best_of_each(some, others):
    (first, most, prices), (second, more, worth) = columns_of(some), columns_of(others)
    size = np.vstack([np.hstack([first, 0 * first]), np.hstack([0 * second, second])])
    both, numbers = np.append(prices, worth), np.append(most, more)
    joint, room = Joint.of(size, numbers, 0, both), np.ones(2)
    found = joint.best(both, room, np.arange(joint.num_units))
    best = (all_sets(size, numbers, room) @ both).max()
    assert joint.most_worth(room) == pytest.approx(best)
    assert (found @ both).max() == pytest.approx(best)
    assert (found @ size <= room + 1e-9).all()


def test_sets_that_are_over_in_another_dimension_lose_what_is_worth_least_there():
    size = np.array([[0.25, 0.5], [0.25, 0.5], [0.25, 0.5], [0.25, 0.0]])
    prices = np.array([3.0, 2.0, 1.0, 1.0])
    tables = Knapsacks(size, np.ones(4, dtype=np.int64), 0).tables(prices)
    found = tables.best(prices, np.ones(2), np.arange(tables.num_units))
    assert found.tolist() == [[1.0, 1.0, 0.0, 1.0]]
