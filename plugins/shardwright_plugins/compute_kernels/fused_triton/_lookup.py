"""Lookup of the ``fused_triton`` kernel under the optimizers that are written in Triton.

Legend: W sources, S slots, K blocks, N ids, D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import BlockSpec
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE
from shardwright_plugins.compute_kernels.fused_triton import _kernels as kernels
from shardwright_plugins.compute_kernels.fused_triton._geometry import Tiles
from shardwright_plugins.compute_kernels.fused_triton._reading import TritonReading, on_device

_OPTIMIZERS = {
    "sgd": kernels.SGD,
    "adagrad": kernels.ADAGRAD,
    "row_wise_adagrad": kernels.ROW_WISE_ADAGRAD,
    "adam": kernels.ADAM,
}
# The torch optimizers' names for the states.
_STATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "row_wise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
_EPS = 1e-8  # FBGEMM's default


class FusedTritonLookup(TritonReading):
    """The weights of all blocks in one tensor, read and updated by the launches of :mod:`._kernels`."""

    def __init__(
        self, blocks: Sequence[BlockSpec], *, device: torch.device, tiles: Tiles | None = None
    ) -> None:
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # the kernel's supports()
        self._optimizer, self._learning_rate = optimizer, optimizer.learning_rate
        self._names = _STATE_NAMES[optimizer.name]
        self.states_per_row = frozenset(self._names if optimizer.name in ROW_WISE else ())
        super().__init__(blocks, device=device, is_whole=bool(self.states_per_row), tiles=tiles)
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")
        is_rounded = self.weights.dtype is not torch.float32
        self._is_stochastic = optimizer.get("stochastic_rounding", False) and is_rounded
        geometry = self.geometry
        num_values = geometry.num_rows if self.states_per_row else geometry.num_elements
        self._states = [torch.zeros(num_values, dtype=torch.float32, device=device) for _ in self._names]

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        return self.backward_scaled(saved, gradient, 1.0)

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        self._num_steps += 1
        bags, ids, geometry, tiles = saved.bags, self.sorted_ids(saved), self.geometry, self.tiles
        num_ids = bags.ids.numel()
        window = tiles.window_of(num_ids)
        windows = -(-num_ids // window)
        partial = torch.empty(2 * windows * geometry.num_columns, dtype=torch.float32, device=self.device)
        update = (geometry.blocks, self.weights, *self._state_tensors(), *self._numbers())
        constants = {
            "OPTIMIZER": _OPTIMIZERS[self._optimizer.name], "IS_STOCHASTIC": self._is_stochastic,
            "ALIGNED": geometry.aligned, "WINDOW": window, "ITEMS": tiles.items, "UNROLL": tiles.unroll,
            "COLUMNS": geometry.num_columns, **self.warps,
        }  # fmt: skip
        with on_device(self.device):
            kernels.launch(
                kernels.update_chunks, num_ids, tiles.items, ids.keys, ids.order, ids.places, ids.blocks, bags.weights,
                gradient.contiguous(), float(scale), partial, num_ids, *update, IS_WEIGHTED=bags.weights is not None,
                **constants,
            )  # fmt: skip
            if windows > 1:  # else no run leaves its window
                kernels.launch(
                    kernels.update_long_runs, windows, tiles.items, ids.keys, ids.order, ids.blocks, partial, num_ids,
                    *update, **constants,
                )  # fmt: skip
        return ()

    def _state_tensors(self) -> tuple[Tensor, Tensor]:
        first, second = [*self._states, self.weights, self.weights][:2]
        return first, second

    def _numbers(self) -> tuple[float | int, ...]:
        """Learning rate, eps, both betas and corrections of Adam, and the seed of a step's roundings."""
        get, step = self._optimizer.get, float(self._num_steps)
        beta1, beta2 = float(get("beta1", 0.9)), float(get("beta2", 0.999))
        rate, eps = float(self._learning_rate), float(get("eps", _EPS))
        return (rate, eps, beta1, beta2, 1 - beta1**step, 1 - beta2**step, int(step))

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        if not self._names:
            return {}
        of_block = self.geometry.rows_of if self.states_per_row else self.geometry.elements_of
        states = {name: of_block(state, block) for name, state in zip(self._names, self._states, strict=True)}
        return {"step": self._num_steps, **states}

    def load_step(self, step: float) -> None:
        self._num_steps.fill_(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
