"""grid_shard: the columns cut into blocks for hosts, and the rows of each over its host's ranks."""

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
from shardwright_plugins.sharding_types._column_cuts import column_blocks


class GridShard(ShardingType):
    """The column blocks of ``column_wise``, each cut by rows as ``table_row_wise`` does, on a host of its own choice.

    Blocks may share a host.
    """

    name: ClassVar[str] = "grid_shard"
    abbreviation: ClassVar[str] = "GS"
    dataflows: ClassVar[tuple[type[Dataflow], ...]] = (Hierarchical,)
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One layout for each number of column blocks."""
        rows = RowsRange(table.num_embeddings, parts=topology.local_world_size)
        for columns in column_blocks(table, constraints, type_name=self.name):
            runs = [
                BlockRun(rows, span, rows.num_parts, host_group=group, local_rank=0)
                for group, span in enumerate(columns)
            ]
            yield Layout(runs, dataflow=Hierarchical(), variant=f"{len(columns)} column blocks")
