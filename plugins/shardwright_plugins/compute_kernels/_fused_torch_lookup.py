"""Lookup of the ``fused_torch`` kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.contracts.optimizer import ROW
from shardwright.optim.by_rows import rounded, updated_rows
from shardwright.runtime.step.row_gradients import row_gradients
from shardwright_plugins.compute_kernels._optimizers import is_plain, rule_of
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
        self._rule = rule_of(request.optimizer)
        self._state = {
            name: torch.full(
                (len(self._rows.rows), columns),
                self._rule.initial(name),
                dtype=torch.float32,
                device=device,
            )
            for name, columns in self._rule.columns(request.num_columns).items()
        }
        # What is written with torch's fused operations is faster.
        self._update = (
            ROW_UPDATES[request.optimizer.name](request.optimizer, self._state)
            if is_plain(request.optimizer)
            else None
        )
        self.states_per_row = frozenset(self._rule.states_of(ROW))
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
        step = float(self._num_steps)
        if self._update is not None:
            new = weights[rows].float() - self._update.step(rows, values, own, self._learning_rate, step)
        else:
            new = self._updated(rows, values, own, step)
        if self._rule.rounds_stochastically and weights.dtype is not torch.float32:
            new = rounded(new, weights.dtype, self._rows.in_blocks(rows), step)
        weights[rows] = new.to(weights.dtype)
        return ()

    def _updated(self, rows: Tensor, gradient: Tensor, own: slice, step: float) -> Tensor:
        """New float32 values of rows, whose state advances."""
        states = {name: values[rows] for name, values in self._state.items()}
        numbers = self._rule.numbers(self._learning_rate, step)
        new, later = updated_rows(self._rule, self._rows.rows[rows].float(), gradient, own, states, numbers)
        for name, values in later.items():
            self._state[name][rows] = values
        return new

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
