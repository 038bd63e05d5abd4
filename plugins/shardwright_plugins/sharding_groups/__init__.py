"""Two-dimensional parallelism: tables sharded inside groups of ranks, and averaged over the groups."""

from shardwright_plugins.sharding_groups.dmp_collection import DMPCollection
from shardwright_plugins.sharding_groups.environment import ShardingEnv2D

__all__ = ["DMPCollection", "ShardingEnv2D"]
