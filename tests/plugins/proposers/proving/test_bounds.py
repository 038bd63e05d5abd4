"""The bound against all plans there are, and its proof against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from tests.core.planning.conftest import Cells, Weights, Whole, make_host
from tests.drawn import drawn
from tests.plugins.proposers.spaces import best_by_trying_all

from shardwright import (
    Block,
    BlockRun,
    Layout,
    RowsRange,
    SearchSpace,
    ShardingType,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host, use_host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.proofs import why_unproven
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.proposers.proving.bounds.prover import Prover
from shardwright_plugins.proposers.proving.bounds.relaxation import Relaxation


class Cut(ShardingType):
    name, abbreviation, depends_on_shape_only = "cut", "CU", True
    offered = "always"

    def layouts(self, table, topology, constraints):
        rows = RowsRange(table.num_embeddings, parts=topology.world_size)
        yield Layout([BlockRun(rows, table.all_columns, topology.world_size, rank=0)])


class Halves(ShardingType):
    name, abbreviation, depends_on_shape_only = "halves", "HA", True
    offered = "always"

    def layouts(self, table, topology, constraints):
        half = table.embedding_dim // 2
        spans = [table.columns(0, half), table.columns(half, table.embedding_dim)]
        yield Layout([Block(table.all_rows, span) for span in spans])


class Alike(Cells):
    depends_on_shape_only = True


class AlikeWeights(Weights):
    depends_on_shape_only = True


class AlikeWhole(Whole):
    depends_on_shape_only = True


def space_of(rows, *, ranks=2, capacity=100_000) -> SearchSpace:
    tables = [TableSpec(f"t{i}", count, 8, ["f"]) for i, count in enumerate(rows)]
    topology = Topology(ranks, "cpu", ddr_cap=capacity)
    offered = {"sharding_types": [AlikeWhole, Cut, Halves], "estimators": [Alike, AlikeWeights]}
    with use_host(make_host(**offered)):
        options = enumerate_options(tables, topology, Constraints(), host(), batch_size=4)
        make = host().estimators.create
        return estimate_costs(options, topology, make("cells"), make("weights"), topology.capacity_bytes)


def prover_of(space):
    """A prover with the bound of the relaxation of all plans."""
    prover = Prover(Relaxation(space), Watch())
    prover.begin()
    return prover


@drawn(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    capacity=st.integers(200, 4000),
    trials=st.lists(st.floats(0.3, 1.5), min_size=3, max_size=3),
    quick=15,
    thorough=80,
)
def test_bound_is_never_above_the_best_plan_and_is_proven_again(rows, capacity, trials):
    space = space_of(rows, capacity=capacity)
    best, prover = best_by_trying_all(space), prover_of(space)
    assert prover.bound_ms <= best * (1 + 1e-9)
    if np.isfinite(best):
        for part in trials:
            prover.choice(part * best)
        assert prover.bound_ms <= best * (1 + 1e-9)
        assert why_unproven(space, prover.bound_ms, prover.proven.certificate, host().extensions) == ""
