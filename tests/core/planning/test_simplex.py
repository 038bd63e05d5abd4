"""The simplex method against SciPy's, and columns that are added later."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from shardwright.planning.simplex import Simplex


def covering(seed):
    """Cover 6 rows by columns that cost something; at first each row has a dear column of its own."""
    random = np.random.default_rng(seed)
    columns = np.hstack([np.eye(6), -np.eye(6), random.integers(0, 4, size=(6, 12))])
    cost = np.concatenate([np.full(6, 50.0), np.zeros(6), random.uniform(1, 5, size=12)])
    return columns, cost, random.uniform(1, 9, size=6)


@pytest.mark.parametrize("seed", range(10))
def test_simplex_finds_the_least_cost_and_its_prices(seed):
    columns, cost, limit = covering(seed)
    program = Simplex(columns, cost, limit)
    assert program.begin(np.arange(6))
    assert program.solve(500)
    least = linprog(cost, A_eq=columns, b_eq=limit)
    assert program.value == pytest.approx(least.fun)
    assert columns @ program.solution == pytest.approx(limit)
    assert program.prices @ limit == pytest.approx(least.fun)
    assert (cost - program.prices @ columns >= -1e-6).all()


@pytest.mark.parametrize("seed", range(5))
def test_simplex_with_columns_added_later_ends_where_it_ends_with_all(seed):
    columns, cost, limit = covering(seed)
    program = Simplex(columns[:, :14], cost[:14], limit)
    program.begin(np.arange(6))
    program.solve(500)
    some = program.value
    program.add(columns[:, 14:], cost[14:])
    assert program.solve(500)
    assert program.value == pytest.approx(linprog(cost, A_eq=columns, b_eq=limit).fun)
    assert program.value <= some


def test_simplex_stops_at_what_is_enough():
    columns, cost, limit = covering(0)
    program = Simplex(columns, cost, limit)
    program.begin(np.arange(6))
    assert not program.solve(500, enough=program.value - 1)
    assert linprog(cost, A_eq=columns, b_eq=limit).fun < program.value < cost[:6] @ limit


def test_simplex_refuses_a_basis_that_is_none_or_has_negative_values():
    columns, cost, limit = covering(0)
    program = Simplex(columns, cost, limit)
    assert not program.begin(np.array([0, 0, 1, 2, 3, 4]))
    assert not program.begin(np.arange(6, 12))
