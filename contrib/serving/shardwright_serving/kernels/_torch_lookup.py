"""Lookup of the ``quant_torch`` kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import Bags, BlockSpec
from shardwright_plugins.kernel_parts.by_torch import RowNumbers, bag_sums
from shardwright_serving.kernels._lookup import QuantizedLookup
from shardwright_serving.rows.quantized_rows import QuantizedRows, empty_rows


class QuantTorchLookup(QuantizedLookup):
    """The stored rows of all blocks in one tensor; those that a batch asks for are dequantized."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks, self._numbers = blocks, RowNumbers(blocks, device)
        self._request = blocks[0].request
        request = self._request
        self._stored = empty_rows(request.data_type, self._numbers.total, request.num_columns, device).stored

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        ids = self._numbers.flatten(bags).ids
        request, stored = self._request, self._stored.index_select(0, ids)
        rows = QuantizedRows(request.data_type, request.num_columns, stored).dequantized()
        if bags.lengths is None:
            return rows, None
        places = torch.arange(ids.numel(), device=ids.device)
        return bag_sums(places, rows, bags.lengths, bags.weights), None

    def weight(self, block: int) -> Tensor:
        return self._numbers.of(self._stored, block)
