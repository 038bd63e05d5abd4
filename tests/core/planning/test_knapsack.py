"""The knapsack of a rank, against all sets that fit and against the solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright.planning.knapsack as knapsack
from shardwright.planning.knapsack import most_worth
from shardwright.planning.solver import most_worth as solved_most_worth

NUMBERS = np.indices((5, 5, 5, 5)).reshape(4, -1).T


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), dims=st.integers(1, 3), below=st.floats(0, 1.2))
def test_most_worth_is_that_of_the_best_of_all_sets_that_fit_or_the_floor(seed, dims, below):
    random = np.random.default_rng(seed)
    size, prices = random.uniform(0.2, 0.7, size=(4, dims)), random.uniform(0, 2, size=4)
    fits = (NUMBERS @ size <= 1).all(axis=1)
    best = float((NUMBERS[fits] @ prices).max())
    worth, found = most_worth(size, prices, below * best)
    assert worth == pytest.approx(max(1, below) * best, rel=1e-9)
    assert (found @ size <= 1 + 1e-9).all()
    assert found @ prices == pytest.approx(best if below < 1 else 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_most_worth_of_many_kinds_is_what_the_solver_finds(seed):
    random = np.random.default_rng(seed)
    size = random.uniform(0.02, 0.5, size=(30, 2))
    prices = size @ random.uniform(0.3, 1, size=2) * random.uniform(0.9, 1, size=30)
    solved, _ = solved_most_worth(size, prices)
    worth, found = most_worth(size, prices, 0.9 * solved)
    assert worth == pytest.approx(solved, rel=1e-5)
    assert found @ prices == pytest.approx(solved, rel=1e-5)


def test_most_worth_of_kinds_without_a_price_is_nothing():
    worth, found = most_worth(np.full((3, 2), 0.1), np.zeros(3), 0.0)
    assert worth == 0
    assert not found.any()


@pytest.mark.parametrize("limit", ["_MOST_SETS", "_MOST_SHARDS"])
def test_most_worth_where_there_are_too_many_sets_is_the_solvers(monkeypatch, limit):
    monkeypatch.setattr(knapsack, limit, 2)
    size, prices = np.array([[0.3, 0.2], [0.2, 0.4], [0.26, 0.3]]), np.array([3.0, 3.1, 2.9])
    worth, found = most_worth(size, prices, 0.0)
    assert worth == pytest.approx(found @ prices, rel=1e-5)
    assert worth == pytest.approx(solved_most_worth(size, prices)[0])
