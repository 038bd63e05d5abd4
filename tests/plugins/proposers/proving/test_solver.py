"""Programs with known answers, and a solver that keeps quiet."""

from __future__ import annotations

import subprocess
import sys

import attrs
import numpy as np
import pytest
from tests.programs import printed_by

from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.solver import Entries, MixedProgram


def knapsack():
    """Of things worth 3, 4 and 5 that weigh 2, 3 and 4, those of most worth within 5."""
    return MixedProgram(
        cost=np.array([-3.0, -4.0, -5.0]),
        matrix=Entries.of(np.array([[2.0, 3.0, 4.0]])),
        lower=np.array([0.0]),
        upper=np.array([5.0]),
        most=np.ones(3),
        is_whole=np.ones(3, dtype=bool),
    )


def solved(program, watch=None):
    return program.solve(most_nodes=100, precision=1e-9, watch=watch or Watch())


def test_solver_finds_the_best_whole_numbers():
    found = solved(knapsack())
    assert found.x.tolist() == [1.0, 1.0, 0.0]
    assert found.bound == pytest.approx(-7.0)
    assert not found.is_infeasible


def test_solver_adds_up_entries_of_one_place():
    halves = Entries(np.zeros(6, dtype=np.int64), np.array([0, 1, 2] * 2), np.array([1.0, 1.5, 2.0] * 2))
    assert solved(attrs.evolve(knapsack(), matrix=halves)).x.tolist() == [1.0, 1.0, 0.0]


def test_solver_counts_its_work_and_ends_when_that_is_spent():
    watch, spent = Watch(), Watch(work_us=1.0)
    assert solved(knapsack(), watch).x is not None
    assert watch.spent_us > 0
    assert solved(hard_program(), spent).x is None


def hard_program():
    """Forty lumps on seven ranks, as even as can be."""
    size, ranks = np.random.default_rng(0).uniform(1, 2, 40), 7
    number = np.arange(40 * ranks)
    lump, rank = np.divmod(number, ranks)
    rows = [lump, 40 + rank, 40 + np.arange(ranks)]
    columns = [number, number, np.full(ranks, len(number))]
    values = [np.ones(len(number)), size[lump], np.full(ranks, -1.0)]
    return MixedProgram(
        cost=np.append(np.zeros(len(number)), 1.0),
        matrix=Entries(np.concatenate(rows), np.concatenate(columns), np.concatenate(values)),
        lower=np.append(np.ones(40), np.full(ranks, -np.inf)),
        upper=np.append(np.ones(40), np.zeros(ranks)),
        most=np.append(np.ones(len(number)), 100.0),
        is_whole=np.arange(len(number) + 1) < len(number),
    )


def test_solver_prints_nothing():
    code = (
        "from tests.plugins.proposers.proving.test_solver import hard_program, solved\n"
        "assert solved(hard_program()).bound > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_solver_where_standard_output_is_closed_answers_all_the_same():
    code = (
        "import os; os.close(1)\n"
        "from tests.plugins.proposers.proving.test_solver import knapsack, solved\n"
        "assert solved(knapsack()).x.tolist() == [1.0, 1.0, 0.0]\n"
    )
    printed_by("-c", code)
