"""The compute kernels: a hash table over the rows of another kernel."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import shardwright as sw
from shardwright.contracts import NAMED_ONLY
from shardwright_hash_embedding.settings import STATE, HashSettings
from shardwright_plugins.compute_kernels.indexed_rows import IndexedRows
from shardwright_plugins.kernel_parts.machine import import_failure, is_interpreted

if TYPE_CHECKING:
    from shardwright_hash_embedding.index import HashIndex


class HashTable(IndexedRows):
    """Bears and evicts rows of any data type in training; plain torch looks them up and updates them."""

    name: ClassVar[str] = "hash_table"
    row_state: ClassVar[tuple[str, ...]] = STATE
    search: ClassVar[str] = "numba_search"
    """Module of this package that finds rows."""
    compiler: ClassVar[str] = "Numba"
    """Compiler of that module."""

    def supports(self, request: sw.KernelRequest) -> Literal[True] | str:
        """``True`` for what the kernel of rows supports, where the search can be compiled; else the reason."""
        answer = super().supports(request)
        if answer is True and request.on_this_machine:
            return import_failure(f"{__package__}.{self.search}", self.compiler) or True
        return answer

    def index_bytes(self, request: sw.KernelRequest) -> int:
        """Key, uses and last use, 8 bytes each, two slots of 4; key and count of an id on trial; a row given back."""
        settings = HashSettings.of(request)
        return 32 + 16 * (settings.min_sightings > 1) + 8 * bool(settings.steps_to_live)

    def columns(self, request: sw.KernelRequest) -> Mapping[str, str]:
        """The column of sightings, where the settings name one."""
        name = HashSettings.of(request).count_column
        return {name: "int64"} if name else {}

    def build_index(self, block: sw.BlockSpec, *, device: Any) -> HashIndex:
        """Make the index of a block, with the settings that its request brings."""
        from shardwright_hash_embedding.index import HashIndex

        search = importlib.import_module(f"{__package__}.{self.search}")
        return HashIndex(block.block.num_rows, HashSettings.of(block.request), search, device)


class HashTableNumba(HashTable):
    """The same over the compiled loops of ``fused_numba``, for float32."""

    name: ClassVar[str] = "hash_table_numba"
    rows_kernel: ClassVar[str] = "fused_numba"
    batch_major: ClassVar[bool] = True
    preference: ClassVar[int] = 2


class HashTableTriton(HashTable):
    """The same on CUDA over ``fused_triton``: rows and index are on the device, and Triton compiles the search too."""

    name: ClassVar[str] = "hash_table_triton"
    rows_kernel: ClassVar[str] = "fused_triton"
    index_devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    batch_major: ClassVar[bool] = True
    search: ClassVar[str] = "triton_search"
    compiler: ClassVar[str] = "Triton"

    @property
    def preference(self) -> int:  # type: ignore[override]  # what it is follows from the environment
        """That of a kernel for its device; interpreted, on the CPU, it is taken only when asked for."""
        return NAMED_ONLY if is_interpreted() else 0
