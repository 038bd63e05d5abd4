"""Lookup of the ``quant_numba`` kernel.

Legend: S slots, K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright import Bags, BlockSpec
from shardwright_plugins.kernel_parts.by_numba import Cells, Geometry, Share, in_threads, shares_of
from shardwright_serving.kernels import _numba_loops as loops
from shardwright_serving.kernels._lookup import QuantizedLookup, row_bytes_of, stored_zeros
from shardwright_serving.kernels._numba_rows import KINDS

_SMALL = 400_000
"""Elements that one thread reads before a second is woken, as in ``fused_numba``: twice its share."""


class QuantNumbaLookup(QuantizedLookup):
    """Stored rows wherever they are in memory; loops dequantize a row in registers as they add it."""

    checks_ids = True

    def __init__(self, blocks: Sequence[BlockSpec]) -> None:
        self.blocks, self._geometry = blocks, Geometry(blocks, row_wise=False)
        self._stored = [stored_zeros(spec, "cpu") for spec in blocks]
        per_block = [
            (
                0,
                row_bytes_of(spec),
                spec.block.num_columns,
                spec.block.num_rows,
                KINDS[spec.request.data_type],
            )
            for spec in blocks
        ]
        self._block_of_slot = np.repeat(np.arange(len(blocks)), [spec.num_slots for spec in blocks])
        self._slots = np.array(per_block, dtype=np.int64)[self._block_of_slot]
        self._columns, self._widest = int(self._slots[:, 2].sum()), int(self._slots[:, 2].max())
        self._find()

    def _find(self) -> None:
        """Note where the blocks are in memory."""
        addresses = np.array([stored.data_ptr() for stored in self._stored], dtype=np.int64)
        self._slots[:, 0] = addresses[self._block_of_slot]

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        small = bags.ids.numel() * self._widest < _SMALL or torch.get_num_threads() == 1
        if small and bags.num_sources == 1 and bags.lengths is not None and not bags.is_ragged:
            return self._one_batch(bags, bags.lengths), None
        geometry, slots, cells = self._geometry, self._slots, Cells.of(bags)
        places, size = geometry.places(cells.counts, is_matrix=cells.is_matrix)
        result = self.room(size)
        out = result.data_ptr()

        def look_up(share: Share) -> None:
            loops.look_up(
                slots,
                share,
                cells.ids,
                cells.id_weights,
                cells.lengths,
                cells.bags,
                cells.first_id,
                places,
                out,
            )

        in_threads(look_up, shares_of(lambda: geometry.slot_work(cells), len(slots)))
        return result, None

    def _one_batch(self, bags: Bags, lengths: Tensor) -> Tensor:
        """Sums of one source's bags by one thread."""
        size, ids, weights = len(lengths) // len(self._slots), bags.ids.contiguous(), bags.weights
        result, lengths = self.room(size * self._columns), lengths.contiguous()
        weights = None if weights is None else weights.contiguous()
        loops.look_up_batch(
            self._slots, ids.data_ptr(), len(ids), 0 if weights is None else weights.data_ptr(), lengths.data_ptr(),
            size, result.data_ptr(), self._columns,
        )  # fmt: skip
        return result

    def weight(self, block: int) -> Tensor:
        return self._stored[block]

    def adopt(self, block: int, weight: Tensor) -> None:
        self._stored[block] = weight.contiguous()
        self._find()
