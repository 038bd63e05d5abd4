"""The plugin: compute kernels of quantized tables, which bring the row formats INT8, INT4, INT2 and FP8, and sharders.

Thin: torch, FBGEMM, Numba and Triton are imported when a kernel is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright import ComputeKernel, Extension, hookimpl
from shardwright_serving.kernels.quant_fbgemm import QuantFbgemm
from shardwright_serving.kernels.quant_numba import QuantNumba
from shardwright_serving.kernels.quant_torch import QuantTorch
from shardwright_serving.kernels.quant_triton import QuantTriton

api = 1


@hookimpl
def shardwright_compute_kernels() -> list[type[ComputeKernel]]:
    """Offer the kernels that look quantized tables up."""
    return [QuantFbgemm, QuantNumba, QuantTorch, QuantTriton]


class QuantizedBags(Extension):
    """Has quantized collections of pooled tables sharded."""

    name = "sharder:quantized_embedding_bag"

    def load(self) -> Callable[..., Any]:
        """Import the sharder."""
        from shardwright_serving.tables.sharders import QuantEmbeddingBagCollectionSharder

        return QuantEmbeddingBagCollectionSharder


class QuantizedSequences(Extension):
    """Has quantized collections of unpooled tables sharded."""

    name = "sharder:quantized_embedding"

    def load(self) -> Callable[..., Any]:
        """Import the sharder."""
        from shardwright_serving.tables.sharders import QuantEmbeddingCollectionSharder

        return QuantEmbeddingCollectionSharder


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the sharders of quantized collections."""
    return [QuantizedBags, QuantizedSequences]
