"""The common part of lookups in quantized tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import BlockSpec, Lookup
from shardwright_serving.rows.formats import has_header, row_bytes
from shardwright_serving.rows.quantized_rows import empty_rows


class QuantizedLookup(Lookup):
    """A lookup whose weights are stored rows; it has no backward pass."""

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Refuse: the engine trains no table of a kernel that does not."""
        raise AssertionError("a kernel that does not train has no backward pass")


def row_bytes_of(spec: BlockSpec) -> int:
    """Bytes of a stored row of a block."""
    return row_bytes(spec.request.data_type, spec.block.num_columns)


def stored_zeros(spec: BlockSpec, device: torch.device | str) -> Tensor:
    """Stored rows of a block, zeros."""
    return empty_rows(spec.request.data_type, spec.block.num_rows, spec.block.num_columns, device).stored


def as_rows(held: Tensor, spec: BlockSpec) -> Tensor:
    """The stored rows of a block in bytes that may be longer: ``[rows, at least row_bytes]`` uint8."""
    if has_header(spec.request.data_type):
        return held[:, : row_bytes_of(spec)]
    return held.view(torch.float16)[:, : spec.block.num_columns]
