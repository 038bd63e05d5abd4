"""The built-in sharding types."""

from __future__ import annotations

from shardwright.contracts import ShardingType
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_sharding_types() -> list[type[ShardingType]]:
    """Offer the built-in sharding types."""
    from shardwright_plugins.sharding_types.column_wise import ColumnWise
    from shardwright_plugins.sharding_types.data_parallel import DataParallel
    from shardwright_plugins.sharding_types.grid_shard import GridShard
    from shardwright_plugins.sharding_types.row_wise import RowWise
    from shardwright_plugins.sharding_types.table_column_wise import TableColumnWise
    from shardwright_plugins.sharding_types.table_row_wise import TableRowWise
    from shardwright_plugins.sharding_types.table_wise import TableWise

    return [ColumnWise, DataParallel, GridShard, RowWise, TableColumnWise, TableRowWise, TableWise]
