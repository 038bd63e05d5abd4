"""row_wise: the rows cut over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shardwright.contracts import Offered, ShardingType
from shardwright.planning.layouts.layout import BlockRun, Layout
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec


class RowWise(ShardingType):
    """Neighbouring rows in as many runs as there are ranks, run ``i`` on rank ``i``.

    Runs have ``ceil(rows / ranks)`` rows, as in TorchRec: the last ones may be shorter, or empty.
    """

    name: ClassVar[str] = "row_wise"
    abbreviation: ClassVar[str] = "RW"
    offered: ClassVar[Offered] = "always"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One block a rank."""
        rows = RowsRange(table.num_embeddings, parts=topology.world_size)
        yield Layout([BlockRun(rows, table.all_columns, rows.num_parts, rank=0)])
