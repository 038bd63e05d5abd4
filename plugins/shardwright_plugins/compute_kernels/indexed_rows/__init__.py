"""A base of kernels whose ids are keys: a row index before another kernel's rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.host.plugin_host import host

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup, RowIndex

__all__ = ["IndexedRows"]


class IndexedRows(ComputeKernel):
    """Finds the row of each key by a :class:`~shardwright.contracts.lookup.RowIndex`, and has a kernel do the rest.

    A subclass has a ``name``, the ``row_state`` of its index and the two methods that are left abstract. A key without
    a row brings zeros and takes no gradient. A row that is born begins with values that follow from its key alone, and
    without optimizer state; so training does not depend on the number of ranks.
    """

    rows_kernel: ClassVar[str] = "fused_torch"
    """The name of the kernel that holds the rows, which runs an optimizer. Declare the ``batch_major``,
    ``takes_ragged_bags`` and ``preference`` that it has."""
    index_devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """Types of device that the index may be on, with the rows."""
    takes_ragged_bags: ClassVar[bool] = True

    @abstractmethod
    def index_bytes(self, request: KernelRequest) -> int:
        """Bytes of the index for each row of a block."""

    @abstractmethod
    def build_index(self, block: BlockSpec, *, device: Any) -> RowIndex:
        """Make the index of a block, of no keys.

        Args:
            block: the block.
            device: a ``torch.device``.
        """

    def supports(self, request: KernelRequest) -> Literal[True] | str:
        """``True`` for whole rows on the index's devices that the kernel of rows supports; else the reason."""
        if request.device not in self.index_devices:
            return f"its index is in the memory of {' or '.join(self.index_devices)}, not of {request.device}"
        return "it keeps whole rows" if request.cuts_columns else self._rows.supports(request)

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Bytes of the rows, with one more for keys that have none, and of the index."""
        declared = dict(self._rows.memory_bytes(request, num_rows + 1))
        declared["device"] = declared.get("device", 0) + num_rows * self.index_bytes(request)
        return declared

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Bandwidth fraction of the kernel of rows; the search in the index is not counted."""
        return self._rows.bandwidth_fraction(request)

    def group_key(self, request: KernelRequest) -> Hashable:
        """Key of the kernel of rows."""
        return self._rows.group_key(request)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:
        """Make rows and indexes."""
        from shardwright_plugins.compute_kernels.indexed_rows._lookup import IndexedLookup, with_one_more

        rows = self._rows.build([with_one_more(block) for block in blocks], device=device)
        indexes = [self.build_index(block, device=device) for block in blocks]
        return IndexedLookup(blocks, rows, indexes, [self.columns(block.request) for block in blocks])

    @property
    def _rows(self) -> ComputeKernel:
        return host().compute_kernels.create(self.rows_kernel)
