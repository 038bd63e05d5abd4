"""The row formats INT8, INT4, INT2 and FP8; nothing is imported from torch until rows are packed.

What a row has, and why, stands in `shardwright_serving.rows.quantized_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

import shardwright as sw

if TYPE_CHECKING:
    from torch import Tensor

    from shardwright_serving.rows.quantized_rows import QuantizedRows

HEADER_BYTES = 4
"""Bytes before the elements of a row: its scale and its bias, a float16 each, as in FBGEMM's table-batched kernels."""


@frozen
class ScaledRows(sw.RowFormat):
    """Elements of few bits under a scale and a bias of their row; a block of columns has those of the whole rows.

    Args:
        name: name of the data type.
        bits: bits of an element.
    """

    name: str  # type: ignore[misc]  # of objects, where other formats have it in their class
    bits: int  # type: ignore[misc]

    def row_bytes(self, num_columns: int) -> int:
        """Scale and bias, and the elements in whole bytes."""
        return HEADER_BYTES + -(-num_columns * self.bits // 8)

    def pack(self, values: Tensor) -> Tensor:
        """See :func:`quantize_rows`."""
        from shardwright_serving.rows.quantized_rows import quantize_rows

        return quantize_rows(values, self.name).stored

    def unpack(self, stored: Tensor, num_columns: int) -> Tensor:  # noqa: D102 - described in the base class
        return self._rows(stored, num_columns).dequantized()

    def columns(self, stored: Tensor, num_columns: int, start: int, stop: int) -> Tensor:  # noqa: D102
        return self._rows(stored, num_columns).columns(start, stop).stored

    def join(self, blocks: Sequence[Tensor], widths: Sequence[int]) -> Tensor:  # noqa: D102
        import torch

        from shardwright_serving.rows.quantized_rows import QuantizedRows

        parts = [self._rows(stored, columns) for stored, columns in zip(blocks, widths, strict=True)]
        # Torch joins no float8, but its bytes.
        kind = parts[0].values.dtype
        values = torch.cat([part.values.view(torch.uint8) for part in parts], dim=1).view(kind)
        return QuantizedRows.of(sw.DataType(self.name), values, parts[0].scale, parts[0].bias).stored

    def error_bound(self, stored: Tensor, num_columns: int) -> Tensor:  # noqa: D102
        return self._rows(stored, num_columns).error_bound()

    def _rows(self, stored: Tensor, num_columns: int) -> QuantizedRows:
        from shardwright_serving.rows.quantized_rows import QuantizedRows

        return QuantizedRows(sw.DataType(self.name), num_columns, stored)


FORMATS: Mapping[str, ScaledRows] = {
    name: ScaledRows(name, bits) for name, bits in (("INT8", 8), ("INT4", 4), ("INT2", 2), ("FP8", 8))
}
"""The formats, by the names of their data types."""

SERVED = (*map(sw.DataType, FORMATS), sw.DataType("FP16"))
"""Data types that tables can be quantized to, the default first."""


def has_header(data_type: sw.DataType) -> bool:
    """True if rows of a type begin with their scale and bias."""
    return data_type in FORMATS


def bits_of(data_type: sw.DataType) -> int:
    """Bits of an element of a type that tables can be quantized to."""
    return FORMATS[data_type].bits if has_header(data_type) else 16


def row_bytes(data_type: sw.DataType, num_columns: int) -> int:
    """Bytes of a row of a type that tables can be quantized to."""
    return FORMATS[data_type].row_bytes(num_columns) if has_header(data_type) else 2 * num_columns
