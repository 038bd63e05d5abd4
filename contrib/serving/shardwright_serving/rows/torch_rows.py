"""Rows in the layouts of torch's own operators, and lookups in them that can be traced and scripted.

Rows of integers end with scale and bias: two float16 of INT4 and INT2, two float32 of INT8. That is how
``torch.ops.quantized.embedding_bag_*_rowwise_offsets`` reads them, by FBGEMM's loops inside of torch's CPU library.
Rows of FP8 are those of quantized modules, and those of FP16 their bytes.

TorchScript compiles the lookups, so annotations are no text here.

Legend: R rows, D columns, N ids, B bags.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright import DataType
from shardwright_serving.rows.formats import HEADER_BYTES, bits_of, row_bytes
from shardwright_serving.rows.quantized_rows import QuantizedRows

_OPERATORS = {
    DataType.INT8: "embedding_bag_byte_rowwise_offsets",
    DataType.INT4: "embedding_bag_4bit_rowwise_offsets",
    DataType.INT2: "embedding_bag_2bit_rowwise_offsets",
}


def torch_row_bytes(data_type: DataType, num_columns: int) -> int:
    """Bytes of a row."""
    # Scale and bias of INT8 are float32 here, twice the bytes of two float16.
    return row_bytes(data_type, num_columns) + (HEADER_BYTES if data_type is DataType.INT8 else 0)


def torch_rows(rows: QuantizedRows) -> Tensor:
    """Lay out rows for torch's operators: ``[R, bytes]`` uint8."""
    if rows.data_type not in _OPERATORS:
        return rows.packed().contiguous().view(torch.uint8)
    header = torch.cat([rows.scale, rows.bias], dim=1)
    header = header.float() if rows.data_type is DataType.INT8 else header
    return torch.cat([rows.packed()[:, HEADER_BYTES:], header.view(torch.uint8)], dim=1)


def sum_bags(
    data_type: str, num_columns: int, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Sum the rows of each bag, in float32; an empty bag gives zeros.

    Args:
        data_type: precision of the rows.
        num_columns: D.
        rows: the rows as bytes, ``[R, bytes]`` uint8.
        ids: ``[N]`` int64.
        offsets: ``[B + 1]``, start of each bag, and end of the last.
        weights: ``[N]`` float32, or ``None`` for ones.

    Returns:
        ``[B, D]`` float32.
    """
    if _is_float(data_type):
        values = _floats(data_type, rows, ids)
        places = torch.arange(values.shape[0], device=ids.device)
        return functional.embedding_bag(
            places, values, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
    return _integer_sums(data_type, num_columns, rows, ids, offsets, weights)


def look_up(data_type: str, num_columns: int, rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of ids: ``[N, D]`` float32.

    Args:
        data_type: precision of the rows.
        num_columns: D.
        rows: the rows as bytes, ``[R, bytes]`` uint8.
        ids: ``[N]`` int64.
    """
    if _is_float(data_type):
        return _floats(data_type, rows, ids)
    # As many bags as ids, of one id each.
    one_each = torch.arange(ids.shape[0] + 1, device=ids.device)
    return _integer_sums(data_type, num_columns, rows, ids, one_each, None)


def _is_float(data_type: str) -> bool:
    return data_type == "FP16" or data_type == "FP8"


def _integer_sums(
    data_type: str, num_columns: int, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    if data_type == "INT8":
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            rows, ids, offsets, False, 0, False, weights, None, True
        )
    if data_type == "INT4":
        return torch.ops.quantized.embedding_bag_4bit_rowwise_offsets(
            rows, ids, offsets, False, 0, False, weights, None, True
        )[:, :num_columns]
    return torch.ops.quantized.embedding_bag_2bit_rowwise_offsets(
        rows, ids, offsets, False, 0, False, weights, None, True
    )[:, :num_columns]


def _floats(data_type: str, rows: Tensor, ids: Tensor) -> Tensor:
    found = functional.embedding(ids, rows)
    if data_type == "FP16":
        return torch.view_copy(found, dtype=torch.float16).float()
    # One row is contiguous as it is, with the stride of a whole row, which may be odd: only a copy is two bytes wide.
    header = found[:, :4].clone(memory_format=torch.contiguous_format)
    values = torch.view_copy(found[:, 4:].contiguous(), dtype=torch.float8_e4m3fn).float()
    header = torch.view_copy(header, dtype=torch.float16).float()
    return values * header[:, :1] + header[:, 1:]


def _shaped_like(columns_per_byte: int) -> Callable[..., Tensor]:
    """An implementation of an operator for tensors without memory, of integers with so many columns in a byte."""

    def sums(weight: Tensor, indices: Tensor, offsets: Tensor, *others: Any) -> Tensor:
        *_, include_last_offset = others
        num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
        columns = (weight.shape[1] - HEADER_BYTES) * columns_per_byte
        return weight.new_empty((num_bags, columns), dtype=torch.float32)

    return sums


_SHAPES = torch.library.Library("quantized", "IMPL", "Meta")
"""Shapes of operators that torch has none for, which tracing needs."""

for _data_type, _name in _OPERATORS.items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"quantized::{_name}", "Meta"):
        _SHAPES.impl(_name, _shaped_like(8 // bits_of(_data_type)))
