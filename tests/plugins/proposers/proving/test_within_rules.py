"""The default search under rules on ranks: compared with all plans there are, and with plans without rules."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_proving import found_in, planner, tables_of, value_of
from tests.plugins.proposers.spaces import costed

from shardwright import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    Placed,
    ProposedShards,
    Topology,
    Watch,
)
from shardwright.host import host
from shardwright.planning.arrays import FREE, NO_GANG
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.partitioners.longest_first import LongestFirst
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.rules import ruled_space, with_given_ranks
from shardwright_plugins.proposers.proving.search import Search

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


def test_proving_bound_of_tables_kept_together_is_what_they_take_on_one_rank():
    asked = {f"t{index}": {"together": "x"} for index in range(4)}
    space = space_under_rules(SHAPES, asked, ranks=6, kib=1 << 20)
    found = found_in(space)
    assert found.lower_bound_ms > 0.95 * found.value_ms
    assert found.lower_bound_ms > 1.5 * found_in(attrs.evolve(space, rules=None)).lower_bound_ms


def test_proving_pinned_table_leaves_the_rest_as_good_a_plan_as_before():
    # With options chosen once, and never again for what lies on the ranks, the plan is 11 % worse.
    random = np.random.default_rng(1)
    rows = sorted((10 ** random.uniform(3, 5.3, 14)).astype(int).tolist(), reverse=True)
    tables = tables_of([(count, (16, 64, 128)[index % 3]) for index, count in enumerate(rows)])
    free, pinned = (
        value_of(
            EmbeddingShardingPlanner(Topology(8, "cuda", local_world_size=4), 4096, constraints=rules), tables
        )
        for rules in ({}, {"t0": ParameterConstraints(ranks=[1])})
    )
    assert pinned <= free * 1.01


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


def test_proving_that_a_pinned_table_overloads_its_rank_ends_at_once():
    asked = {f"t{index}": {"ranks": 0} for index in range(8)}
    space = space_under_rules(SHAPES, asked, ranks=4, kib=1 << 20)
    plain, least_ms = plain_of(space)
    pinned = [np.min(space.total_cost_ms[list(space.options.of_table(t))]) for t in range(8)]
    value = found_in(space).value_ms
    assert Search(plain, Effort(), Watch(), least_ms).prover.bound_ms >= sum(pinned) * (1 - 1e-9)
    assert value == pytest.approx(sum(pinned))
    assert found_in(space).lower_bound_ms == pytest.approx(value)


def test_proving_under_rules_has_a_plan_of_choices_before_it_searches(monkeypatch):
    space, begun = space_under_rules(SHAPES, {"t0": {"ranks": [0]}}, ranks=4, kib=1 << 20), []
    plans = Search.plans

    def noted(self):
        begun.append(self.watch.progress.value_ms)
        yield from plans(self)

    monkeypatch.setattr(Search, "plans", noted)
    found_in(space)
    assert len(begun) == 1
    assert np.isfinite(begun[0])


def test_ruled_space_without_a_rule_that_binds_is_the_space_itself():
    space = space_under_rules(SHAPES[:3], {"t0": {"ranks": [0, 1]}}, ranks=2, kib=1 << 20)
    ruled, _ = plain_of(space)
    assert ruled.further_tiers == ()
    np.testing.assert_array_equal(ruled.options.rank, space.options.rank)
    assert ruled.rules is None


def test_proving_pinned_table_that_fits_one_rank_by_another_kernel_only_has_a_plan():
    # 48 MiB of weights, 32 MiB of device memory: in pieces it would fit, on one rank the host must hold it.
    tables = tables_of([(200_000, 64), (1000, 64), (2000, 64)])
    topology = Topology(4, "cuda", hbm_cap=1 << 25, ddr_cap=1 << 27, local_world_size=2)
    rules = {"t0": ParameterConstraints(ranks=[3])}
    made = EmbeddingShardingPlanner(topology, 64, constraints=rules, storage_reservation=0.0).plan_tables(
        tables
    )
    assert made.plan[""]["t0"].compute_kernel in ("fused_uvm", "fused_uvm_caching")
    assert set(made.plan[""]["t0"].ranks) == {3}


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


def test_ruled_space_plans_are_plans_of_the_given_space():
    asked = {"t0": {"ranks": 2}, "t1": {"together": "x"}, "t2": {"together": "x"}}
    space = space_under_rules(SHAPES[:5], asked, ranks=3, kib=1 << 20)
    plain, _ = plain_of(space)
    proposal = space.options.first_option[:-1][space.options.distinct_table]
    free = propose(plain, proposal)
    placed = with_given_ranks(space, plain, Placed(proposal, np.ones(len(free), dtype=np.int64)))
    tables = propose(space, proposal).table
    assert set(placed.ranks[tables == 0].tolist()) == {2}
    assert len(set(placed.ranks[(tables == 1) | (tables == 2)].tolist())) == 1
    assert set(placed.ranks[tables > 2].tolist()) == {1}


def test_place_within_a_gang_shares_an_allowed_host():
    rules = RankRules.of(
        Constraints({"t0": ParameterConstraints(ranks=[2, 3])}),
        tables_of(SHAPES[:2]),
        Topology(4, "cpu", local_world_size=2),
    )
    shards = ProposedShards(
        shard=np.arange(3),
        table=np.array([0, 0, 1]),
        cost_ms=np.ones(3),
        memory_bytes=np.ones((3, 1), dtype=np.int64),
        tiers=("ddr",),
        capacity_bytes=np.full((4, 1), 100),
        gang=np.array([0, 0, NO_GANG]),
        local_rank=np.array([0, 1, FREE]),
        local_world_size=2,
    )
    assert place_within(rules, LongestFirst(), shards)[:2].tolist() == [2, 3]
