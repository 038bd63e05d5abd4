"""Where there is no plan the error says so, with a proof that is true: against all plans of small problems."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.spaces import all_plans

from shardwright.errors import NoPlanError
from shardwright.host import host
from shardwright.planning.machines.reservations import StorageReservation
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PluginChoice
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import bytes_text
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

TYPES = ["table_wise", "column_wise", "row_wise", "data_parallel"]
KIB = 1 << 10


def problem(sizes, kinds, part):
    """Tables on two ranks with a part of the memory that their weights take, and the constraints."""
    tables = [TableSpec(f"t{i}", 100 * rows, dim, ["f"]) for i, (rows, dim) in enumerate(sizes)]
    weights = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    topology = Topology(2, "cuda", hbm_cap=int(weights / 2 * part) + KIB, ddr_cap=0)
    return (
        tables,
        topology,
        {"*": ParameterConstraints(sharding_types=kinds, compute_kernels=["fused", "dense"])},
    )


def planned(tables, topology, constraints):
    planner = EmbeddingShardingPlanner(topology, 2, constraints=constraints, storage_reservation=0.0)
    return planner.plan_tables(tables)


def space_of(tables, topology, constraints):
    request = Request(topology, Constraints(constraints), 2, StorageReservation(0.0))
    return prepare(tables, request, PluginChoice().resolve(host()))


def check_proof(text, space, tables):
    """What the error claims, added up again."""
    options, names = space.options, [table.name for table in tables]
    each = [
        min(int((space.memory_bytes * options.count[:, None])[options.shards_of(o), 0].sum()) for o in mine)
        for mine in (options.of_table(t) for t in options.distinct_table.tolist())
    ]
    have = int(space.capacity_bytes[:, 0].sum())
    if text.startswith("no plan: it is proven that no choice of options"):
        assert "would help" in text
        return
    if "whatever is chosen" in text:
        assert sum(each) > have
        assert f"need at least {bytes_text(sum(each))} of hbm together" in text
        assert f"the 2 ranks have {bytes_text(have)}" in text
        assert f"It takes at least {-(-sum(each) * 2 // have)} such ranks or" in text
    else:
        assert text.startswith("no plan: table")
        table = next(i for i, name in enumerate(names) if f"'{name}'" in text)
        largest = min(
            int(space.memory_bytes[options.shards_of(o), 0].max())
            for o in options.of_table(int(options.distinct_table[table]))
        )
        assert largest > space.capacity_bytes[:, 0].max()
        assert f"needs {bytes_text(largest)} of hbm on one rank" in text
        assert "would help" in text or "allow it in constraints" in text


SIZES = st.lists(st.tuples(st.integers(5, 60), st.sampled_from([32, 64])), min_size=1, max_size=3)
KINDS = st.lists(st.sampled_from(TYPES), min_size=1, max_size=4, unique=True)


@drawn(
    sizes=SIZES, kinds=KINDS, part=st.sampled_from([0.6, 0.95, 1.02, 1.2, 1.5, 2.0]), quick=20, thorough=100
)
def test_no_plan_is_proven_where_there_is_none_and_nowhere_else(sizes, kinds, part):
    asked = problem(sizes, kinds, part)
    space = space_of(*asked)
    if any(all_plans(space)):
        assert len(planned(*asked).plan[""]) == len(sizes)
        return
    with pytest.raises(NoPlanError) as caught:
        planned(*asked)
    check_proof(str(caught.value), space, asked[0])


@pytest.mark.parametrize(
    ("sizes", "kinds", "part", "text"),
    [
        ([(20, 32)] * 3, ["row_wise"], 0.9, "whatever is chosen"),
        ([(50, 32), (10, 32)], ["table_wise"], 1.1, "no plan: table 't0'"),
        ([(20, 32), (21, 32), (22, 32)], ["table_wise"], 1.2, "no plan: it is proven"),
    ],
)
def test_no_plan_of_each_kind_is_told(sizes, kinds, part, text):
    asked = problem(sizes, kinds, part)
    with pytest.raises(NoPlanError) as caught:
        planned(*asked)
    assert text in str(caught.value)
    check_proof(str(caught.value), space_of(*asked), asked[0])


LARGE = [TableSpec(f"t{i}", 1000, 64, ["f"]) for i in range(4)]  # 250 KiB of weights each


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"t0": {"ranks": 0}, "t1": {"ranks": 0}},
            r"2 of the tables \('t0', 't1'\) may use no ranks but 0, and",
        ),
        (
            {"t[01]": {"ranks": [0, 2]}, "t2": {"ranks": 0}, "t3": {"ranks": 2}},
            r"4 of the tables .* may use no ranks but 0, 2, and need at least .* of hbm together",
        ),
        (
            {"t[12]": {"together": "x"}},
            r"2 of the tables \('t1', 't2'\) are kept together on one rank, and need",
        ),
    ],
)
def test_no_plan_where_rules_keep_tables_to_ranks_without_room_is_proven_and_names_them(asked, text):
    rules = {name: ParameterConstraints(**rule) for name, rule in asked.items()}
    kinds = {"*": ParameterConstraints(sharding_types=TYPES[:2], compute_kernels=["fused"])}
    topology = Topology(3, "cuda", hbm_cap=400 * KIB, ddr_cap=0)
    with pytest.raises(NoPlanError, match=f"no plan: {text}.*Loosen 'ranks' or 'together'"):
        planned(LARGE, topology, {**rules, **kinds})
    roomy = Topology(3, "cuda", hbm_cap=2000 * KIB, ddr_cap=0)
    assert planned(LARGE, roomy, {**rules, **kinds})
