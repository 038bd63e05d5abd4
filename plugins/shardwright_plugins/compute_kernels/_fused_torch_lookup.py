"""Lookup of the ``fused_torch`` kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.runtime.step.row_gradients import row_gradients
from shardwright_plugins.compute_kernels._row_updates import ROW_UPDATES
from shardwright_plugins.compute_kernels._torch_rows import TorchRows


class FusedTorchLookup(Lookup):
    """One tensor of rows; a backward pass updates the rows it has a gradient for."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device, whole_rows: bool) -> None:
        self.blocks = blocks
        self._rows = TorchRows(blocks, device)
        request = blocks[0].request
        assert request.optimizer is not None  # the kernel's supports()
        self._learning_rate = request.optimizer.learning_rate
        update = ROW_UPDATES[request.optimizer.name]
        self._state = {
            name: torch.zeros(len(self._rows.rows), columns, dtype=torch.float32, device=device)
            for name, columns in update.columns(request.num_columns).items()
        }
        self._update = update(request.optimizer, self._state)
        self.states_per_row = update.states_per_row
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")
        self._whole_rows = whole_rows
        self._gradient_dim = request.embedding_dim if whole_rows else request.num_columns

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        flat = self._rows.flatten(bags)
        return self._rows.sums(flat), flat if training else None

    def prepare(self, bags: Bags) -> Any:
        return self._rows.flatten(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        rows, values = row_gradients(saved, gradient.view(saved.num_bags, self._gradient_dim))
        weights = self._rows.rows
        columns = self.blocks[0].block.columns
        own = slice(columns.start, columns.stop) if self._whole_rows else slice(None)
        self._num_steps += 1
        change = self._update.step(rows, values, own, self._learning_rate, float(self._num_steps))
        weights[rows] = (weights[rows].float() - change).to(weights.dtype)
        return ()

    def weight(self, block: int) -> Tensor:
        return self._rows.of(block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        start, stop = self._rows.spans[block]
        state = {name: values[start:stop] for name, values in self._state.items()}
        return {"step": self._num_steps, **state} if state else {}

    def load_step(self, step: float) -> None:
        self._num_steps.fill_(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
