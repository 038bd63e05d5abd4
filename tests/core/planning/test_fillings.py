"""Ranks filled greedily: all fit, and no shard that is worth something fits beside them."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.planning.fillings import fillings, many_fillings, orders_of


@pytest.mark.parametrize("seed", range(6))
def test_fillings_fit_and_leave_no_room_for_what_is_worth_something(seed):
    random = np.random.default_rng(seed)
    size, prices = random.uniform(0.05, 0.6, size=(6, 2)), random.uniform(0, 1, size=6)
    prices[0] = 0.0
    found = many_fillings(size, prices, orders_of(2))
    left = 1 - found @ size
    assert (left >= -1e-6).all()
    assert (found[:, 0] == 0).all()
    assert not (left[:, None] >= size[None, 1:] + 1e-6).all(axis=2).any()


def test_fillings_keep_what_is_there_at_first():
    size, starts = np.array([[0.6], [0.3]]), np.array([[1.0, 0.0], [0.0, 0.0]])
    found = fillings(size, np.array([0.1, 1.0]), np.ones((1, 1)), starts)
    assert found.tolist() == [[1.0, 1.0], [0.0, 3.0]]
