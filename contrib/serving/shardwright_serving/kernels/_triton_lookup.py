"""Lookup of the ``quant_triton`` kernel.

Legend: S slots, D columns of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright import Bags, BlockSpec
from shardwright_plugins.kernel_parts.by_triton import (
    Geometry,
    Tiles,
    cells_of,
    launch,
    on_device,
    power_of_2,
    sent_to,
    starts_of,
)
from shardwright_serving.kernels import _triton_kernels as kernels
from shardwright_serving.kernels._lookup import QuantizedLookup, as_rows
from shardwright_serving.kernels.quant_triton import WORD, row_words
from shardwright_serving.rows.formats import bits_of, has_header

_MAX_ALIGNED = 16  # words or elements: more tells Triton's compiler nothing


class QuantTritonLookup(QuantizedLookup):
    """The rows of all blocks in one tensor, row after row in whole words, read by one launch.

    Args:
        blocks: blocks of one precision.
        device: device of the rows.
        tiles: sizes of programs; by default those for the device.
    """

    def __init__(
        self, blocks: Sequence[BlockSpec], *, device: torch.device, tiles: Tiles | None = None
    ) -> None:
        self.blocks, self.device = blocks, device
        self.geometry = Geometry(blocks, device, row_wise=False)
        self._precision = blocks[0].request.data_type
        self._columns = max(self.geometry.num_columns, 8 // min(8, bits_of(self._precision)))
        self.tiles = tiles or Tiles.of(device, self._columns)
        self.warps = {} if device.type == "cpu" else {"num_warps": self.tiles.warps}
        sizes = np.array([self._sizes(spec) for spec in blocks], dtype=np.int64)
        rows, words = sizes[:, 0], sizes[:, 2]
        per_slot = np.repeat(np.arange(len(blocks)), [spec.num_slots for spec in blocks])
        slots = np.concatenate([starts_of(rows * words)[:, None], sizes[:, 1:]], axis=1)
        self._slots = sent_to(device, slots[per_slot])
        self._aligned = {
            "ALIGNED": _alignment(words),
            "ALIGNED_ELEMENTS": _alignment(sizes[:, 3]),
            "ALIGNED_OUT": self.geometry.aligned,
        }
        self._words = torch.zeros(int((rows * words).sum()), dtype=torch.int32, device=device)
        elements = torch.uint8 if has_header(self._precision) else torch.float16
        self._elements = self._words.view(elements)
        pieces = self._words.view(torch.uint8).split((rows * words * WORD).tolist())
        self._weights = [
            as_rows(piece.view(spec.block.num_rows, -1), spec)
            for piece, spec in zip(pieces, blocks, strict=True)
        ]

    def _sizes(self, spec: BlockSpec) -> tuple[int, int, int, int]:
        """Rows of a block, columns, words of a row, and elements of a row: bytes, or float16 numbers."""
        columns = spec.block.num_columns
        per_element = max(1, 8 // bits_of(self._precision))
        words = row_words(self._precision, columns)
        return spec.block.num_rows, columns, words, -(-columns // per_element)

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        cells, tiles = cells_of(self.geometry, bags), self.tiles
        out = torch.empty(cells.num_results, dtype=torch.float32, device=self.device)
        with on_device(self.device):
            launch(
                kernels.look_up_rows, bags.num_bags, tiles.items,
                self._words, self._elements, self._slots, bags.num_slots, cells.results, cells.cell_of_bag, bags.ids,
                bags.weights, cells.ends, bags.lengths, out, bags.num_bags, IS_SEQUENCE=bags.lengths is None,
                IS_WEIGHTED=bags.weights is not None, BITS=bits_of(self._precision),
                IS_FLOAT=self._precision in ("FP8", "FP16"), **self._aligned,
                ITEMS=tiles.items, UNROLL=1 if bags.lengths is None else tiles.unroll, COLUMNS=self._columns,
                **self.warps,
            )  # fmt: skip
        return out, None

    def weight(self, block: int) -> Tensor:
        return self._weights[block]


def _alignment(sizes: NDArray[np.int64]) -> int:
    """The greatest power of 2 that divides all sizes."""
    return power_of_2(gcd(_MAX_ALIGNED, *sizes.tolist()))
