"""Sharding types that are installed and not asked for: they change no plan, or better it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
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


class Everywhere(Stranger):
    """The same, offered to all."""

    offered: ClassVar[sw.Offered] = "always"


class IdsLookedUp(sw.Estimator):
    """Time: the part of the ids that a shard gets."""

    name, depends_on_shape_only = "ids_looked_up", True

    def estimate(self, options: Any, topology: Any) -> Any:
        return {"lookup": options.id_fraction + 0.01}


class Greedy(sw.Proposer):
    """A search that more options lead astray: it takes whatever is of the last type that there is."""

    name = "last_type"

    def proposals(self, space: Any) -> Any:
        options = space.options
        last = [options.of_table(table)[-1] for table in range(len(options.tables))]
        yield np.array(last, dtype=np.int64)[options.distinct_table]


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
    assert other.result.feedback.value_ms == report.result.feedback.value_ms


@drawn(
    st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from(WIDTHS)), min_size=1, max_size=6),
    quick=3,
    thorough=20,
)
def test_type_that_is_offered_always_makes_no_plan_worse(shapes: list[tuple[int, int]]) -> None:
    tables = tables_of(shapes)
    _, without = planned(tables)
    with installed(Everywhere()):
        _, beside = planned(tables)
    assert beside.result.feedback.value_ms <= without.result.feedback.value_ms
    assert beside.result.lower_bound_ms <= beside.result.feedback.value_ms


def test_type_that_is_offered_always_and_leads_the_search_astray_makes_no_plan_worse() -> None:
    tables, rules = (
        tables_of([(50_000, 64)] * 3),
        {"t0": sw.ParameterConstraints(sharding_types=["row_wise"])},
    )
    without, report = planned(tables, proposer=Greedy(), constraints=rules)
    with installed(Everywhere()):
        beside, other = planned(tables, proposer=Greedy(), constraints=rules)
        named = {"*": sw.ParameterConstraints(sharding_types=["wandering_rows"])}
        _, astray = planned(tables, proposer=Greedy(), constraints=named)
    assert astray.result.feedback.value_ms > report.result.feedback.value_ms  # or this shows nothing
    assert beside == without
    assert other.result.num_placed == 2  # the plan without it, and the one that is worse


def test_type_that_is_offered_always_is_taken_where_it_is_better() -> None:
    class Nothing(Everywhere):
        """Rows of which nobody asks for any but the first rank's."""

        name, abbreviation, row_maps = "nothing", "NO", (Lopsided,)

        def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
            rows = Lopsided(table.num_embeddings, parts=topology.world_size)
            yield sw.Layout([sw.Block(part, table.all_columns, rank) for rank, part in enumerate(rows)])

    with installed(Nothing()):
        plan, _ = planned(tables_of([(50_000, 64)]), estimator=IdsLookedUp())
    assert plan[""]["t0"].sharding_type == "nothing"


class Lopsided(sw.RowsModulo):
    name: ClassVar[str] = "lopsided"

    def id_fraction_of(self, part: int) -> float:
        return 0.0


def test_stranger_that_looks_at_no_name_leaves_tables_alike() -> None:
    """Asked about each table, it answers the same: the search has no more tables than without it."""
    tables = tables_of([(50_000, 64)] * 8)
    with installed(Everywhere()):
        _, report = planned(tables)
    assert len(report.space.options.tables) == 1
