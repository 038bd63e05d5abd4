"""Plans by patterns: the program's ranks against all patterns there are, and shards where the patterns say."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.proposers.proving.test_bounds import prover_of
from tests.plugins.proposers.spaces import MIB, three_sizes
from tests.programs import printed_by

from shardwright import EmbeddingShardingPlanner, ParameterConstraints, Placed, TableSpec, Topology, Watch
from shardwright.planning.search.placement import propose
from shardwright_plugins.proposers.proving.columns.distinct_rows import distinct_rows, sorted_rows
from shardwright_plugins.proposers.proving.columns.kinds import Kinds
from shardwright_plugins.proposers.proving.columns.linear import LinearProgram
from shardwright_plugins.proposers.proving.columns.master import Master
from shardwright_plugins.proposers.proving.columns.plans import ColumnSearch, _whole_tables
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.packing.assignment import Catalogue
from shardwright_plugins.proposers.proving.search import Search


def kinds_of(sizes):
    """Tables of one option with one shard each."""
    number = len(sizes)
    return Kinds(
        options=np.arange(number),
        table=np.arange(number),
        needs=np.eye(number),
        size=np.array(sizes, dtype=np.float64),
        kind_of=np.arange(number),
        is_gang=np.zeros(number, dtype=bool),
        spread=np.zeros((number, len(sizes[0]))),
        budget=np.zeros(len(sizes[0])),
    )


def solved(sizes, counts, enough=0.0):
    master = Master(kinds_of(sizes), np.array(counts), np.empty((0, len(sizes))))
    return master.solve(enough, np.inf, Effort(), Watch())


def least_ranks(sizes, counts):
    """The same program with all patterns."""
    size = np.array(sizes)
    most = [int(1 / max(one)) for one in sizes]
    patterns = np.array(np.meshgrid(*[range(count + 1) for count in most])).reshape(len(sizes), -1)
    patterns = patterns[:, (size.T @ patterns <= 1 + 1e-9).all(axis=0)].astype(np.float64)
    program = LinearProgram(np.array(counts, dtype=np.float64), np.full(len(counts), np.inf))
    program.add(np.ones(patterns.shape[1]), patterns)
    assert program.solve()
    return program.value


@pytest.mark.parametrize("seed", range(12))
def test_master_needs_about_as_many_ranks_as_with_all_patterns(seed):
    random = np.random.default_rng(seed)
    sizes = random.uniform(0.12, 0.7, size=(5, 2)).tolist()
    counts = random.integers(3, 40, size=5).tolist()
    least = least_ranks(sizes, counts)
    assert least * (1 - 1e-6) <= solved(sizes, counts).ranks <= least * 1.02 + 1e-3


def test_whole_tables_takes_each_option_about_as_often_as_asked():
    kinds = attrs.evolve(kinds_of([[0.1], [0.1], [0.1]]), table=np.array([0, 0, 1]))
    proposal = _whole_tables(np.array([2.4, 4.6, 3.0]), kinds, np.array([0] * 7 + [1] * 3))
    assert np.bincount(proposal).tolist() == [2, 5, 3]


@pytest.mark.parametrize("local", [4, 32])
def test_column_search_finds_a_plan_near_the_bound(local):
    space = three_sizes(240, 32, local=local, mib=64)
    search = ColumnSearch(Catalogue(space, Watch()), prover_of(space), Effort(), enough=0.985)
    assert search.is_worth_it
    found = search.plan()
    assert (found.bins.bin >= 0).all()
    assert search.prover.bound_ms <= found.value_ms <= search.prover.bound_ms * 1.1


def test_plan_many_equal_tables_over_many_ranks_is_near_its_bound():
    rule = {"*": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}
    topology = Topology(32, "cpu", ddr_cap=48 * MIB, local_world_size=8)
    tables = [TableSpec(f"t{index}", (9000, 4000, 500)[index % 3], 64, ["f"]) for index in range(300)]
    plan = EmbeddingShardingPlanner(topology, 64, constraints=rule).plan_tables(tables)
    assert plan.document["objective"]["gap"] <= 0.03


@pytest.mark.parametrize("ranks", [4, 32])
def test_search_whose_time_is_over_at_once_has_a_hasty_plan(ranks):
    space = three_sizes(240, ranks, local=4, mib=512)
    found = [each for each in Search(space, Effort(), Watch(seconds=0.0)).plans() if isinstance(each, Placed)]
    assert found
    used = propose(space, found[-1].proposal).used_bytes(found[-1].ranks)
    assert (used <= space.capacity_bytes).all()


def test_linear_program_has_the_prices_of_its_limits_and_goes_on_with_new_columns():
    # The least cost of x >= 1.5 and x + y >= 4, where y costs twice as much and x is at most 3.
    program = LinearProgram(np.array([4.0, -np.inf]), np.array([np.inf, 3.0]))
    program.add(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert program.solve()
    assert program.value == pytest.approx(5.0)
    np.testing.assert_allclose(program.solution, [3.0, 1.0])
    np.testing.assert_allclose(program.prices, [2.0, -1.0])
    program.add(np.array([1.0]), np.array([[2.0], [0.0]]))
    assert program.solve()
    assert program.value == pytest.approx(2.0)


def test_linear_program_without_a_solution_says_so():
    program = LinearProgram(np.array([4.0]), np.array([np.inf]))
    program.add(np.array([1.0]), np.array([[-1.0]]))
    assert not program.solve()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_distinct_rows_are_each_once_in_the_order_in_which_they_come_first(rows):
    given_rows = np.array(rows, dtype=np.float64).reshape(-1, 2)
    assert distinct_rows(given_rows).tolist() == [list(row) for row in dict.fromkeys(rows)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), max_size=12))
def test_sorted_rows_are_each_once_in_rising_order(rows):
    given_rows = np.array(rows, dtype=np.float64).reshape(-1, 2)
    assert sorted_rows(given_rows).tolist() == [list(row) for row in sorted(set(rows))]


def test_sorted_rows_import_no_masked_arrays():
    source = """
import sys
import numpy as np
before = "numpy.ma" in sys.modules  # NumPy 1 imports them itself
from shardwright_plugins.proposers.proving.columns.distinct_rows import sorted_rows
before = before or "numpy.ma" in sys.modules  # what is around it
sorted_rows(np.eye(3))
assert ("numpy.ma" in sys.modules) == before
"""
    printed_by("-c", source)
