"""The laws of the default search, over many small problems, and under rules on ranks."""

from __future__ import annotations

import json
import os

import attrs
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_bounds import prover_of
from tests.plugins.proposers.spaces import all_plans, costed
from tests.programs import printed_by

from shardwright import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import propose
from shardwright.planning.search.search import search
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.rules import ruled_space
from shardwright_plugins.proposers.proving.search import Search

MIB = 1 << 20
TABLES = st.lists(st.tuples(st.integers(1, 20_000), st.sampled_from([16, 64, 128])), min_size=1, max_size=8)


def tables_of(shapes, names=None):
    names = names or [f"t{i}" for i in range(len(shapes))]
    return [TableSpec(name, rows, dim, ["f"]) for name, (rows, dim) in zip(names, shapes, strict=True)]


def planner(*, ranks=2, mib=64, local=None, **arguments):
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    return EmbeddingShardingPlanner(topology, 64, storage_reservation=0.0, **arguments)


def value_of(made, tables):
    try:
        return made.plan_tables(tables).document["objective"]["value_ms"]
    except NoPlanError:
        return np.inf


def space_of(shapes, *, ranks, mib, local=None):
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    return costed(tables_of(shapes), topology)


def found_in(space):
    create = host().proposers.create
    return search(space, [create("proving")], host().partitioners.create("longest_first"), host().extensions)


@drawn(
    shapes=TABLES,
    ranks=st.sampled_from([1, 2, 4]),
    local=st.sampled_from([1, 2, 4]),
    mib=st.integers(1, 40),
    quick=5,
    thorough=40,
)
def test_proving_plan_fits_and_lies_between_its_bound_and_its_value(shapes, ranks, local, mib):
    space = space_of(shapes, ranks=ranks, mib=mib, local=min(local, ranks))
    result = found_in(space)
    assume(result.plan is not None)
    shards = propose(space, result.plan.proposal, with_fixed=True)
    ranks_of_all = np.concatenate(result.plan.ranks_of_tables)
    assert (shards.used_bytes(ranks_of_all) <= mib * MIB).all()
    value = shards.loads_ms(ranks_of_all).max()
    assert result.value_ms == pytest.approx(value)
    assert 0 < result.lower_bound_ms <= value * (1 + 1e-9)


def test_bound_where_two_memories_are_short_is_made_of_finite_numbers():
    tables = tables_of([(2428, 64), (1072, 64), (2756, 64), (3782, 64)])
    topology = Topology(3, "cuda", hbm_cap=211_156, ddr_cap=668_219)
    space = costed(tables, topology, estimators=("torchrec", "torchrec_storage"))
    assert np.isfinite(prover_of(space).multipliers).all()


_SCRIPT = """
import json
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.machines.topology import Topology
tables = [TableSpec(f"t{i}", 1000 * (i % 5 + 1), (16, 64, 128)[i % 3], ["f"]) for i in range(40)]
plan = EmbeddingShardingPlanner(Topology(8, "cuda", local_world_size=4, hbm_cap=1 << 24), 512).plan_tables(tables)
data = json.loads(plan.to_json())
print(json.dumps([data["objective"], data["modules"]], sort_keys=True))
"""


@pytest.mark.slow
def test_proving_plan_is_the_same_under_any_hash_seed():
    plans = [printed_by("-c", _SCRIPT, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "42")]
    assert len(set(plans)) == 1
    assert json.loads(plans[0])[0]["value_ms"] > 0


def test_proving_lumps_that_go_into_no_ranks_are_proven_to_have_no_plan():
    # Three tables of 0.6 of a rank each on two ranks: together they would fit.
    rule = {"*": ParameterConstraints(sharding_types=["table_wise"])}
    tables = tables_of([(6000, 128), (6001, 128), (6002, 128)])
    with pytest.raises(
        NoPlanError, match=r"no plan: it is proven that no choice of options for the 3 tables fits"
    ):
        planner(mib=5, constraints=rule).plan_tables(tables)
    assert planner(ranks=3, mib=5, constraints=rule).plan_tables(tables)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_proving_few_tables_are_planned_until_the_gap_is_fine(seed):
    numbers = np.random.default_rng(seed)
    shapes = [
        (int(rows), int(dim))
        for rows, dim in zip(
            np.exp(numbers.normal(8, 2, 26)), numbers.choice([16, 32, 64, 128], 26), strict=True
        )
    ]
    result = found_in(space_of(shapes, ranks=2, mib=64))
    assert result.value_ms <= result.lower_bound_ms * (1 + Effort().fine)


def test_proving_without_time_finds_a_plan_where_large_shards_leave_no_room():
    random = np.random.default_rng(4)
    rows = (10 ** random.triangular(2.0, 4.0, 7.5, size=200)).astype(int).tolist()
    space = space_of([(each, 16) for each in rows], ranks=16, mib=590)
    create = host().proposers.create
    partitioner = host().partitioners.create("longest_first")
    found = search(space, [create("proving")], partitioner, host().extensions, watch=Watch(0.0))
    assert np.isfinite(found.value_ms)


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


def best_of_all(space):
    """The least value of all plans that keep the rules; infinite if there is none."""
    times = (
        shards.loads_ms(ranks).max()
        for shards, ranks in all_plans(space)
        if space.rules is None or not space.rules.broken(ranks_of_tables(shards, ranks))
    )
    return min(times, default=np.inf)


def ranks_of_tables(shards, ranks):
    used = {}
    for table, rank in zip(shards.table.tolist(), ranks.tolist(), strict=True):
        used.setdefault(table, set()).add(rank)
    return used


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
    space = made_by.report.space
    assert ruled_space(Search(space, Effort(), Watch()), space.rules) is not None
