"""The best set of shards for a rank, against all sets there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.knapsack import best_set

KINDS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 7), st.integers(0, 9)), min_size=1, max_size=4, unique=True
)


def all_worth(size, prices):
    """What each set that fits is worth."""
    numbers = np.indices((8,) * len(prices)).reshape(len(prices), -1).T
    return (numbers @ prices)[(numbers @ size <= 1 + 1e-9).all(axis=1)]


@settings(max_examples=150, deadline=None)
@given(kinds=KINDS, part=st.sampled_from([0.0, 0.5, 0.95, 1.0, 1.2]))
def test_best_set_is_the_best_of_all_or_proves_that_none_is_worth_more(kinds, part):
    size = np.array([kind[:2] for kind in kinds]) / 7
    prices = np.array([kind[2] for kind in kinds], dtype=np.float64)
    most = float(all_worth(size, prices).max())
    found = best_set(size, prices, part * most)
    assert found is not None
    assert found.bound >= most * (1 - 1e-6)
    assert found.bound <= max(most, part * most) * (1 + 1e-6)
    if part < 1 and most > 0:
        assert found.number @ prices == pytest.approx(most)
        assert (found.number @ size <= 1 + 1e-6).all()


def test_best_set_gives_up_where_shards_take_nothing():
    assert best_set(np.zeros((1, 2)), np.ones(1), 5.0) is None


def test_best_set_of_worthless_shards_is_worth_no_more_than_was_asked():
    found = best_set(np.full((2, 2), 0.5), np.zeros(2), 0.3)
    assert found is not None
    assert (found.bound, found.number.tolist()) == (0.3, [0.0, 0.0])


def test_best_set_gives_up_where_there_are_too_many_sets():
    random = np.random.default_rng(0)
    size = random.uniform(0.001, 0.002, size=(40, 3))
    assert best_set(size, size.sum(axis=1) * random.uniform(0.99, 1.01, size=40), 0.0) is None
