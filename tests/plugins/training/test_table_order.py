"""The plan of some tables is one plan, in whatever order they are given."""

from __future__ import annotations

import random

import attrs
from hypothesis import strategies as st
from tests.drawn import drawn

import shardwright as sw

SHAPES = st.tuples(
    st.integers(1, 400_000), st.sampled_from([8, 16, 64, 128, 256]), st.sampled_from(["", "m", "n.o"])
)


def planned(tables: list[sw.TableSpec], ranks: int) -> sw.ShardingPlan:
    topology = sw.Topology(ranks, "cuda", hbm_cap=1 << 30, local_world_size=2)
    rules = {
        "t1": sw.ParameterConstraints(apart="x"),
        "t2*": sw.ParameterConstraints(apart="x", pooling_factors=[9.0]),
    }
    known = {table.name for table in tables}
    rules = {key: rule for key, rule in rules.items() if key.removesuffix("*") in known}
    return sw.EmbeddingShardingPlanner(topology, 512, constraints=rules).plan_tables(tables)


@drawn(
    st.lists(SHAPES, min_size=2, max_size=9),
    st.sampled_from([2, 4, 8]),
    st.randoms(use_true_random=False),
    quick=1,
    thorough=12,
)
def test_plan_is_the_same_in_any_order_of_tables(
    shapes: list[tuple[int, int, str]], ranks: int, dice: random.Random
) -> None:
    tables = [
        sw.TableSpec(f"t{i}", rows, dim, [f"f{i}"], module=path) for i, (rows, dim, path) in enumerate(shapes)
    ]
    first = planned(tables, ranks)
    for _ in range(2):
        dice.shuffle(tables)
        again = planned(tables, ranks)
        assert again == first
        assert again.document["objective"] == first.document["objective"]
        assert [(path, name) for path, module in again.plan.items() for name in module] == [
            (table.module, table.name) for path in again.plan for table in tables if table.module == path
        ]


def test_plan_of_tables_that_cost_the_same_is_the_same_in_any_order() -> None:
    """Where many plans are equally good, ties decide."""
    tables = [sw.TableSpec(f"t{i}", 1000, 64, [f"f{i}"]) for i in range(11)]
    tables.append(attrs.evolve(tables[0], name="t11", num_embeddings=1001))
    first = planned(tables, 4)
    assert planned(tables[::-1], 4) == first
    assert planned(tables[5:] + tables[:5], 4) == first
