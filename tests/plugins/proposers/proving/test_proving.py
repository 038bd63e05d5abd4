"""The laws of the default search, over many small problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_bounds import prover_of
from tests.plugins.proposers.spaces import costed

from shardwright import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host
from shardwright.planning.search.placement import propose
from shardwright.planning.search.search import search
from shardwright_plugins.proposers.proving.effort import Effort

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
    plans = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "42")
    ]
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
