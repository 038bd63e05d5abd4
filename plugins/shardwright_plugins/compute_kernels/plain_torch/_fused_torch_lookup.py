"""Lookup of the ``fused_torch`` kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright_plugins.compute_kernels.plain_torch._row_optimizer import RowOptimizer, RunsRowOptimizer
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers, sums_of_rows


class FusedTorchLookup(RunsRowOptimizer, Lookup):
    """One tensor of rows; a backward pass updates the rows it has a gradient for."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks = blocks
        self._numbers = RowNumbers(blocks, device)
        self._rows = self._numbers.zeros(blocks[0], device)
        self._optimizer = RowOptimizer(blocks[0])
        self._state = self._optimizer.first_state(len(self._rows), device)
        self.states_per_row = self._optimizer.states_per_row

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        flat = self._numbers.flatten(bags)
        return sums_of_rows(self._rows, flat), flat if training else None

    def prepare(self, bags: Bags) -> Any:
        return self._numbers.flatten(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._optimizer.step(saved, gradient, self._rows, self._state, self._numbers.in_blocks)
        return ()

    def weight(self, block: int) -> Tensor:
        return self._numbers.of(self._rows, block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        return self._optimizer.named_state(
            {name: self._numbers.of(values, block) for name, values in self._state.items()}
        )
