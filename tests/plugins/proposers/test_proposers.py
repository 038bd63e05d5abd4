from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.plugins.proposers.spaces import costed

from shardwright import Misfit, ParameterConstraints, TableSpec, Topology, Watch
from shardwright.host import host
from shardwright.planning.search.placement import propose
from shardwright.planning.search.search import search
from shardwright.planning.tables.constraints import Constraints


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
