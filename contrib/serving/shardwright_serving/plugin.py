"""The plugin: compute kernels of quantized tables, which bring the row formats INT8, INT4, INT2 and FP8.

Thin: torch, FBGEMM, Numba and Triton are imported when a kernel is built.
"""

from __future__ import annotations

from shardwright import ComputeKernel, hookimpl
from shardwright_serving.kernels.quant_fbgemm import QuantFbgemm
from shardwright_serving.kernels.quant_numba import QuantNumba
from shardwright_serving.kernels.quant_torch import QuantTorch
from shardwright_serving.kernels.quant_triton import QuantTriton

__all__ = ["shardwright_compute_kernels"]

api = 1


@hookimpl
def shardwright_compute_kernels() -> list[type[ComputeKernel]]:
    """Offer the kernels that look quantized tables up."""
    return [QuantFbgemm, QuantNumba, QuantTorch, QuantTriton]
