"""Lookup of the ``fused_triton`` kernel under any other optimizer: its rule runs in plain torch.

Legend: R rows of all blocks, N ids, D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import BlockSpec
from shardwright.runtime.step.backward.row_gradients import bag_sums
from shardwright_plugins.compute_kernels._optimizers import needs_whole_rows
from shardwright_plugins.compute_kernels.fused_triton._reading import SortedIds, TritonReading
from shardwright_plugins.compute_kernels.plain_torch._row_optimizer import RowOptimizer, RunsRowOptimizer
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers


class RuleTritonLookup(RunsRowOptimizer, TritonReading):
    """Blocks of one width, whose rows are updated by the rule of a registered optimizer.

    The host does not know how many distinct rows there are, and does not wait to be told: as many as there are ids are
    updated, and those beyond the distinct ones are a spare row after the last.
    """

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        request = blocks[0].request
        columns = request.num_columns
        super().__init__(blocks, device=device, is_whole=needs_whole_rows(request), num_spare=columns)
        self._optimizer, self._numbers = RowOptimizer(blocks[0]), RowNumbers(blocks, device)
        self.states_per_row = self._optimizer.states_per_row
        self._rows = self.weights.view(-1, columns)
        self._gradient_dim = request.embedding_dim if needs_whole_rows(request) else columns
        self._state = self._optimizer.first_state(len(self._rows), device)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        if not saved.bags.ids.numel():
            self._optimizer.num_steps += 1
            return ()
        rows, values = self._row_gradients(self.sorted_ids(saved), gradient, saved.bags.weights)
        self._optimizer.apply(rows, values, self._rows, self._state, self._numbers.in_blocks)
        return ()

    def _row_gradients(
        self, ids: SortedIds, gradient: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum the gradients of each distinct row.

        Args:
            ids: the sorted ids.
            gradient: gradients of the bags, flat.
            weights: weight of each id, ``[N]``, or ``None``.

        Returns:
            ``[N]`` rows, the distinct ones first, and ``[N, C]`` gradients.
        """
        keys = ids.keys.long()
        begins = torch.ones_like(keys)
        begins[1:] = keys[1:] != keys[:-1]
        run = begins.cumsum(0) - 1  # number of the run that each sorted id is in
        lengths = torch.zeros_like(keys).scatter_add_(0, run, torch.ones_like(keys))
        rows = torch.full_like(keys, self.geometry.num_rows).scatter_(0, run, keys)
        # Blocks are of one width, so a bag's gradient is a row of the matrix of all.
        bags = ids.places.index_select(0, ids.order) // self._gradient_dim
        own = None if weights is None else weights.index_select(0, ids.order)
        return rows, bag_sums(bags, gradient.contiguous().view(-1, self._gradient_dim), lengths, own)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        return self._optimizer.named_state(
            {name: self._numbers.of(values, block) for name, values in self._state.items()}
        )
