"""Lookups in mapped rows by operators of torch alone, so that programs run where nothing but torch is.

Legend: R rows, D columns, N ids, B bags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.planning.tables.quantized import HEADER_BYTES
from shardwright.planning.tables.spec import DataType
from shardwright.serving.rows_file import TableRows

__all__ = ["look_up", "sum_bags"]

_OPERATORS = {
    DataType.INT8: "embedding_bag_byte_rowwise_offsets",
    DataType.INT4: "embedding_bag_4bit_rowwise_offsets",
    DataType.INT2: "embedding_bag_2bit_rowwise_offsets",
}
"""Operators of torch that sum bags of integer rows, by FBGEMM's compiled loops inside of torch's CPU library."""


def sum_bags(table: TableRows, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the rows of each bag, in float32; an empty bag gives zeros.

    Args:
        table: the table.
        rows: its rows as bytes, ``[R, bytes]`` uint8.
        ids: ``[N]`` int64.
        offsets: ``[B + 1]``, start of each bag, and end of the last.
        weights: ``[N]`` float32, or ``None`` for ones.

    Returns:
        ``[B, D]`` float32.
    """
    if table.data_type in _OPERATORS:
        operator = getattr(torch.ops.quantized, _OPERATORS[table.data_type])
        sums = operator(rows, ids, offsets, False, 0, False, weights, None, True)
        return sums[:, : table.embedding_dim]
    values = look_up(table, rows, ids)
    places = torch.arange(values.shape[0], device=ids.device)
    return functional.embedding_bag(
        places, values, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def look_up(table: TableRows, rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of ids: ``[N, D]`` float32.

    Args:
        table: the table.
        rows: its rows as bytes, ``[R, bytes]`` uint8.
        ids: ``[N]`` int64.
    """
    if table.data_type in _OPERATORS:
        # As many bags as ids, of one id each.
        return sum_bags(table, rows, ids, torch.arange(ids.shape[0] + 1, device=ids.device), None)
    found = functional.embedding(ids, rows)
    if table.data_type is DataType.FP16:
        return found.view(torch.float16).float()
    scale, bias = found[:, :HEADER_BYTES].contiguous().view(torch.float16).float().split(1, dim=1)
    return found[:, HEADER_BYTES:].contiguous().view(torch.float8_e4m3fn).float() * scale + bias


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
        _SHAPES.impl(_name, _shaped_like(8 // _data_type.bits))
