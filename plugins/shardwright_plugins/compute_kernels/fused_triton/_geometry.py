"""Places of blocks, slots, results and gradients, and the sizes of tiles.

Legend: W sources, S slots, K blocks, D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import gcd

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import BlockSpec
from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import sent_to, stream_key
from shardwright.runtime.step.segments import spread, starts_of

_MAX_ALIGNED = 16  # elements: more tells Triton's compiler nothing
_MAX_KNOWN = 16  # batch shapes whose places are kept on the device
_VALUES = 2048  # elements of a tile: 16 for each thread of four warps, as Triton's tutorials have it
_WARP = 32  # threads of a warp
_FEW = 2048  # ids: 26 tables of 64 bags have 1664; the square of more would take longer than the launches that it saves


@frozen
class Tiles:
    """Sizes of what one program of a launch works on; powers of 2.

    Args:
        items: bags, runs or windows.
        unroll: ids, or partial sums, that are read at once.
        window: sorted ids between which partial sums are made, so that a frequent id is no program's alone.
        bags: bags whose ids are listed, and ids that are sorted by counting.
        few: ids of a batch up to which they are sorted by counting, and are one window: an update is three launches.
        warps: warps of a program.
    """

    items: int
    unroll: int = 4
    window: int = 64
    bags: int = 32
    few: int = _FEW
    warps: int = 4

    def window_of(self, num_ids: int) -> int:
        """The window of a batch: all ids, if they are few."""
        return max(self.window, self.few) if num_ids <= self.few else self.window

    @classmethod
    def of(cls, device: torch.device, num_columns: int) -> Tiles:
        """Sizes for rows of so many columns; larger ones where each program is interpreted, at a cost of its own."""
        if device.type == "cpu":
            return cls(items=64, unroll=4, bags=256)
        unroll = max(1, min(4, _VALUES // num_columns))
        items = max(1, _VALUES // (num_columns * unroll))
        warps = max(4, min(16, num_columns * unroll * items // (16 * _WARP)))
        return cls(items=items, unroll=unroll, warps=warps)


@frozen(eq=False)
class Places:
    """Places of the results and gradients of a batch, on the device.

    Args:
        results: table of cells for results, ``[W * S, 3]``, see :mod:`._kernels`.
        gradients: table of cells for gradients, likewise.
        cell_of_bag: cell of each bag, ``[bags]`` int32.
        num_results: elements of all results.
    """

    results: Tensor
    gradients: Tensor
    cell_of_bag: Tensor
    num_results: int


class Geometry:
    """Places of blocks and slots in flat memory, on the device from the beginning.

    Attributes:
        slots: ``[S, 4]``, see :mod:`._kernels`.
        blocks: ``[K, 5]``, likewise.
        num_elements: weights of all blocks.
        num_rows: rows of all blocks.
        num_columns: columns of the widest gradient, rounded up to a power of 2.
        aligned: number that divides each start of a row in memory, in elements.
    """

    def __init__(self, blocks: Sequence[BlockSpec], device: torch.device, *, row_wise: bool) -> None:
        self._device = device
        rows = np.array([spec.block.num_rows for spec in blocks], dtype=np.int64)
        dims = np.array([spec.block.num_columns for spec in blocks], dtype=np.int64)
        whole = [spec.table.embedding_dim if row_wise else spec.block.num_columns for spec in blocks]
        offsets = [spec.block.columns.start if row_wise else 0 for spec in blocks]
        bases, first_rows = starts_of(rows * dims), starts_of(rows)
        self.num_elements, self.num_rows = int((rows * dims).sum()), int(rows.sum())
        self.num_columns = 1 << (max(whole) - 1).bit_length()
        self.aligned = power_of_2(gcd(_MAX_ALIGNED, *dims.tolist(), *whole, *offsets))
        per_slot = np.repeat(np.arange(len(blocks)), [spec.num_slots for spec in blocks])
        slots = np.stack([bases, dims, first_rows, np.arange(len(blocks))], axis=1)[per_slot]
        self.slots = sent_to(device, slots)
        self.blocks = sent_to(device, np.stack([bases, dims, first_rows, whole, offsets], axis=1))
        self._dims = (dims[per_slot], np.array(whole, dtype=np.int64)[per_slot])
        self._spans = list(
            zip(first_rows.tolist(), rows.tolist(), bases.tolist(), dims.tolist(), strict=True)
        )
        self._known: dict[Hashable, Places] = {}

    def places(self, counts: Ints, *, is_matrix: bool) -> Places:
        """Places of results and gradients; those of a matrix are kept, as its counts are mostly the same each step.

        Args:
            counts: bags of each source and slot, ``[W, S]``.
            is_matrix: results are ``[B_w, width]`` of each source; else they stand slot after slot, ``[bags, D]``.
        """
        if not is_matrix:
            return self._places(counts, is_matrix)
        key = (stream_key(self._device), counts[:, 0].tobytes())  # a source has as many in each slot
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._places(counts, is_matrix)
        return self._known[key]

    def _places(self, counts: Ints, is_matrix: bool) -> Places:
        (results, num_results), (gradients, _) = (_cells(counts, dims, is_matrix) for dims in self._dims)
        num_cells, num_bags = counts.size, int(counts.sum())
        # One copy: the two tables, and the bags of each cell.
        both = sent_to(
            self._device, np.concatenate([results.reshape(-1), gradients.reshape(-1), counts.reshape(-1)])
        )
        numbers = torch.arange(num_cells, dtype=torch.int32, device=self._device)
        cell_of_bag = spread(numbers, both[6 * num_cells :], num_bags)
        return Places(both[: 3 * num_cells], both[3 * num_cells : 6 * num_cells], cell_of_bag, num_results)

    def rows_of(self, values: Tensor, block: int) -> Tensor:
        """``[rows, 1]``: a block's part of one value a row; shared storage."""
        first, rows, _, _ = self._spans[block]
        return values[first : first + rows].view(rows, 1)

    def elements_of(self, values: Tensor, block: int) -> Tensor:
        """``[rows, D]``: a block's part of one value an element; shared storage."""
        _, rows, base, dim = self._spans[block]
        return values[base : base + rows * dim].view(rows, dim)


def _cells(counts: Ints, dims: Ints, is_matrix: bool) -> tuple[Ints, int]:
    """First bag, start and stride of each cell, ``[W * S, 3]``, and the elements of all."""
    first_bags, sizes = starts_of(counts.reshape(-1)), counts * dims
    if is_matrix:
        totals = sizes.sum(1)
        starts = starts_of(totals)[:, None] + starts_of(dims)
        strides = np.full(counts.shape, dims.sum())
    else:
        starts, strides = starts_of(sizes.reshape(-1)), np.broadcast_to(dims, counts.shape)
    table = np.stack([first_bags, starts.reshape(-1), strides.reshape(-1)], axis=1)
    return table, int(sizes.sum())


def power_of_2(number: int) -> int:
    """The greatest power of 2 that divides a number."""
    return number & -number
