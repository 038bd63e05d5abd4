"""Precisions that tables are served in, and the bytes of their rows. Nothing here imports torch."""

from __future__ import annotations

from shardwright.planning.tables.spec import DataType

__all__ = ["HEADER_BYTES", "SERVED", "has_header", "stored_row_bytes"]

SERVED = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP8, DataType.FP16)
"""The precisions that tables can be quantised to, the default first."""

HEADER_BYTES = 4
"""Bytes before the elements of a row: its scale and its bias, a float16 each, as in FBGEMM's table-batched kernels."""

_SCALED = frozenset({DataType.INT8, DataType.UINT8, DataType.INT4, DataType.INT2, DataType.FP8})


def has_header(data_type: DataType) -> bool:
    """True if rows of a type begin with their scale and bias."""
    return data_type in _SCALED


def stored_row_bytes(data_type: DataType, num_columns: int) -> int:
    """Bytes of a stored row: its elements in whole bytes, with scale and bias where the type has them.

    Args:
        data_type: element type of the table.
        num_columns: columns of the table, or of a block of it: each block has the scale and bias of its rows.
    """
    elements = -(-num_columns * data_type.bits // 8)
    return elements + (HEADER_BYTES if has_header(data_type) else 0)
