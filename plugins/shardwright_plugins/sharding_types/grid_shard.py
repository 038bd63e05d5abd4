"""grid_shard: the columns cut into blocks for hosts, and the rows of each over its host's ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.layouts import Block, Hierarchical, Layout
from shardwright.planning.row_maps import RowsRange
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright_plugins.sharding_types._column_cuts import column_blocks


class GridShard(ShardingType):
    """The column blocks of ``column_wise``, each cut by rows as ``table_row_wise`` does, on a host of its own choice.

    Blocks may share a host.
    """

    name: ClassVar[str] = "grid_shard"
    abbreviation: ClassVar[str] = "GS"
    answers_by_shape: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One layout for each number of column blocks."""
        rows = RowsRange(table.num_embeddings, parts=topology.local_world_size)
        for columns in column_blocks(table, constraints, type_name=self.name):
            blocks = [
                Block(part, span, host_group=group, local_rank=rank)
                for group, span in enumerate(columns)
                for rank, part in enumerate(rows)
            ]
            yield Layout(blocks, dataflow=Hierarchical(), variant=f"{len(columns)} column blocks")
