"""The ``fused_uvm_caching`` kernel: weights in the host's memory, the rows in use in a cache on the CUDA device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.tables.data_types import DataType
from shardwright_plugins.compute_kernels._caching import CachingKernel, cache_of
from shardwright_plugins.compute_kernels._optimizers import weight_bytes
from shardwright_plugins.compute_kernels.fbgemm._uvm import BANDWIDTH_FRACTION, uvm_bytes, uvm_refusal
from shardwright_plugins.compute_kernels.fbgemm.fused import fused_key

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup

_ROWS_OF_A_SET = 32  # FBGEMM's cache is associative in sets of as many rows (DEFAULT_ASSOC)
# FBGEMM 1.8, SplitTableBatchedEmbeddingBagsCodegen._apply_cache_state: which row a slot holds (8 bytes a slot), when it
# was used last (8 bytes a slot) or how often (8 bytes a row), and which table a row is of (4 bytes a row).
_SLOT_BYTES, _USE_BYTES, _TABLE_BYTES = 8, 8, 4
_CACHED = frozenset({DataType.FP32, DataType.FP16})


class FusedUvmCaching(CachingKernel):
    """FBGEMM's kernel in host memory, with a software-managed cache; FBGEMM's placement ``MANAGED_CACHING``."""

    name: ClassVar[str] = "fused_uvm_caching"
    preference: ClassVar[int] = -1
    batch_major: ClassVar[bool] = True
    kept_in: ClassVar[str] = "host"

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        reason = uvm_refusal(request)
        if reason:
            return reason
        if request.data_type not in _CACHED:
            return f"FBGEMM's cache holds FP16 and FP32 rows, not {request.data_type}"
        return True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Memory of ``fused_uvm``, and on the device the cache: rows, their numbers, and their last uses, bytes."""
        kept = uvm_bytes(request, num_rows)
        slots = _num_slots(request, num_rows)
        used = num_rows if cache_of(request).algorithm == "lfu" else slots
        state = _SLOT_BYTES * slots + _USE_BYTES * used + _TABLE_BYTES * num_rows
        return {**kept, "device": kept["device"] + weight_bytes(request, slots) + state}

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """A tenth: every lookup goes through the cache's bookkeeping, and rows are moved one by one."""
        return BANDWIDTH_FRACTION

    def group_key(self, request: KernelRequest) -> Hashable:
        """Key of requests that are looked up together: that of ``fused``, the cache's row width, and the cache."""
        cache = cache_of(request)
        return (fused_key(request), request.num_columns, cache.held, cache.algorithm)

    def gives_equal_bits(self, request: KernelRequest) -> bool:
        """As with ``fused`` on CUDA, sums of many equal ids are made in any order."""
        return False

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.fbgemm._uvm_lookup import CachedLookup

        return CachedLookup(blocks, device=device)


def _num_slots(request: KernelRequest, num_rows: int) -> int:
    """Rows that the cache has room for: whole sets, at least one."""
    sets = math.ceil(int(num_rows * cache_of(request).held) / _ROWS_OF_A_SET)
    return max(1, sets) * _ROWS_OF_A_SET
