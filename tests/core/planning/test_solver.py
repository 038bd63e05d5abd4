from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
import scipy.optimize

from shardwright.planning.solver import LinearProgram, MixedProgram


def knapsack():
    """Of things worth 3, 4 and 5 that weigh 2, 3 and 4, those of most worth within 5."""
    return MixedProgram(
        cost=np.array([-3.0, -4.0, -5.0]),
        matrix=np.array([[2.0, 3.0, 4.0]]),
        lower=np.array([0.0]),
        upper=np.array([5.0]),
        most=np.ones(3),
        is_whole=np.ones(3, dtype=bool),
    )


def solved(program):
    return program.solve(most_nodes=100, seconds=10.0, precision=1e-9)


def test_solver_finds_the_best_whole_numbers():
    found = solved(knapsack())
    assert found.x.tolist() == [1.0, 1.0, 0.0]
    assert found.fun == pytest.approx(-7.0)


def test_solver_without_a_solution_says_so():
    program = knapsack()
    program.upper[:] = -1.0
    program.lower[:] = -2.0
    assert solved(program).x is None


@pytest.mark.skipif(os.name != "posix", reason="C's standard output is found by name on POSIX only")
def test_solver_that_prints_from_c_leaves_standard_output_clean(monkeypatch, capfd):
    def chatty(*args, **kwargs):
        os.write(1, b"written\n")
        ctypes.CDLL(None).puts(b"put")
        return "found"

    monkeypatch.setattr(scipy.optimize, "milp", chatty)
    print("before")
    assert solved(knapsack()) == "found"
    print("after")
    output = capfd.readouterr()
    assert output.out == "before\nafter\n"
    assert output.err == ""


def test_solver_where_standard_output_is_closed_answers_all_the_same():
    code = (
        "import os; os.close(1)\n"
        "from tests.core.planning.test_solver import knapsack, solved\n"
        "assert solved(knapsack()).x.tolist() == [1.0, 1.0, 0.0]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_linear_program_has_the_prices_of_its_limits():
    # The least cost of x >= 1.5 and x + y >= 4, where y costs twice as much and x is at most 3.
    program = LinearProgram(
        cost=np.array([1.0, 2.0]),
        at_most=np.array([[-1.0, -1.0], [1.0, 0.0]]),
        limits=np.array([-4.0, 3.0]),
        equal=np.zeros((1, 2)),
        wanted=np.zeros(1),
    )
    found = program.solve()
    assert found.value == pytest.approx(5.0)
    np.testing.assert_allclose(found.x, [3.0, 1.0])
    np.testing.assert_allclose(found.prices, [2.0, 1.0])
    assert attrs.evolve(program, limits=np.array([-4.0, -1.0])).solve() is None
