"""The compute kernel: a hash table over another kernel's rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import shardwright as sw
from shardwright_hash_embedding.settings import HashSettings

INDEX_BYTES_A_ROW = 40
"""Key, uses, last use, and two of the sorted index, 8 bytes each."""

TRIAL_BYTES_A_ROW = 16
"""An id on trial and its count, 8 bytes each, where ids must be seen several times."""


def rows_kernel(request: sw.KernelRequest) -> sw.ComputeKernel | None:
    """The kernel that keeps the rows: of those that take rows and run the optimizer, the preferred."""
    registry = sw.host.host().compute_kernels
    kernels = [registry.create(name) for name in sorted(registry)]
    fitting = [kernel for kernel in kernels if _fits(kernel, request)]
    return max(fitting, key=lambda kernel: (kernel.preference, kernel.name), default=None)


def _fits(kernel: sw.ComputeKernel, request: sw.KernelRequest) -> bool:
    is_plain = kernel.fuses_optimizer and not kernel.takes_any_id and not kernel.batch_major
    return is_plain and kernel.supports(request) is True


def _index_bytes(request: sw.KernelRequest) -> int:
    """Bytes of the index for each row."""
    has_trials = HashSettings.of(request).min_sightings > 1
    return INDEX_BYTES_A_ROW + TRIAL_BYTES_A_ROW * has_trials


class HashTable(sw.ComputeKernel):
    """Finds each id a row, bears and evicts rows in training, and leaves sums and updates to another kernel.

    An id without a row brings zeros.
    """

    name: ClassVar[str] = "hash_table"
    takes_any_id: ClassVar[bool] = True
    row_state: ClassVar[tuple[str, ...]] = ("row_keys", "row_uses", "row_last_use")

    def supports(self, request: sw.KernelRequest) -> Literal[True] | str:
        """True on the CPU for requests that some kernel of rows supports; else the reason."""
        if request.device != "cpu":
            return "its index of ids is in NumPy, for the CPU"
        if request.cuts_columns:
            return "it keeps whole rows"
        return True if rows_kernel(request) else "no other kernel keeps such rows and runs their optimizer"

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Memory of the kernel of rows, with one more row for ids that have none, and of the index, bytes."""
        rows = rows_kernel(request)
        assert rows is not None  # supports()
        declared = dict(rows.memory_bytes(request, num_rows + 1))
        declared["device"] = declared.get("device", 0) + num_rows * _index_bytes(request)
        return declared

    def bandwidth_fraction(self, request: sw.KernelRequest) -> float:
        """Bandwidth fraction of the kernel of rows; the search in the index is not counted."""
        rows = rows_kernel(request)
        assert rows is not None
        return rows.bandwidth_fraction(request)

    def group_key(self, request: sw.KernelRequest) -> Hashable:
        """Key of requests that are looked up together: that of the kernel of rows."""
        rows = rows_kernel(request)
        assert rows is not None
        return (rows.name, rows.group_key(request))

    def build(self, blocks: Sequence[sw.BlockSpec], *, device: Any) -> sw.Lookup:
        """Allocate rows and index."""
        from shardwright_hash_embedding.lookup import HashTableLookup

        rows = rows_kernel(blocks[0].request)
        assert rows is not None
        return HashTableLookup(blocks, rows, device=device)
