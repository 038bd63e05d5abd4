"""The common part of kernels that keep weights in host memory and read them from a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE, state_bytes, weight_bytes
from shardwright_plugins.compute_kernels.fbgemm.fused import refusal

DEVICE = "cuda"
BANDWIDTH_FRACTION = 0.1
"""The part of the bandwidth that lookups through unified memory reach (TorchRec 1.8, ``kernel_bw_lookup``)."""
_OPERATOR = "new_managed_tensor"


def uvm_refusal(request: KernelRequest) -> str | None:
    """The reason why FBGEMM cannot keep a block's weights in host memory for its device, or ``None``."""
    if request.device != DEVICE:
        return (
            f"FBGEMM reads the host's memory from {DEVICE!r} devices through unified memory, "
            f"{request.device!r} has none"
        )
    return refusal(request) or _missing(request)


def uvm_bytes(request: KernelRequest, num_rows: int) -> Mapping[str, int]:
    """Weights and optimizer state; FBGEMM keeps one value a row on the device, and more of them beside the weights."""
    weights, state = weight_bytes(request, num_rows), state_bytes(request, num_rows)
    on_device = state if request.optimizer is not None and request.optimizer.name in ROW_WISE else 0
    return {"host": weights + state - on_device, "device": on_device}


def _missing(request: KernelRequest) -> str | None:
    if not request.on_this_machine:
        return None
    from shardwright._fbgemm import serves

    if serves(_OPERATOR, DEVICE):
        return None
    return "FBGEMM's build here has no unified memory (the package for CUDA devices is fbgemm-gpu)"
