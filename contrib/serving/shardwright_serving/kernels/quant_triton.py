"""The ``quant_triton`` kernel: quantized tables on GPUs in Triton, which comes with every CUDA torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright import DataType, KernelRequest
from shardwright.contracts import NAMED_ONLY
from shardwright_plugins.kernel_parts.machine import is_interpreted, triton_failure, triton_refusal
from shardwright_serving.kernels.requests import QuantizedKernel, serving_refusal
from shardwright_serving.rows.formats import row_bytes

if TYPE_CHECKING:
    from shardwright import BlockSpec, Lookup

WORD = 4
"""Bytes of which a row has a whole number, so that its scale and bias are one aligned read."""


class QuantTriton(QuantizedKernel):
    """All blocks of one precision in one launch, whatever their widths; the host never waits for the device.

    A bag adds its rows in their order, as the other kernels do, so that it comes to the same bits however tables are
    cut.
    """

    name: ClassVar[str] = "quant_triton"
    batch_major: ClassVar[bool] = True

    @property
    def preference(self) -> int:  # type: ignore[override]  # what it is follows from the environment
        """Below ``quant_fbgemm``'s; interpreted, it is taken only when asked for."""
        return NAMED_ONLY if is_interpreted() else 1

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return _refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Stored rows, each in whole words of 4 bytes."""
        return {"device": num_rows * WORD * row_words(request.data_type, request.num_columns)}

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Part of the memory's bandwidth: that of ``fused_triton``, an assumption that was not measured."""
        return 0.75

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one precision; of one width too, where a row is returned for each id."""
        return (request.data_type, None if request.is_pooled else request.num_columns)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_serving.kernels._triton_lookup import QuantTritonLookup

        return QuantTritonLookup(blocks, device=device)


def row_words(data_type: DataType, num_columns: int) -> int:
    """Words of a row on the device, the last one filled up."""
    return -(-row_bytes(data_type, num_columns) // WORD)


def _refusal(request: KernelRequest) -> str | None:
    answer = triton_refusal(request.device) or serving_refusal(request, "the Triton kernel")
    return answer or (triton_failure() if request.on_this_machine else None)
