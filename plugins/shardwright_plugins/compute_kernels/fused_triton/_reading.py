"""Lookups in Triton: the part that reads rows, whatever updates them.

Legend: W sources, S slots, K blocks, N ids, D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.modules.embedding_configs import dtype_of
from shardwright_plugins.compute_kernels.fused_triton import _kernels as kernels
from shardwright_plugins.compute_kernels.fused_triton._geometry import Geometry, Tiles

_INT32_KEYS = 1 << 31  # rows: fewer can be numbered by 32 bits, which are sorted in half the time
_KEYS_AT_ONCE = (
    128  # that each of a program's ids is compared with: with 32 of them, 32 a thread of four warps
)


@frozen(eq=False)
class Cells:
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
    sorted_ids: list[SortedIds] = field(factory=list, init=False)


@frozen(eq=False)
class SortedIds:
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


def cells_of(geometry: Geometry, bags: Bags) -> Cells:
    """Places of results and gradients, without a wait of the host for the device."""
    is_matrix = bags.lengths is not None and not bags.is_ragged
    places = geometry.places(bags.table, is_matrix=is_matrix)
    ends = None if bags.lengths is None else torch.cumsum(bags.lengths, 0, dtype=torch.int64)
    return Cells(bags, ends, places.results, places.gradients, places.cell_of_bag, places.num_results)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one that has the blocks."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class TritonReading(Lookup):
    """The weights of all blocks in one tensor, read by the launches of :mod:`._kernels`.

    Args:
        blocks: blocks of one element type and optimizer.
        device: device of the weights.
        is_whole: gradients are those of whole rows, of which a block may have some columns.
        tiles: sizes of programs; by default those for the device.
        num_spare: elements of the weights after those of the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[BlockSpec],
        *,
        device: torch.device,
        is_whole: bool,
        tiles: Tiles | None = None,
        num_spare: int = 0,
    ) -> None:
        self.blocks, self.device = blocks, device
        self.geometry = Geometry(blocks, device, row_wise=is_whole)
        self.tiles = tiles or Tiles.of(device, self.geometry.num_columns)
        dtype = dtype_of(blocks[0].table.data_type)
        self.weights = torch.zeros(self.geometry.num_elements + num_spare, dtype=dtype, device=device)
        self._key_type = torch.int32 if self.geometry.num_rows < _INT32_KEYS else torch.int64
        self.warps = {} if device.type == "cpu" else {"num_warps": self.tiles.warps}

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        cells = cells_of(self.geometry, bags)
        out = torch.empty(cells.num_results, dtype=torch.float32, device=self.device)
        geometry, tiles = self.geometry, self.tiles
        with on_device(self.device):
            kernels.launch(
                kernels.look_up, bags.num_bags, tiles.items,
                self.weights, geometry.slots, bags.num_slots, cells.results, cells.cell_of_bag, bags.ids, bags.weights,
                cells.ends, bags.lengths, out, bags.num_bags, IS_SEQUENCE=bags.lengths is None,
                IS_WEIGHTED=bags.weights is not None, ALIGNED=geometry.aligned, ITEMS=tiles.items,
                UNROLL=1 if bags.lengths is None else tiles.unroll, COLUMNS=geometry.num_columns, **self.warps,
            )  # fmt: skip
        return out, cells if training else None

    def prepare(self, bags: Bags) -> Any:
        return cells_of(self.geometry, bags)

    def weight_gradients(self, saved: Any, gradient: Tensor) -> Tensor:
        """Gradients of the weights of ids, before the rows are updated.

        Args:
            saved: state from :meth:`forward` in training.
            gradient: float32, flat, in the order of its result.

        Returns:
            ``[N]`` float32.
        """
        ids, geometry, tiles = self.sorted_ids(saved), self.geometry, self.tiles
        out = torch.empty(saved.bags.ids.numel(), dtype=torch.float32, device=self.device)
        with on_device(self.device):
            kernels.launch(
                kernels.weight_gradients, out.numel(), tiles.items, self.weights, geometry.blocks, ids.unsorted,
                ids.places, ids.blocks, gradient.contiguous(), out, out.numel(), ALIGNED=geometry.aligned,
                ITEMS=tiles.items, COLUMNS=geometry.num_columns, **self.warps,
            )  # fmt: skip
        return out

    def anticipate(self, saved: Any) -> None:
        self.sorted_ids(saved)

    def sorted_ids(self, cells: Cells) -> SortedIds:
        """The ids sorted by key; made once a batch."""
        if not cells.sorted_ids:
            cells.sorted_ids.append(self._sort(cells))
        return cells.sorted_ids[0]

    def _sort(self, cells: Cells) -> SortedIds:
        bags, geometry, tiles = cells.bags, self.geometry, self.tiles
        keys = torch.empty(bags.ids.numel(), dtype=self._key_type, device=self.device)
        places = torch.empty_like(keys, dtype=torch.int64)
        blocks = torch.empty_like(keys, dtype=torch.int32)
        with on_device(self.device):
            kernels.launch(
                kernels.list_ids, bags.num_bags, tiles.bags, geometry.slots, bags.num_slots, cells.gradients,
                cells.cell_of_bag, bags.ids, cells.ends, bags.lengths, keys, places, blocks, bags.num_bags,
                IS_SEQUENCE=bags.lengths is None, ITEMS=tiles.bags, UNROLL=1 if bags.lengths is None else tiles.unroll,
            )  # fmt: skip
        in_order, order = self._in_order(keys)
        return SortedIds(in_order, order, keys, places, blocks)

    def _in_order(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The keys sorted, and the place that each had.

        Stable: gradients of a row are added in the order of the batch, so equal batches give equal bits.
        """
        tiles, num_ids = self.tiles, keys.numel()
        if num_ids > tiles.few:
            in_order, order = torch.sort(keys, stable=True)
            return in_order, order
        in_order, order = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
        with on_device(self.device):
            kernels.launch(
                kernels.sort_few, num_ids, tiles.bags, keys, in_order, order, num_ids, ITEMS=tiles.bags,
                OTHERS=_KEYS_AT_ONCE,
            )  # fmt: skip
        return in_order, order

    def weight(self, block: int) -> Tensor:
        return self.geometry.elements_of(self.weights, block)
