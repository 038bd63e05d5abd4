"""data_parallel: a copy of the whole table on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import BlockRun, Dataflow, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.dataflows import Replicate


class DataParallel(ShardingType):
    """A copy on every rank: no ids and no results travel, gradients are synchronised."""

    name: ClassVar[str] = "data_parallel"
    abbreviation: ClassVar[str] = "DP"
    dataflows: ClassVar[tuple[type[Dataflow], ...]] = (Replicate,)
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One block of everything for each rank."""
        copies = BlockRun(
            table.all_rows.row_map, table.all_columns, topology.world_size, is_copied=True, rank=0
        )
        yield Layout([copies], dataflow=Replicate())
