"""table_row_wise: the rows cut over the ranks of one host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import BlockRun, Dataflow, Layout
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.dataflows import Hierarchical


class TableRowWise(ShardingType):
    """Neighbouring rows in as many runs as a host has ranks, run ``i`` on its rank ``i``; any host.

    Partial sums are added inside the host before they cross to others.
    """

    name: ClassVar[str] = "table_row_wise"
    abbreviation: ClassVar[str] = "TWRW"
    dataflows: ClassVar[tuple[type[Dataflow], ...]] = (Hierarchical,)
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One block for each rank of a host."""
        rows = RowsRange(table.num_embeddings, parts=topology.local_world_size)
        run = BlockRun(rows, table.all_columns, rows.num_parts, host_group=0, local_rank=0)
        yield Layout([run], dataflow=Hierarchical())
