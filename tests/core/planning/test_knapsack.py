"""The knapsack of a rank, against all sets that fit and against the solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardwright.planning.knapsack as knapsack
from shardwright.planning.knapsack import most_worth
from shardwright.planning.solver import most_worth as solved_most_worth

NUMBERS = np.indices((5, 5, 5, 5)).reshape(4, -1).T


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), dims=st.integers(1, 3), below=st.floats(0, 1.2))
def test_most_worth_is_that_of_the_best_of_all_sets_that_fit_or_the_floor(seed, dims, below):
    assume(abs(below - 1) > 1e-6)
    random = np.random.default_rng(seed)
    size, prices = random.uniform(0.2, 0.7, size=(4, dims)), random.uniform(0, 2, size=4)
    fits = (NUMBERS @ size <= 1).all(axis=1)
    best = float((NUMBERS[fits] @ prices).max())
    worth, found = most_worth(size, prices, below * best)
    assert worth == pytest.approx(max(1, below) * best, rel=1e-9)
    assert len(found) == (below < 1)
    assert (found @ size <= 1 + 1e-9).all()
    assert found @ prices == pytest.approx(np.full(len(found), best))


def test_most_worth_gives_the_best_sets_that_are_worth_more_than_the_floor():
    size, prices = np.random.default_rng(0).uniform(0.2, 0.7, size=(4, 2)), np.array([3.0, 2.0, 2.5, 1.0])
    fits = (NUMBERS @ size <= 1).all(axis=1)
    every = np.sort(NUMBERS[fits] @ prices)[::-1]
    _, found = most_worth(size, prices, every[3], 10)
    assert (found @ prices).tolist() == pytest.approx(every[every > every[3]].tolist())
    assert len(np.unique(found, axis=0)) == len(found)
    _, found = most_worth(size, prices, every[8], 2)
    assert (found @ prices).tolist() == pytest.approx(every[:2].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_most_worth_of_many_kinds_is_what_the_solver_finds(seed):
    random = np.random.default_rng(seed)
    size = random.uniform(0.02, 0.5, size=(30, 2))
    prices = size @ random.uniform(0.3, 1, size=2) * random.uniform(0.9, 1, size=30)
    solved, _ = solved_most_worth(size, prices)
    worth, found = most_worth(size, prices, 0.9 * solved)
    assert worth == pytest.approx(solved, rel=1e-5)
    assert found[0] @ prices == pytest.approx(solved, rel=1e-5)


def test_most_worth_of_kinds_without_a_price_is_nothing():
    worth, found = most_worth(np.full((3, 2), 0.1), np.zeros(3), 0.0)
    assert worth == 0
    assert not len(found)


def test_most_worth_where_very_many_shards_go_into_a_rank_is_the_solvers(monkeypatch):
    monkeypatch.setattr(knapsack, "_MOST_SHARDS", 2)
    size, prices = np.array([[0.3, 0.2], [0.2, 0.4], [0.26, 0.3]]), np.array([3.0, 3.1, 2.9])
    worth, found = most_worth(size, prices, 1.0)
    assert found.shape == (1, 3)
    assert worth == pytest.approx(found[0] @ prices, rel=1e-5)
    assert worth == pytest.approx(solved_most_worth(size, prices)[0])


@pytest.mark.parametrize("seed", range(8))
def test_most_worth_where_sets_are_left_out_is_no_less_than_that_of_the_best(monkeypatch, seed):
    monkeypatch.setattr(knapsack, "_MOST_SETS", 2)
    random = np.random.default_rng(seed)
    size, prices = random.uniform(0.2, 0.7, size=(4, 2)), random.uniform(0, 2, size=4)
    best = float((NUMBERS[(NUMBERS @ size <= 1).all(axis=1)] @ prices).max())
    worth, found = most_worth(size, prices, 0.3 * best)
    assert best * (1 - 1e-9) <= worth <= 2 * best
    assert (found @ prices <= worth).all()
