"""The built-in sharding types."""

from __future__ import annotations

from shardwright.contracts import ShardingType
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_sharding_types() -> list[type[ShardingType]]:
    """Offer the built-in sharding types."""
    return []
