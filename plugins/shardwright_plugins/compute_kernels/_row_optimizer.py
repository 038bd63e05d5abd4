"""Updates of rows in the backward pass with plain torch, for kernels whose rows are tensors.

Legend: R rows of a tensor, N ids, D columns, C columns of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.runtime.step.row_gradients import row_gradients
from shardwright_plugins.compute_kernels._optimizers import needs_whole_rows
from shardwright_plugins.compute_kernels._row_updates import ROW_UPDATES


class RowOptimizer:
    """The optimizer of a group's rows: its learning rate, and the number of its steps.

    Args:
        block: any block of the group.
    """

    def __init__(self, block: BlockSpec) -> None:
        request = block.request
        assert request.optimizer is not None  # the kernel's supports()
        is_whole = needs_whole_rows(request)
        self._spec, self._num_columns = request.optimizer, request.num_columns
        self._update = ROW_UPDATES[self._spec.name]
        self._gradient_dim = request.embedding_dim if is_whole else request.num_columns
        self._own = slice(block.block.columns.start, block.block.columns.stop) if is_whole else slice(None)
        self.states_per_row = self._update.states_per_row
        self.learning_rate = self._spec.learning_rate
        self.num_steps = torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def columns(self) -> Mapping[str, int]:
        """Columns of each float32 state of a row."""
        return self._update.columns(self._num_columns)

    def step(self, bags: Bags, gradient: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update rows, and their state, by the gradients of bags.

        Args:
            bags: bags whose ids are rows of ``weights``.
            gradient: float32, ``C`` values of each bag.
            weights: the rows, ``[R, D]``.
            state: state of the rows, ``[R, D]`` or ``[R, 1]``.
        """
        rows, values = row_gradients(bags, gradient.view(bags.num_bags, self._gradient_dim))
        self.num_steps += 1
        update = self._update(self._spec, state)
        change = update.step(rows, values, self._own, self.learning_rate, float(self.num_steps))
        weights[rows] = (weights[rows].float() - change).to(weights.dtype)

    def named_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """State of some rows as a lookup shows it: with the number of steps, where there is any."""
        return {"step": self.num_steps, **state} if state else {}
