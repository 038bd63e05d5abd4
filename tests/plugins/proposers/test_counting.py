"""Shards of few sizes shared out by counting, against all ways there are; and whole plans by numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.proposers.spaces import MIB, three_sizes

from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.planner import EmbeddingShardingPlanner
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._counted import Counted
from shardwright_plugins.proposers._counting import shared_out

ROUNDING = 1 + 1e-9


def least_load(load, sizes):
    """The least largest load of all ways to put shards on ranks."""
    best = np.inf
    for ranks in product(range(len(load)), repeat=len(sizes)):
        best = min(best, (load + np.bincount(ranks, weights=sizes, minlength=len(load))).max())
    return best


@settings(max_examples=150, deadline=None)
@given(
    load=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    kinds=st.dictionaries(st.integers(1, 12), st.integers(1, 3), min_size=1, max_size=3),
)
def test_shared_out_finds_a_way_where_there_is_one_and_no_other(load, kinds):
    kinds = {size: count for size, count in kinds.items() if sum(kinds.values()) <= 7 or size == max(kinds)}
    size = np.array(sorted(kinds, reverse=True), dtype=np.float64)
    count = np.array([kinds[int(one)] for one in size])
    loads = np.array(load, dtype=np.float64)
    least = least_load(loads, np.repeat(size, count))
    number = shared_out(loads, size, count, least)
    assert number is not None
    assert (number >= 0).all()
    assert number.sum(axis=0).tolist() == count.tolist()
    assert (loads + number @ size).max() <= least * ROUNDING
    assert shared_out(loads, size, count, least - 0.5) is None


def test_shared_out_puts_large_shards_first_where_there_are_too_many_states():
    size = np.array([9.0, 7.0, 3.0, 2.0, 1.0])
    count = np.array([4, 20, 60, 80, 100])
    number = shared_out(np.zeros(8), size, count, 85.0)
    assert number is not None
    assert number.sum(axis=0).tolist() == count.tolist()
    assert (number @ size).max() <= 85 * ROUNDING


def test_shared_out_of_nothing_looks_at_the_loads_alone():
    nothing = np.empty(0), np.empty(0, dtype=np.int64)
    assert shared_out(np.array([1.0, 2.0]), *nothing, 2.0) is not None
    assert shared_out(np.array([1.0, 2.0]), *nothing, 1.9) is None


@pytest.mark.parametrize(("ranks", "local"), [(4, 4), (8, 4), (6, 2)])
@pytest.mark.parametrize("mib", [32, 512])
def test_counted_plan_is_near_the_bound_and_within_memory(ranks, local, mib):
    space = three_sizes(40, ranks, local=local, mib=mib)
    found = Counted(Catalogue(space)).plan()
    assert found is not None
    assert (found.bins.used[:, 1:] <= space.capacity_bytes).all()
    assert space.prover.bound_ms <= found.value_ms * ROUNDING
    assert found.value_ms <= space.prover.bound_ms * 1.06


def test_counted_plan_of_tables_that_are_on_every_rank():
    topology = Topology(2, "cpu", ddr_cap=MIB)
    rule = {"*": ParameterConstraints(sharding_types=["row_wise"])}
    tables = [TableSpec(f"t{index}", 50, 32, ["f"]) for index in range(4)]
    plan = EmbeddingShardingPlanner(topology, 16, constraints=rule).plan_tables(tables)
    assert plan.document["objective"]["gap"] <= 1e-6


def test_counted_finds_nothing_where_memory_is_too_little():
    space = three_sizes(40, 4, local=4, mib=2)
    assert Counted(Catalogue(space)).plan() is None


def test_plan_of_equal_tables_over_two_hosts_is_near_its_bound():
    rule = {"*": ParameterConstraints(sharding_types=["table_wise", "table_row_wise"])}
    topology = Topology(8, "cpu", ddr_cap=512 * MIB, local_world_size=4)
    tables = [TableSpec(f"t{index}", (90_000, 4000)[index % 9 > 0], 64, ["f"]) for index in range(90)]
    plan = EmbeddingShardingPlanner(topology, 64, constraints=rule).plan_tables(tables)
    assert plan.document["objective"]["gap"] <= 0.01


def test_shared_out_thoroughly_puts_large_shards_together_where_that_leaves_room_for_others():
    size, count = np.array([31.25, 16.56, 10.42, 5.244, 2.689]), np.array([1, 5, 1, 137, 14])
    load, limit = np.full(16, 20.3), 75.65
    assert shared_out(load, size, count, limit) is None
    number = shared_out(load, size, count, limit, is_thorough=True)
    assert number is not None
    assert number.sum(axis=0).tolist() == count.tolist()
    assert (load + number @ size).max() <= limit * ROUNDING
