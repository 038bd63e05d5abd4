"""Rows of several blocks in one tensor, looked up and differentiated with plain torch.

Legend: S slots, B samples of all sources, N ids, U distinct rows among them, R rows of all blocks, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from attrs import evolve
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.modules.embedding_configs import dtype_of
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.backward.row_gradients import bag_sums


class RowNumbers:
    """The rows of a group's blocks, counted through all of them."""

    def __init__(self, blocks: Sequence[BlockSpec], device: torch.device) -> None:
        stops = list(accumulate(spec.block.num_rows for spec in blocks))
        self.total = stops[-1]
        self.spans = [(stop - spec.block.num_rows, stop) for spec, stop in zip(blocks, stops, strict=True)]
        bases = [
            start for spec, (start, _) in zip(blocks, self.spans, strict=True) for _ in range(spec.num_slots)
        ]
        self._slot_bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._starts = torch.tensor([start for start, _ in self.spans], dtype=torch.int64, device=device)

    def zeros(self, spec: BlockSpec, device: torch.device) -> Tensor:
        """``[R, D]``: the rows of all blocks as one tensor, so that one call serves all of them.

        Args:
            spec: any block of the group.
            device: device of the tensor.
        """
        dtype = dtype_of(spec.table.data_type)
        return torch.zeros(self.total, spec.block.num_columns, dtype=dtype, device=device)

    def of(self, values: Tensor, block: int) -> Tensor:
        """``[rows, D]``: one block's part of values of all rows, shared storage."""
        start, stop = self.spans[block]
        return values[start:stop]

    def in_blocks(self, rows: Tensor) -> Tensor:
        """The numbers that rows have in their own blocks."""
        return rows - self._starts.index_select(0, torch.bucketize(rows, self._starts, right=True) - 1)

    def flatten(self, bags: Bags) -> Bags:
        """The bags with ids that count rows of all blocks."""
        if len(self.spans) == 1:
            return bags
        counts = sent_to(bags.ids.device, bags.table.reshape(-1))
        bases = self._slot_bases.repeat(bags.num_sources).repeat_interleave(counts, output_size=bags.num_bags)
        return evolve(bags, ids=bags.ids + bags.per_id(bases))


def sums_of_rows(rows: Tensor, bags: Bags) -> Tensor:
    """``[bags, D]`` float32: the (weighted) sum of each bag's rows, its ids counting those of one tensor ``[R, D]``."""
    ids = bags.ids
    if bags.lengths is None:
        return rows.index_select(0, ids).float()
    if rows.dtype is not torch.float32:  # sums of halves are kept in float32, as FBGEMM does
        rows, ids = rows.index_select(0, ids).float(), torch.arange(ids.numel(), device=ids.device)
    return bag_sums(ids, rows, bags.lengths, bags.weights)
