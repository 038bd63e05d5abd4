"""The bound against all plans there are, under rules too, and its proof against its definition."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.core.planning.conftest import Cells, Weights, Whole, make_host
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_proving import found_in, planner, tables_of, value_of
from tests.plugins.proposers.spaces import costed

from shardwright import (
    Block,
    BlockRun,
    EmbeddingShardingPlanner,
    Layout,
    NoPlanError,
    ParameterConstraints,
    RowsRange,
    SearchSpace,
    ShardingType,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host, use_host
from shardwright.planning.arrays import FREE
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import propose
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.proposers.proving.bounds.prover import Prover
from shardwright_plugins.proposers.proving.bounds.relaxation import Relaxation
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.rules import ruled_space
from shardwright_plugins.proposers.proving.search import Search


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


def best_by_trying_all(space):
    """The least largest time over all options and ranks; infinite if nothing fits."""
    best, world_size = np.inf, len(space.capacity_bytes)
    choices = [space.options.of_table(table) for table in space.options.distinct_table.tolist()]
    for proposal in product(*choices):
        shards = propose(space, np.array(proposal))
        for ranks in product(range(world_size), repeat=len(shards)):
            placed = np.array(ranks, dtype=np.int64)
            if (shards.used_bytes(placed) <= shards.capacity_bytes).all():
                best = min(best, float(shards.loads_ms(placed).max()))
    return best


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


KIB = 1 << 10


ROWS = [9000, 7000, 5000, 4000, 3000, 2500, 1500, 1000, 800, 700, 400, 300]


SHAPES = [(rows, 64) for rows in ROWS]


def space_under_rules(shapes, asked, *, ranks, kib, local=None, types=("table_wise", "column_wise")):
    """Options and costs of tables t0, t1, ... under rules."""
    tables = tables_of(shapes)
    topology = Topology(ranks, "cpu", ddr_cap=kib * KIB, local_world_size=local)
    rules = {name: ParameterConstraints(**rule) for name, rule in asked.items()}
    constraints = Constraints({**rules, "*": ParameterConstraints(sharding_types=types, min_partition=32)})
    found = RankRules.of(constraints, tables, topology)
    space = costed(tables, topology, constraints=constraints, rules=found)
    return attrs.evolve(space, rules=found)


def plain_of(space):
    """The space in which rules are resources, and what no plan in it is faster than."""
    return ruled_space(Search(space, Effort(), Watch()), space.rules)


def best_of_all(space):
    """The least value of all plans that keep the rules; infinite if there is none."""
    options, best = space.options, np.inf
    for chosen in product(*(options.of_table(int(table)) for table in options.distinct_table)):
        shards = propose(space, np.array(chosen))
        assert (shards.rank == FREE).all()
        for ranks in product(range(len(space.capacity_bytes)), repeat=len(shards)):
            places = np.array(ranks)
            if (shards.used_bytes(places) > space.capacity_bytes).any():
                continue
            used = {}
            for table, rank in zip(shards.table.tolist(), ranks, strict=True):
                used.setdefault(table, set()).add(rank)
            if space.rules is None or not space.rules.broken(used):
                best = min(best, shards.loads_ms(places).max())
    return best


ASKED = st.fixed_dictionaries(
    {},
    optional={
        "ranks": st.sets(st.integers(0, 2), min_size=1).map(sorted),
        "together": st.sampled_from("xz"),
        "apart": st.sampled_from("yw"),
    },
)


@drawn(
    rows=st.lists(st.integers(100, 9000), min_size=4, max_size=4),
    asked=st.lists(ASKED, min_size=4, max_size=4),
    kib=st.integers(1500, 6000),
    quick=8,
    thorough=25,
)
def test_proving_under_rules_finds_a_plan_where_there_is_one_and_hardly_a_worse_one(rows, asked, kib):
    named = {f"t{index}": rule for index, rule in enumerate(asked) if rule}
    try:
        space = space_under_rules([(r, 64) for r in rows], named, ranks=3, kib=kib, types=("table_wise",))
    except NoPlanError:
        return  # rules that contradict each other have tests of their own
    value, best = found_in(space).value_ms, best_of_all(space)
    assert np.isfinite(value) == np.isfinite(best)
    assert not np.isfinite(best) or value <= best * 1.05


def test_tables_leave_ranks_to_others_that_may_use_no_other_and_are_kept_apart_from_them():
    asked = {
        "t0": {"ranks": [0, 1], "apart": "w"},
        "t1": {"apart": "w", "together": "x"},
        "t2": {"together": "x"},
        "t3": {"ranks": [0], "apart": "w"},
    }
    shapes = [(rows, 64) for rows in (100, 100, 3505, 100)]
    space = space_under_rules(shapes, asked, ranks=3, kib=1500, types=("table_wise",))
    assert [np.flatnonzero(space.rules.masks[table]).tolist() for table in range(4)] == [[1], [2], [2], [0]]
    assert found_in(space).value_ms == best_of_all(space) < np.inf


@drawn(
    rows=st.lists(st.integers(100, 9000), min_size=4, max_size=4),
    asked=st.lists(ASKED, min_size=4, max_size=4),
    kib=st.integers(1500, 6000),
    ranks=st.sets(st.integers(0, 2), min_size=1).map(sorted),
    price=st.sampled_from([0.0, 1e-9, 1e-8, 1e-7]),
    times=st.sampled_from([1.0001, 1.01, 1.2]),
    quick=12,
    thorough=100,
)
def test_proof_of_some_ranks_accepts_no_bound_above_the_best_plan(rows, asked, kib, ranks, price, times):
    named = {f"t{index}": rule for index, rule in enumerate(asked) if rule}
    try:
        space = space_under_rules([(r, 64) for r in rows], named, ranks=3, kib=kib, types=("table_wise",))
    except NoPlanError:
        return
    best = best_of_all(space)
    if np.isfinite(best):
        z = best * times
        certificate = {"z_ms": z, "multipliers": {"ddr": price}, "ranks": ranks}
        assert why_unproven(space, z, certificate, host().extensions) != ""
        assert found_in(space).lower_bound_ms <= best * (1 + 1e-9)


def test_proving_bound_of_tables_that_share_few_ranks_is_that_of_these_ranks():
    asked = {f"t{index}": {"ranks": [0, 1]} for index in range(6)}
    space = space_under_rules(SHAPES, asked, ranks=8, kib=1 << 20)
    found = found_in(space)
    assert found.proven.certificate["ranks"] == [0, 1]
    assert found.lower_bound_ms > 0.95 * found.value_ms
    free = found_in(attrs.evolve(space, rules=None)).lower_bound_ms
    assert found.lower_bound_ms > 1.8 * free


@pytest.mark.parametrize(
    "asked",
    [
        {"t0": {"ranks": [0, 1, 2, 3]}},
        {"t5": {"ranks": 2}},
        {"t0": {"ranks": 3}, "t1": {"ranks": [0, 1]}},
        {"t4": {"together": "x"}, "t7": {"together": "x"}},
        {"t0": {"apart": "x"}, "t1": {"apart": "x"}},
    ],
)
def test_proving_rule_that_costs_nothing_costs_next_to_nothing(asked):
    types = {"*": ParameterConstraints(sharding_types=["table_wise", "column_wise"], min_partition=32)}
    free = value_of(planner(ranks=4, constraints=types, estimator="roofline"), tables_of(SHAPES))
    rules = {name: ParameterConstraints(**rule) for name, rule in asked.items()}
    made = value_of(planner(ranks=4, constraints={**rules, **types}, estimator="roofline"), tables_of(SHAPES))
    assert made <= free * 1.005


def test_proving_tables_kept_together_share_a_rank_where_only_some_fit_its_device():
    # Each fits on a rank's device, all three do not: the host must hold one at least.
    tables = tables_of([(80_000, 64)] * 3)
    topology = Topology(2, "cuda", hbm_cap=50 << 20, ddr_cap=1 << 27)
    rules = {"*": ParameterConstraints(together="x", sharding_types=["table_wise"])}
    made_by = EmbeddingShardingPlanner(topology, 64, constraints=rules, storage_reservation=0.0)
    made = made_by.plan_tables(tables).plan[""]
    assert len({rank for sharding in made.values() for rank in sharding.ranks}) == 1
    kernels = [sharding.compute_kernel for sharding in made.values()]
    assert kernels.count("fused") == 2
    assert plain_of(made_by.report.space) is not None
