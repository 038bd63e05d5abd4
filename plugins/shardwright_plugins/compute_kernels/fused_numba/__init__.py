"""The ``fused_numba`` kernel: lookup and update of 32-bit tables on the CPU, compiled by Numba."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.tables.data_types import DataType
from shardwright_plugins.compute_kernels._compiled import import_failure
from shardwright_plugins.compute_kernels._optimizers import can_run_rule, needs_whole_rows, trained_bytes

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup


_LOOPS = "shardwright_plugins.compute_kernels.fused_numba._update_loops"


class FusedNumba(ComputeKernel):
    """All blocks of a rank in one call of compiled loops, shared among as many threads as torch uses.

    Bags are read, and gradients taken, in the order in which they travel, so that nothing is rearranged; a row is read
    and written once in an update. Exact for row-wise optimizers on cut columns.
    """

    name: ClassVar[str] = "fused_numba"
    preference: ClassVar[int] = 2
    batch_major: ClassVar[bool] = True
    takes_ragged_bags: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return _refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights and optimizer state."""
        return {"device": trained_bytes(request, num_rows)}

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type and optimizer; of one width too, where a row is returned for each id."""
        return (request.data_type, request.optimizer, None if request.is_pooled else request.num_columns)

    def needs_whole_rows(self, request: KernelRequest) -> bool:
        """A row-wise optimizer's value is a mean over all columns of the row."""
        return needs_whole_rows(request)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.fused_numba._lookup import FusedNumbaLookup

        return FusedNumbaLookup(blocks)


def _refusal(request: KernelRequest) -> str | None:
    if request.device != "cpu":
        return f"Numba's loops run on the CPU, not on {request.device!r}"
    if request.optimizer is None:
        return "no optimizer was named to run in the backward pass"
    answer = can_run_rule(request, "the Numba kernel")
    if answer is not True:
        return answer
    if request.data_type is not DataType.FP32:
        return f"Numba has no {request.data_type} on the CPU, only {DataType.FP32}"
    return _missing(request)


def _missing(request: KernelRequest) -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (the package is numba)"
    return import_failure(_LOOPS, "Numba") if request.on_this_machine else None
