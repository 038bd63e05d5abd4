"""Lookup of the ``dense`` kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.runtime.step.backward.row_gradients import row_gradients
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers, sums_of_rows


class DenseLookup(Lookup):
    """Parameters that are views of one tensor; gradients are dense, one a block."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks = blocks
        self._numbers = RowNumbers(blocks, device)
        self._rows = self._numbers.zeros(blocks[0], device)
        self._parameters = [torch.nn.Parameter(self._rows[slice(*span)]) for span in self._numbers.spans]

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        flat = self._numbers.flatten(bags)
        return sums_of_rows(self._rows, flat), flat if training else None

    def prepare(self, bags: Bags) -> Any:
        return self._numbers.flatten(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        rows, values = row_gradients(saved, gradient.view(saved.num_bags, self._rows.shape[1]))
        whole = torch.zeros_like(self._rows)
        whole[rows] = values.to(whole.dtype)
        return [whole[start:stop] for start, stop in self._numbers.spans]

    def weight(self, block: int) -> Tensor:
        return self._parameters[block].detach()

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self._parameters
