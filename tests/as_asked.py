"""Sharding types that look at what they are told of a table, for tests that plans can be read back."""

from __future__ import annotations

from attrs import frozen

from shardwright.contracts import ShardingType
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.layouts.row_maps import RowsModulo, RowsRange
from shardwright.planning.tables.constraints import ParameterConstraints


class AsAsked(ShardingType):
    """Cuts rows where extras ask for it, or the table is of 16 bits; keeps them whole elsewhere."""

    name, abbreviation, offered = "as_asked", "AA", "always"

    def layouts(self, table, topology, constraints):
        is_cut = (constraints.extras or {}).get("cut") or table.data_type != "FP32"
        rows = RowsRange(table.num_embeddings, parts=topology.world_size if is_cut else 1)
        yield Layout([Block(part, table.all_columns, rank=rank) for rank, part in enumerate(rows)])


class AsAskedByShape(AsAsked):
    """Looks at the data type alone."""

    name, abbreviation, depends_on_shape_only = "as_asked_by_shape", "AS", True

    def layouts(self, table, topology, constraints):
        return super().layouts(table, topology, ParameterConstraints())


@frozen
class Unwritten(RowsModulo):
    """Rows dealt out by a map whose data does not make it again."""

    name = "unwritten"
    _hidden: int = 0


class Forgetful(ShardingType):
    """Makes plans that cannot be read back."""

    name, abbreviation, offered, row_maps = "forgetful", "FO", "always", (Unwritten,)

    def layouts(self, table, topology, constraints):
        rows = Unwritten(table.num_embeddings, parts=topology.world_size)
        yield Layout([Block(part, table.all_columns, rank=rank) for rank, part in enumerate(rows)])
