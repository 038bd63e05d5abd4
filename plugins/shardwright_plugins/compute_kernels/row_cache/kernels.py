"""The kernels ``mapped_caching`` and ``pinned_caching``: one cache of rows, over two memories. No torch here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.compute_kernels._caching import CachingKernel, cache_of
from shardwright_plugins.compute_kernels._optimizers import (
    can_run_rule,
    can_train,
    needs_whole_rows,
    trained_bytes,
)
from shardwright_plugins.compute_kernels.fbgemm._uvm import BANDWIDTH_FRACTION
from shardwright_plugins.compute_kernels.row_cache.sizes import bookkeeping_bytes, num_slots

if TYPE_CHECKING:
    from torch import Tensor

    from shardwright.contracts.lookup import BlockSpec, Lookup


class RowCaching(CachingKernel):
    """A set-associative cache of rows with their optimizer state, in plain torch; exact on cut columns.

    A subclass has a ``name``, the memory tier of whole tables (``kept_in``) and the methods that are left abstract.
    """

    takes_ragged_bags: ClassVar[bool] = True

    @abstractmethod
    def refusal(self, request: KernelRequest) -> str:
        """Explain why whole tables cannot be kept for a device; empty if they can."""

    @abstractmethod
    def keep(self, blocks: Sequence[BlockSpec], *, device: Any) -> Callable[[str, int, Any, float], Tensor]:
        """Return what makes the tensors that whole tables are in.

        It is called once for ``"weight"`` and once for each optimizer state, with that name, the number of columns, the
        dtype and the initial value, and returns a tensor ``[rows of all blocks, columns]`` on the CPU. Rows of it are
        read by ``index_select`` and written by ``index_copy_``; slices are what ``Lookup.weight`` returns.

        Args:
            blocks: the blocks, whose rows follow one another.
            device: device of the cache.
        """

    def supports(self, request: KernelRequest) -> Literal[True] | str:
        """``True`` for an optimizer that runs in the backward pass, where whole tables can be kept; else the reason."""
        return self.refusal(request) or _refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights and optimizer state: of all rows where they are kept, of the cache's rows on the device."""
        cache = cache_of(request)
        slots = num_slots(num_rows, cache.held)
        own = bookkeeping_bytes(num_rows, cache.held, counts_uses=cache.algorithm == "lfu")
        return {
            self.kept_in: trained_bytes(request, num_rows),
            "device": trained_bytes(request, slots) + own,
        }

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type, width, optimizer and rule of eviction; each has sets of its own."""
        whole = (request.embedding_dim, request.first_column) if self.needs_whole_rows(request) else None
        algorithm = cache_of(request).algorithm
        return (request.data_type, request.num_columns, request.optimizer, whole, algorithm)

    def needs_whole_rows(self, request: KernelRequest) -> bool:
        """A row-wise optimizer's value is a mean over all columns of the row."""
        return needs_whole_rows(request)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:
        """Make the cache, and what keeps whole tables."""
        from shardwright_plugins.compute_kernels.row_cache._lookup import CachedRowsLookup

        return CachedRowsLookup(blocks, self.keep(blocks, device=device), device=device)


class _InMemory(RowCaching):
    """Keeps whole tables in memory of the CPU, mapped or pinned."""

    def keep(self, blocks: Sequence[BlockSpec], *, device: Any) -> Callable[[str, int, Any, float], Tensor]:
        """Make tensors of equal values."""
        from shardwright_plugins.compute_kernels.row_cache.memory import kept_for

        num_rows = sum(spec.block.num_rows for spec in blocks)
        return lambda _, columns, dtype, initial: kept_for(device, num_rows, columns, dtype, initial)


class MappedCaching(_InMemory):
    """Tables in files mapped into memory, the rows in use in a cache: for tables larger than memory, on the CPU.

    A topology that has a memory tier ``"disk"``, with its bandwidth, makes it an option for planners. Files are made in
    the folder that ``SHARDWRIGHT_MAPPED_FOLDER`` names, or in that of temporary files.
    """

    name: ClassVar[str] = "mapped_caching"
    preference: ClassVar[int] = -3
    kept_in: ClassVar[str] = "disk"
    further_tiers: ClassVar[tuple[str, ...]] = ("disk",)

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """A quarter: rows are sorted, searched in the cache and copied out of it before they are summed."""
        return 0.25

    def refusal(self, request: KernelRequest) -> str:  # noqa: D102 - described in the base class
        if request.device != "cpu":
            return f"files are mapped into the CPU's memory, not into that of {request.device!r} devices"
        return ""


class PinnedCaching(_InMemory):
    """Tables in pinned memory of the CPU, the rows in use in a cache on the CUDA device; needs no FBGEMM."""

    name: ClassVar[str] = "pinned_caching"
    preference: ClassVar[int] = -3
    kept_in: ClassVar[str] = "host"

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Half of what FBGEMM's cache reaches: rows that miss are gathered by the CPU, and the device waits."""
        return BANDWIDTH_FRACTION / 2

    def refusal(self, request: KernelRequest) -> str:  # noqa: D102
        if request.device != "cuda":
            return f"memory is pinned for 'cuda' devices, not for {request.device!r}"
        return _missing(request)


def _refusal(request: KernelRequest) -> str:
    if request.optimizer is None:
        return "no optimizer was named to run in the backward pass"
    for answer in (can_train(request.data_type), can_run_rule(request, "a cache of rows")):
        if answer is not True:
            return answer
    return ""


def _missing(request: KernelRequest) -> str:
    if not request.on_this_machine:
        return ""
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device is here to pin memory for"
