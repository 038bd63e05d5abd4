"""Sharding types that are installed and not asked for: they change no plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from tests.drawn import drawn

import shardwright as sw
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing import installed

WIDTHS = (16, 64, 128)


class Stranger(sw.ShardingType):
    """As `row_wise`, dealt out, and asked about each table."""

    name: ClassVar[str] = "wandering_rows"
    abbreviation: ClassVar[str] = "WR"

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        rows = sw.RowsModulo(table.num_embeddings, parts=topology.world_size)
        yield sw.Layout([sw.Block(part, table.all_columns, rank) for rank, part in enumerate(rows)])


def tables_of(shapes: list[tuple[int, int]]) -> list[TableSpec]:
    return [TableSpec(f"t{i}", rows, dim, [f"f{i}"]) for i, (rows, dim) in enumerate(shapes)]


def planned(tables: list[TableSpec], **arguments: Any) -> tuple[Mapping[str, Any], Any]:
    topology = sw.Topology(4, "cpu", ddr_cap=1 << 30)
    planner = sw.EmbeddingShardingPlanner(topology, 256, **arguments)
    return planner.plan_tables(tables).plan, planner.report


@drawn(
    st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from(WIDTHS)), min_size=1, max_size=6),
    quick=3,
    thorough=20,
)
def test_type_that_nobody_asked_for_changes_no_plan(shapes: list[tuple[int, int]]) -> None:
    tables = tables_of(shapes)
    without, report = planned(tables)
    with installed(Stranger()):
        beside, other = planned(tables)
    assert beside == without
    assert other.result.plan.value_ms == report.result.plan.value_ms
