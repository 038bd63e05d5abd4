"""The ``quant_torch`` kernel: quantized tables in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright import KernelRequest
from shardwright_serving.kernels.requests import QuantizedKernel, serving_refusal

if TYPE_CHECKING:
    from shardwright import BlockSpec, Lookup


class QuantTorch(QuantizedKernel):
    """Dequantizes the rows of a batch and sums them; every precision, any device."""

    name: ClassVar[str] = "quant_torch"

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return serving_refusal(request, "the plain-torch kernel") or True

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """A quarter: rows are copied, unpacked and written as float32 before they are summed."""
        return 0.25

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_serving.kernels._torch_lookup import QuantTorchLookup

        return QuantTorchLookup(blocks, device=device)
