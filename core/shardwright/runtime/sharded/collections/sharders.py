"""The sharders of shardwright's own collections, and what planner and ``DistributedModelParallel`` ask of them."""

from __future__ import annotations

from shardwright.runtime.sharded.collections.sharded_embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from shardwright.runtime.sharded.collections.sharded_embedding_bag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from shardwright.runtime.sharded.collections.sharded_module import (
    ModuleSharder,
    collect_tables,
    default_sharders,
    find_sharder,
    register_sharder,
    shardable_modules,
)

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "ModuleSharder",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "collect_tables",
    "default_sharders",
    "find_sharder",
    "register_sharder",
    "shardable_modules",
]
