"""The loops of the conformance kit over registered kernels, by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.plugins.built_in import built_in

from shardwright import BlockSpec, ComputeKernel, Lookup, _fbgemm
from shardwright.host import host
from shardwright_testing.kernels.loops import (
    CPU,
    OPTIMIZERS,
    Batch,
    Loops,
    block_spec,
    build,
    draw_batch,
    draw_sequences,
)

__all__ = [
    "CPU",
    "ON_CUDA_ONLY",
    "OPTIMIZERS",
    "Batch",
    "Loops",
    "block_spec",
    "built",
    "draw_batch",
    "draw_sequences",
    "is_here",
    "kernel_names",
    "kernel_of",
    "skip_unless_here",
    "supports",
]

ON_CUDA_ONLY = {"fused_triton", "fused_uvm", "fused_uvm_caching", "pinned_caching"}
_BY_FBGEMM = {"fused", "quant_fbgemm"}


def is_here(kernel: str | None) -> bool:
    """True unless a kernel is FBGEMM's, and FBGEMM cannot be used."""
    return kernel not in _BY_FBGEMM or _fbgemm.available()


def skip_unless_here(kernel: str) -> None:
    """Skip the test of a kernel whose library cannot be used."""
    if not is_here(kernel):
        pytest.skip(f"{kernel} needs FBGEMM: {_fbgemm.reason()}")


def kernel_names(device: str = "cpu") -> list[str]:
    """The built-in kernels for a type of device."""
    return [name for name in built_in("compute_kernels") if device == "cuda" or name not in ON_CUDA_ONLY]


def kernel_of(name: str) -> ComputeKernel:
    return host().compute_kernels.create(name)


def supports(name: str, blocks: Sequence[BlockSpec]) -> bool:
    return all(kernel_of(name).supports(spec.request) is True for spec in blocks)


def built(
    name: str, blocks: Sequence[BlockSpec], *, seed: int = 1, device: torch.device = CPU
) -> tuple[Lookup, Loops]:
    """The kernel's lookup and the loops, with the same random weights."""
    return build(kernel_of(name), blocks, seed=seed, device=device)
