"""The ``fused_uvm`` kernel: weights in the host's memory, read by a CUDA device through unified memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.compute_kernels.fbgemm._uvm import BANDWIDTH_FRACTION, uvm_bytes, uvm_refusal
from shardwright_plugins.compute_kernels.fbgemm.fused import fused_key

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup


class FusedUvm(ComputeKernel):
    """FBGEMM's kernel in host memory, for tables larger than the device's; FBGEMM's placement ``MANAGED``."""

    name: ClassVar[str] = "fused_uvm"
    preference: ClassVar[int] = -2
    batch_major: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return uvm_refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights in the host's memory; of the optimizer's state, one value a row is on the device."""
        return uvm_bytes(request, num_rows)

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """A tenth of the link's: rows are fetched one by one."""
        return BANDWIDTH_FRACTION

    def reads(self, request: KernelRequest) -> Mapping[str, float]:
        """Every row comes from the host's memory."""
        return {"host": 1.0}

    def group_key(self, request: KernelRequest) -> Hashable:
        """Key of requests that are looked up together; the same as that of ``fused``."""
        return fused_key(request)

    def gives_equal_bits(self, request: KernelRequest) -> bool:
        """As with ``fused`` on CUDA, sums of many equal ids are made in any order."""
        return False

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.fbgemm._uvm_lookup import uvm_lookup

        return uvm_lookup(blocks, device=device)
