"""The built-in sharding types."""

from __future__ import annotations

from shardwright.contracts import ShardingType
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_sharding_types() -> list[type[ShardingType]]:
    """Offer the built-in sharding types."""
    from shardwright_plugins.sharding_types.column_wise import ColumnWise
    from shardwright_plugins.sharding_types.row_wise import RowWise
    from shardwright_plugins.sharding_types.table_wise import TableWise

    return [ColumnWise, RowWise, TableWise]
