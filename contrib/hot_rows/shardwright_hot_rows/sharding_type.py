"""The sharding type: layouts with more and fewer hot rows, of which the planner takes the cheapest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeAlias

import shardwright as sw
from shardwright_hot_rows.counts import AccessCounts
from shardwright_hot_rows.row_map import HOT, HotAndCold
from shardwright_plugins.dataflows import Replicate

SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""The shares of the lookups that the hot rows of the layouts get, or more."""


CountsOf: TypeAlias = Callable[[sw.TableSpec, sw.ParameterConstraints], AccessCounts | None]


def counts_in_extras(table: sw.TableSpec, constraints: sw.ParameterConstraints) -> AccessCounts | None:
    """The access counts among a table's constraints, if there are any."""
    return AccessCounts.from_extras(constraints.extras or {})


class HotRows(sw.ShardingType):
    """The hot rows copied to every rank, the cold ones in as many runs as there are ranks, one on each.

    Args:
        counts_of: function that returns a table's access counts; if they are ``None``, the type does not apply.
    """

    name: ClassVar[str] = "hot_rows"
    abbreviation: ClassVar[str] = "HR"
    offered: ClassVar[sw.Offered] = "always"  # asked for by extras, for the tables that have them
    row_maps: ClassVar[tuple[type[sw.RowMap], ...]] = (HotAndCold,)
    dataflows: ClassVar[tuple[type[sw.Dataflow], ...]] = (Replicate, sw.Exchange)

    def __init__(self, counts_of: CountsOf = counts_in_extras) -> None:
        self._counts_of = counts_of

    def layouts(
        self, table: sw.TableSpec, topology: sw.Topology, constraints: sw.ParameterConstraints
    ) -> Iterable[sw.Layout]:
        """A layout for each number of hot rows that :data:`SHARES` ask for, and leaves some cold.

        Raises:
            UnsupportedError: the table has no counts.
            InvalidInputError: its counts are of another table.
        """
        counts = self._counts_of(table, constraints)
        if counts is None or not len(counts.rows):
            raise sw.UnsupportedError(
                "the table has no access counts; give its ParameterConstraints "
                "extras=AccessCounts.measured(ids, num_rows).to_extras()"
            )
        if counts.rows.max() >= table.num_embeddings:
            raise sw.InvalidInputError(
                f"access counts of table {table.describe()} name row {counts.rows.max()}, which it does not have"
            )
        for num_hot in sorted({counts.rows_for(share) for share in SHARES} - {table.num_embeddings}):
            rows = HotAndCold(
                table.num_embeddings,
                hot=counts.rows[:num_hot].tolist(),
                cold_parts=topology.world_size,
                hot_share=counts.share_of(num_hot),
            )
            yield _layout(rows, table, topology.world_size)


def _layout(rows: HotAndCold, table: sw.TableSpec, world_size: int) -> sw.Layout:
    copies = sw.BlockRun(
        rows,
        table.all_columns,
        world_size,
        first_part=HOT,
        is_copied=True,
        rank=0,
        dataflow=Replicate(),
    )
    cold = sw.BlockRun(rows, table.all_columns, world_size, first_part=HOT + 1, rank=0)
    variant = f"{len(rows.hot)} hot rows, {rows.hot_share:.0%} of lookups"
    return sw.Layout([copies, cold], variant=variant)
