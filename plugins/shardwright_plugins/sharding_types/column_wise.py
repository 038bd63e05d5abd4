"""column_wise: the columns cut into blocks of their own ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import BlockRun, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.sharding_types._column_cuts import column_blocks


class ColumnWise(ShardingType):
    """The columns in blocks, each on any rank; every rank that holds one gets all ids of the table.

    There is a variant for each number of equal blocks that are at least ``min_partition`` columns wide (32 by
    default) and whole vectors of 4. Where no equal cut exists, blocks differ by one vector. A table too
    narrow to be cut is offered as one block (as TorchRec does) only if this type is asked for by name: it
    would be another table_wise.
    """

    name: ClassVar[str] = "column_wise"
    abbreviation: ClassVar[str] = "CW"
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One layout for each number of blocks."""
        rows = table.all_rows.row_map
        for columns in column_blocks(table, constraints, type_name=self.name):
            runs = [BlockRun(rows, span) for span in columns]
            yield Layout(runs, variant=f"{len(columns)} blocks")
