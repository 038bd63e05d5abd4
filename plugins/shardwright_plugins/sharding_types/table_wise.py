"""table_wise: a whole table on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec


class TableWise(ShardingType):
    """The whole table on one rank, any one."""

    name: ClassVar[str] = "table_wise"
    abbreviation: ClassVar[str] = "TW"
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One block."""
        yield Layout([Block(table.all_rows, table.all_columns)])
