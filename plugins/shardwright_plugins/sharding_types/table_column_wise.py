"""table_column_wise: the columns cut into blocks on ranks of one host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import BlockRun, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.sharding_types._column_cuts import column_blocks


class TableColumnWise(ShardingType):
    """The blocks of ``column_wise``, on any ranks of one host, whichever."""

    name: ClassVar[str] = "table_column_wise"
    abbreviation: ClassVar[str] = "TWCW"
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One layout for each number of blocks."""
        rows = table.all_rows.row_map
        for columns in column_blocks(table, constraints, type_name=self.name):
            runs = [BlockRun(rows, span, host_group=0) for span in columns]
            yield Layout(runs, variant=f"{len(columns)} blocks")
