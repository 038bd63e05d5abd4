"""The built-in compute kernels.

Thin: torch, FBGEMM, Numba and Triton are imported when a kernel is built.
"""

from __future__ import annotations

from shardwright.contracts import ComputeKernel, Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.compute_kernels.fbgemm.fused import Fused
from shardwright_plugins.compute_kernels.fbgemm.fused_uvm import FusedUvm
from shardwright_plugins.compute_kernels.fbgemm.fused_uvm_caching import FusedUvmCaching
from shardwright_plugins.compute_kernels.fused_numba import FusedNumba
from shardwright_plugins.compute_kernels.fused_triton import FusedTriton
from shardwright_plugins.compute_kernels.plain_torch.dense import Dense
from shardwright_plugins.compute_kernels.plain_torch.fused_torch import FusedTorch
from shardwright_plugins.compute_kernels.row_cache.kernels import MappedCaching, PinnedCaching
from shardwright_plugins.imported import imported

__all__ = ["shardwright_compute_kernels", "shardwright_extensions"]


@hookimpl
def shardwright_compute_kernels() -> list[type[ComputeKernel]]:
    """Offer the built-in compute kernels."""
    return [
        Dense,
        Fused,
        FusedNumba,
        FusedTorch,
        FusedTriton,
        FusedUvm,
        FusedUvmCaching,
        MappedCaching,
        PinnedCaching,
    ]


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the check of the libraries."""
    return [
        imported(
            "check:kernels",
            "shardwright_plugins.compute_kernels._checks:kernel_libraries",
            "FBGEMM, Numba and Triton.",
        )
    ]
