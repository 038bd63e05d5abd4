"""The ``quant_fbgemm`` kernel: FBGEMM's table-batched embedding of integers."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright import DataType, KernelRequest
from shardwright_plugins.kernel_parts.machine import fbgemm_failure
from shardwright_serving.kernels.requests import QuantizedKernel, serving_refusal

if TYPE_CHECKING:
    from shardwright import BlockSpec, Lookup

_COLUMNS_MULTIPLE: Mapping[DataType, int] = {
    DataType.INT8: 4,
    DataType.INT4: 8,
    DataType.INT2: 16,
    DataType.FP16: 2,
}
"""Columns that a block must have a multiple of: on CUDA a thread reads 4 bytes of a row at once."""


class QuantFbgemm(QuantizedKernel):
    """All blocks of a rank in one call of FBGEMM's kernel, whatever their precisions and widths.

    Its sums are rounded otherwise than those of the other kernels: it multiplies scale and weight first.
    """

    name: ClassVar[str] = "quant_fbgemm"
    preference: ClassVar[int] = 2
    batch_major: ClassVar[bool] = True
    takes_ragged_bags: ClassVar[bool] = False

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return _refusal(request) or True

    def group_key(self, request: KernelRequest) -> Hashable:
        """All blocks; those of one width, where a row is returned for each id."""
        return None if request.is_pooled else request.num_columns

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_serving.kernels._fbgemm_lookup import QuantFbgemmLookup

        return QuantFbgemmLookup(blocks, device=device)


def _refusal(request: KernelRequest) -> str | None:
    answer = serving_refusal(request, "FBGEMM's kernel", _COLUMNS_MULTIPLE, ("cpu", "cuda"))
    if answer is not None:
        return answer
    multiple = _COLUMNS_MULTIPLE[request.data_type]
    if request.num_columns % multiple:
        return (
            f"FBGEMM needs {request.data_type} columns in multiples of {multiple}, the block has "
            f"{request.num_columns}"
        )
    if request.on_this_machine:
        failure = fbgemm_failure()
        return None if failure is None else f"FBGEMM cannot be used here: {failure}"
    if request.device == "cpu" and importlib.util.find_spec("fbgemm_gpu") is None:
        return "FBGEMM is not installed (the package is fbgemm-gpu-cpu)"
    return None
