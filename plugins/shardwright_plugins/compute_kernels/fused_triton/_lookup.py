"""Lookup of the ``fused_triton`` kernel.

Legend: W sources, S slots, K blocks, N ids, D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.modules.embedding_configs import dtype_of
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE
from shardwright_plugins.compute_kernels.fused_triton import _kernels as kernels
from shardwright_plugins.compute_kernels.fused_triton._geometry import Geometry, Tiles

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
_KEYS_AT_ONCE = (
    128  # that each of a program's ids is compared with: with 32 of them, 32 a thread of four warps
)
_INT32_KEYS = 1 << 31  # rows: fewer can be numbered by 32 bits, which are sorted in half the time


@frozen(eq=False)
class _Cells:
    """Bags, and where their results and gradients are.

    Args:
        bags: the bags.
        ends: end of each bag's ids, ``[bags]`` int64; ``None`` for sequences.
        results: table of cells for results, see :mod:`._kernels`.
        gradients: table of cells for gradients, likewise.
        cell_of_bag: cell of each bag, ``[bags]`` int32.
        num_results: elements of all results.
        sorted_ids: the sorted ids, once they were asked for.
    """

    bags: Bags
    ends: Tensor | None
    results: Tensor
    gradients: Tensor
    cell_of_bag: Tensor
    num_results: int
    sorted_ids: list[_Sorted] = field(factory=list, init=False)


@frozen(eq=False)
class _Sorted:
    """Ids sorted by key, ``[N]`` each.

    Args:
        keys: keys in rising order.
        order: place of each sorted id among the ids as they came.
        unsorted: keys of the ids as they came.
        places: start of the gradient of each id's bag, as the ids came.
        blocks: block of each id, as the ids came.
    """

    keys: Tensor
    order: Tensor
    unsorted: Tensor
    places: Tensor
    blocks: Tensor


class FusedTritonLookup(Lookup):
    """The weights of all blocks in one tensor, read and updated by the launches of :mod:`._kernels`."""

    def __init__(
        self, blocks: Sequence[BlockSpec], *, device: torch.device, tiles: Tiles | None = None
    ) -> None:
        self.blocks, self._device = blocks, device
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # the kernel's supports()
        self._optimizer, self._learning_rate = optimizer, optimizer.learning_rate
        self._names = _STATE_NAMES[optimizer.name]
        self.states_per_row = frozenset(self._names if optimizer.name in ROW_WISE else ())
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")
        self._geometry = Geometry(blocks, device, row_wise=bool(self.states_per_row))
        self._tiles = tiles or Tiles.of(device, self._geometry.num_columns)
        dtype = dtype_of(blocks[0].table.data_type)
        self._weights = torch.zeros(self._geometry.num_elements, dtype=dtype, device=device)
        self._is_stochastic = optimizer.get("stochastic_rounding", False) and dtype is not torch.float32
        num_values = self._geometry.num_rows if self.states_per_row else self._geometry.num_elements
        self._states = [torch.zeros(num_values, dtype=torch.float32, device=device) for _ in self._names]
        self._key_type = torch.int32 if self._geometry.num_rows < _INT32_KEYS else torch.int64
        self._warps = {} if device.type == "cpu" else {"num_warps": self._tiles.warps}

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        cells = self._cells(bags)
        out = torch.empty(cells.num_results, dtype=torch.float32, device=self._device)
        geometry, tiles = self._geometry, self._tiles
        with self._on_device():
            kernels.launch(
                kernels.look_up, bags.num_bags, tiles.items,
                self._weights, geometry.slots, bags.num_slots, cells.results, cells.cell_of_bag, bags.ids, bags.weights,
                cells.ends, bags.lengths, out, bags.num_bags, IS_SEQUENCE=bags.lengths is None,
                IS_WEIGHTED=bags.weights is not None, ALIGNED=geometry.aligned, ITEMS=tiles.items,
                UNROLL=1 if bags.lengths is None else tiles.unroll, COLUMNS=geometry.num_columns, **self._warps,
            )  # fmt: skip
        return out, cells if training else None

    def prepare(self, bags: Bags) -> Any:
        return self._cells(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        return self.backward_scaled(saved, gradient, 1.0)

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        self._num_steps += 1
        bags, ids, geometry, tiles = saved.bags, self._sorted(saved), self._geometry, self._tiles
        num_ids = bags.ids.numel()
        window = tiles.window_of(num_ids)
        windows = -(-num_ids // window)
        partial = torch.empty(2 * windows * geometry.num_columns, dtype=torch.float32, device=self._device)
        update = (geometry.blocks, self._weights, *self._state_tensors(), *self._numbers())
        constants = {
            "OPTIMIZER": _OPTIMIZERS[self._optimizer.name], "IS_STOCHASTIC": self._is_stochastic,
            "ALIGNED": geometry.aligned, "WINDOW": window, "ITEMS": tiles.items, "UNROLL": tiles.unroll,
            "COLUMNS": geometry.num_columns, **self._warps,
        }  # fmt: skip
        with self._on_device():
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

    def weight_gradients(self, saved: Any, gradient: Tensor) -> Tensor:
        """Gradients of the weights of ids, before the rows are updated.

        Args:
            saved: state from :meth:`forward` in training.
            gradient: float32, flat, in the order of its result.

        Returns:
            ``[N]`` float32.
        """
        ids, geometry, tiles = self._sorted(saved), self._geometry, self._tiles
        out = torch.empty(saved.bags.ids.numel(), dtype=torch.float32, device=self._device)
        with self._on_device():
            kernels.launch(
                kernels.weight_gradients, out.numel(), tiles.items, self._weights, geometry.blocks, ids.unsorted,
                ids.places, ids.blocks, gradient.contiguous(), out, out.numel(), ALIGNED=geometry.aligned,
                ITEMS=tiles.items, COLUMNS=geometry.num_columns, **self._warps,
            )  # fmt: skip
        return out

    def anticipate(self, saved: Any) -> None:
        self._sorted(saved)

    def _cells(self, bags: Bags) -> _Cells:
        """Places of results and gradients, without a wait of the host for the device."""
        is_matrix = bags.lengths is not None and not bags.is_ragged
        places = self._geometry.places(bags.table, is_matrix=is_matrix)
        ends = None if bags.lengths is None else torch.cumsum(bags.lengths, 0, dtype=torch.int64)
        return _Cells(bags, ends, places.results, places.gradients, places.cell_of_bag, places.num_results)

    def _sorted(self, cells: _Cells) -> _Sorted:
        """The ids sorted by key; made once a batch."""
        if not cells.sorted_ids:
            cells.sorted_ids.append(self._sort(cells))
        return cells.sorted_ids[0]

    def _sort(self, cells: _Cells) -> _Sorted:
        bags, geometry, tiles = cells.bags, self._geometry, self._tiles
        keys = torch.empty(bags.ids.numel(), dtype=self._key_type, device=self._device)
        places = torch.empty_like(keys, dtype=torch.int64)
        blocks = torch.empty_like(keys, dtype=torch.int32)
        with self._on_device():
            kernels.launch(
                kernels.list_ids, bags.num_bags, tiles.bags, geometry.slots, bags.num_slots, cells.gradients,
                cells.cell_of_bag, bags.ids, cells.ends, bags.lengths, keys, places, blocks, bags.num_bags,
                IS_SEQUENCE=bags.lengths is None, ITEMS=tiles.bags, UNROLL=1 if bags.lengths is None else tiles.unroll,
            )  # fmt: skip
        in_order, order = self._in_order(keys)
        return _Sorted(in_order, order, keys, places, blocks)

    def _in_order(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The keys sorted, and the place that each had.

        Stable: gradients of a row are added in the order of the batch, so equal batches give equal bits.
        """
        tiles, num_ids = self._tiles, keys.numel()
        if num_ids > tiles.few:
            in_order, order = torch.sort(keys, stable=True)
            return in_order, order
        in_order, order = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
        with self._on_device():
            kernels.launch(
                kernels.sort_few, num_ids, tiles.bags, keys, in_order, order, num_ids, ITEMS=tiles.bags,
                OTHERS=_KEYS_AT_ONCE,
            )  # fmt: skip
        return in_order, order

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, which need not be the one that has the blocks."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _state_tensors(self) -> tuple[Tensor, Tensor]:
        first, second = [*self._states, self._weights, self._weights][:2]
        return first, second

    def _numbers(self) -> tuple[float | int, ...]:
        """Learning rate, eps, both betas and corrections of Adam, and the seed of a step's roundings."""
        get, step = self._optimizer.get, float(self._num_steps)
        beta1, beta2 = float(get("beta1", 0.9)), float(get("beta2", 0.999))
        rate, eps = float(self._learning_rate), float(get("eps", _EPS))
        return (rate, eps, beta1, beta2, 1 - beta1**step, 1 - beta2**step, int(step))

    def weight(self, block: int) -> Tensor:
        return self._geometry.elements_of(self._weights, block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        if not self._names:
            return {}
        of_block = self._geometry.rows_of if self.states_per_row else self._geometry.elements_of
        states = {name: of_block(state, block) for name, state in zip(self._names, self._states, strict=True)}
        return {"step": self._num_steps, **states}

    def load_step(self, step: float) -> None:
        self._num_steps.fill_(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
