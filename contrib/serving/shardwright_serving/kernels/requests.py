"""The common part of the kernels of quantized tables: what they serve, and the memory of their rows."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import ClassVar

from shardwright import ComputeKernel, DataType, KernelRequest, RowFormat
from shardwright_serving.rows.formats import FORMATS, SERVED


class QuantizedKernel(ComputeKernel):
    """A kernel that holds stored rows, scale and bias among them, as its blocks' weights."""

    row_formats: ClassVar[tuple[RowFormat, ...]] = tuple(FORMATS.values())
    takes_ragged_bags: ClassVar[bool] = True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Stored rows; each column block has the scale and bias of its rows."""
        return {"device": num_rows * self.row_bytes(request)}

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one precision and width, unless a kernel says otherwise."""
        return (request.data_type, request.num_columns)

    def refusal_of_weight_gradients(self) -> str:
        """It serves tables."""
        return "it serves tables, and has no backward pass"


def serving_refusal(
    request: KernelRequest, who: str, data_types: Collection[DataType] = SERVED, devices: Collection[str] = ()
) -> str | None:
    """The reason why a kernel cannot serve a request, or ``None``.

    Args:
        request: the request.
        who: name of what does the work, for the text.
        data_types: precisions that it reads.
        devices: types of devices that it runs on; empty for any.
    """
    if not request.is_frozen or request.optimizer is not None:
        return f"{who} has no backward pass: it serves tables that are frozen and have no optimizer"
    if devices and request.device not in devices:
        return f"{who} runs on {', '.join(sorted(devices))}, not on {request.device!r}"
    if request.data_type not in data_types:
        known = ", ".join(known for known in SERVED if known in data_types)
        return f"{who} reads rows of {known}, not of {request.data_type}"
    return None
