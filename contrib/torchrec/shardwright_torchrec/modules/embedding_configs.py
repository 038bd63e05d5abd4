"""Data types of tables, in torch's terms."""

from __future__ import annotations

import torch

import shardwright as sw

_DTYPES = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT4": torch.quint4x2,
    "INT2": torch.quint2x4,
}
_BITS = {"FP32": 32, "FP16": 16, "BF16": 16, "INT8": 8, "UINT8": 8, "FP8": 8, "INT4": 4, "INT2": 2}

DATA_TYPE_NUM_BITS: dict[sw.DataType, int] = {sw.DataType(name): bits for name, bits in _BITS.items()}
"""Data type -> bits of an element."""


def data_type_to_dtype(data_type: sw.DataType) -> torch.dtype:
    """The torch dtype of a data type."""
    return _DTYPES[data_type.name]


def dtype_to_data_type(dtype: torch.dtype) -> sw.DataType:
    """The data type of a torch dtype.

    Raises:
        InvalidInputError: no table is of it.
    """
    for name, known in _DTYPES.items():
        if known == dtype:
            return sw.DataType(name)
    raise sw.InvalidInputError(f"no table is of {dtype}. Known: {', '.join(map(str, _DTYPES.values()))}.")
