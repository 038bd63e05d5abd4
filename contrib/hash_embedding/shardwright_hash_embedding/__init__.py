"""Tables without a fixed number of rows: any 64-bit id, rows born when they are seen, a capacity, and eviction.

A table's ``num_embeddings`` is its capacity. The sharding type ``hash_rows`` sends each id to a rank by its hash, and
the kernels ``hash_table``, ``hash_table_numba`` and ``hash_table_triton`` find it a row there.
"""

from __future__ import annotations

from collections.abc import Sequence

import shardwright as sw
from shardwright_hash_embedding.hashing import HashedIds
from shardwright_hash_embedding.kernel import HashTable, HashTableNumba, HashTableTriton
from shardwright_hash_embedding.settings import HashSettings
from shardwright_hash_embedding.sharding_type import HashRows

__all__ = ["HashRows", "HashSettings", "HashTable", "HashTableNumba", "HashTableTriton", "HashedIds"]

api = 1


@sw.hookimpl
def shardwright_sharding_types() -> Sequence[type[sw.ShardingType]]:
    """Offer the type."""
    return [HashRows]


@sw.hookimpl
def shardwright_compute_kernels() -> Sequence[type[sw.ComputeKernel]]:
    """Offer the kernels."""
    return [HashTable, HashTableNumba, HashTableTriton]
