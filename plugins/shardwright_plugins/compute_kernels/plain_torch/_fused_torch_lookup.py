"""Lookup of the ``fused_torch`` kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright_plugins.compute_kernels.plain_torch._row_optimizer import RowOptimizer
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import TorchRows


class FusedTorchLookup(Lookup):
    """One tensor of rows; a backward pass updates the rows it has a gradient for."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks = blocks
        self._rows = TorchRows(blocks, device)
        self._optimizer = RowOptimizer(blocks[0])
        self._state = {
            name: torch.full(
                (len(self._rows.rows), columns),
                self._optimizer.initial(name),
                dtype=torch.float32,
                device=device,
            )
            for name, columns in self._optimizer.columns.items()
        }
        self.states_per_row = self._optimizer.states_per_row

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        flat = self._rows.flatten(bags)
        return self._rows.sums(flat), flat if training else None

    def prepare(self, bags: Bags) -> Any:
        return self._rows.flatten(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._optimizer.step(saved, gradient, self._rows.rows, self._state, self._rows.numbers.in_blocks)
        return ()

    def weight(self, block: int) -> Tensor:
        return self._rows.of(block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        numbers = self._rows.numbers
        return self._optimizer.named_state(
            {name: numbers.of(values, block) for name, values in self._state.items()}
        )

    def load_step(self, step: float) -> None:
        self._optimizer.num_steps.fill_(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._optimizer.learning_rate = learning_rate
