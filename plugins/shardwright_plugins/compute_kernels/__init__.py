"""The built-in compute kernels."""

from __future__ import annotations

from shardwright.contracts import ComputeKernel
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_compute_kernels() -> list[type[ComputeKernel]]:
    """Offer the built-in compute kernels."""
    return []
