"""Lookup of the ``quant_torch`` kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.modules.quantized.rows import QuantizedRows
from shardwright.runtime.step.backward.row_gradients import bag_sums
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers
from shardwright_plugins.compute_kernels.quantized._lookup import QuantizedLookup, row_bytes_of


class QuantTorchLookup(QuantizedLookup):
    """The stored rows of all blocks in one tensor; those that a batch asks for are dequantised."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks, self._numbers = blocks, RowNumbers(blocks, device)
        self._request = blocks[0].request
        self._stored = torch.zeros(
            self._numbers.total, row_bytes_of(blocks[0]), dtype=torch.uint8, device=device
        )

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
