"""The common part of lookups in quantised tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.planning.tables.quantized import stored_row_bytes


class QuantizedLookup(Lookup):
    """A lookup whose weights are stored rows, ``[rows, bytes]`` uint8; it has no backward pass."""

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Refuse: the engine trains no table of a kernel that does not."""
        raise AssertionError("a kernel that does not train has no backward pass")


def row_bytes_of(spec: BlockSpec) -> int:
    """Bytes of a stored row of a block."""
    return stored_row_bytes(spec.request.data_type, spec.block.num_columns)


def stored_zeros(spec: BlockSpec, device: torch.device | str) -> Tensor:
    """Stored rows of a block, zeros: ``[rows, bytes]``."""
    return torch.zeros(spec.block.num_rows, row_bytes_of(spec), dtype=torch.uint8, device=device)
