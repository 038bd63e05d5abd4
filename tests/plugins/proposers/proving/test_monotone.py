"""More to choose from and more memory are never worse: what holds of bounds, and of values within the gap.

No plan of the wider problem is better than its bound, and each plan of the narrower one is a plan of it. So for any
two such problems ``bound(wider) <= value(narrower)``, and ``value(wider) <= (1 + gap(wider)) * value(narrower)`` with
the gap that the wider problem's document reports. On one host small problems are solved to within 0.3 %, and so the law
holds to that; over two hosts five tables of 50 rows keep a gap of 6 to 10 %.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.spaces import costed

from shardwright import (
    EmbeddingShardingPlanner,
    Misfit,
    NoPlanError,
    ParameterConstraints,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host
from shardwright.planning.search.placement import propose
from shardwright.planning.search.search import search
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.proposers.proving.effort import Effort

KIB = 1 << 10
CLOSE = Effort().close
TYPES = ("table_wise", "column_wise", "row_wise", "data_parallel", "table_row_wise", "table_column_wise")
SHAPES = st.lists(st.tuples(st.integers(50, 5000), st.sampled_from([32, 64, 128])), min_size=1, max_size=5)
KINDS = st.sets(st.sampled_from(TYPES), min_size=1, max_size=3)
TOPOLOGIES = st.sampled_from([(2, 2), (3, 3), (4, 2)])
ROUNDING = 1 + 1e-9


def objective_of(shapes, kinds, parts, ranks, local):
    """The objective of the plan with a part of the tables' memory on each rank; ``None`` if there is none."""
    tables = [TableSpec(f"t{i}", rows, dim, ["f"]) for i, (rows, dim) in enumerate(shapes)]
    weights = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    topology = Topology(ranks, "cpu", local_world_size=local, ddr_cap=int(weights * parts) + 64 * KIB)
    rules = {"*": ParameterConstraints(sharding_types=sorted(kinds))}
    planner = EmbeddingShardingPlanner(topology, 16, constraints=rules, storage_reservation=0.0)
    try:
        return planner.plan_tables(tables).document["objective"]
    except NoPlanError:
        return None


def check_never_worse(narrow, wide):
    assert wide is not None
    assert wide["lower_bound_ms"] <= narrow["value_ms"] * ROUNDING
    assert wide["value_ms"] <= narrow["value_ms"] * (1 + wide["gap"]) * ROUNDING


def check_close(objective, ranks, local):
    """Check that a small problem on one host is solved to within what the search is content with."""
    if ranks == local:
        assert objective["gap"] <= CLOSE * 1.1


@drawn(
    shapes=SHAPES, few=KINDS, more=KINDS, parts=st.floats(0.3, 1.5), shape=TOPOLOGIES, quick=10, thorough=100
)
def test_plan_with_more_sharding_types_is_never_worse(shapes, few, more, parts, shape):
    narrow = objective_of(shapes, few, parts, *shape)
    assume(narrow is not None)
    wide = objective_of(shapes, few | more, parts, *shape)
    check_never_worse(narrow, wide)
    check_close(wide, *shape)


@drawn(
    shapes=SHAPES,
    kinds=KINDS,
    parts=st.floats(0.3, 1.2),
    times=st.floats(1, 2),
    shape=TOPOLOGIES,
    quick=10,
    thorough=100,
)
def test_plan_with_more_memory_is_never_worse(shapes, kinds, parts, times, shape):
    narrow = objective_of(shapes, kinds, parts, *shape)
    assume(narrow is not None)
    wide = objective_of(shapes, kinds, parts * times, *shape)
    check_never_worse(narrow, wide)
    check_close(wide, *shape)


@pytest.mark.parametrize("parts", [0.4, 0.5])
def test_plan_of_alike_tables_over_alike_hosts_is_proven_best(parts):
    shapes = [(3816, 128)] * 3 + [(4999, 128), (62, 128)]
    objective = objective_of(shapes, {"table_wise", "table_column_wise"}, parts, 4, 2)
    assert objective["gap"] <= CLOSE * 1.1


def space_of(tables, *, ranks=2, ddr_cap=1 << 30, batch_size=256, ids_per_bag=1.0):
    topology = Topology(ranks, "cpu", ddr_cap=ddr_cap)
    constraints = Constraints({"*": ParameterConstraints(pooling_factors=[ids_per_bag])})
    return costed(tables, topology, constraints=constraints, batch_size=batch_size)


def run(space, *names):
    proposers = [host().proposers.create(name) for name in names]
    return search(space, proposers, host().partitioners.create("greedy_perf"), host().extensions)


def types_of(space, proposal):
    return [space.options.type_of(option).name for option in proposal.tolist()]


TABLES = [TableSpec(f"t{i}", 1000 * (i + 1), (16, 64, 128)[i % 3], [f"f{i}"]) for i in range(7)]


def test_greedy_starts_with_the_option_of_least_cost_on_any_rank():
    space = space_of(TABLES)
    proposal = next(host().proposers.create("greedy").proposals(space, Watch()))
    for table, option in enumerate(proposal.tolist()):
        mine = space.options.of_table(table)
        assert space.largest_cost_ms[option] == space.largest_cost_ms[mine.start : mine.stop].min()


def test_uniform_proposes_each_type_for_every_table_that_has_it():
    space = space_of(TABLES)
    proposals = host().proposers.create("uniform").proposals(space, Watch())
    seen = [types_of(space, proposal) for proposal in proposals]
    assert ["row_wise"] * 7 in seen
    assert ["table_wise"] * 7 in seen
    narrow = {index for index, table in enumerate(TABLES) if table.embedding_dim == 16}
    mixed = next(kinds for kinds in seen if "column_wise" in kinds)
    assert {index for index, kind in enumerate(mixed) if kind != "column_wise"} == narrow


def best_placed(space):
    """The least value of all choices of options, each placed by the partitioner."""
    partitioner, values = host().partitioners.create("greedy_perf"), []
    for chosen in product(
        *(space.options.of_table(table) for table in space.options.distinct_table.tolist())
    ):
        shards = propose(space, np.array(chosen), with_fixed=True)
        ranks = partitioner.place(shards)
        if not isinstance(ranks, Misfit):
            values.append(float(shards.loads_ms(ranks).max()))
    return min(values)


def test_grid_search_finds_the_best_of_all_combinations_where_the_cheapest_do_not_fit():
    space = space_of([TableSpec(f"t{i}", 3000 * (i + 1), 64, [f"f{i}"]) for i in range(2)], ddr_cap=1_400_000)
    found = run(space, "grid_search")
    assert found.num_placed < found.num_proposals
    assert found.value_ms == pytest.approx(best_placed(space))
