"""The compute kernels: a hash table over the rows of another kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import shardwright as sw
from shardwright_hash_embedding.settings import STATE, HashSettings
from shardwright_plugins.compute_kernels.indexed_rows import IndexedRows

if TYPE_CHECKING:
    from shardwright_hash_embedding.index import HashIndex


class HashTable(IndexedRows):
    """Bears and evicts rows of any data type in training; plain torch looks them up and updates them."""

    name: ClassVar[str] = "hash_table"
    row_state: ClassVar[tuple[str, ...]] = STATE

    def index_bytes(self, request: sw.KernelRequest) -> int:
        """Key, uses, last use and two of the sorted index, 8 bytes each; for ids on trial, a key and a count more."""
        return 40 if HashSettings.of(request).min_sightings == 1 else 56

    def columns(self, request: sw.KernelRequest) -> Mapping[str, str]:
        """The column of sightings, where the settings name one."""
        name = HashSettings.of(request).count_column
        return {name: "int64"} if name else {}

    def build_index(self, block: sw.BlockSpec, *, device: Any) -> HashIndex:
        """Make the index of a block, with the settings that its request brings."""
        from shardwright_hash_embedding.index import HashIndex

        return HashIndex(block.block.num_rows, HashSettings.of(block.request))


class HashTableNumba(HashTable):
    """The same over the compiled loops of ``fused_numba``, for float32."""

    name: ClassVar[str] = "hash_table_numba"
    rows_kernel: ClassVar[str] = "fused_numba"
    batch_major: ClassVar[bool] = True
    preference: ClassVar[int] = 2
