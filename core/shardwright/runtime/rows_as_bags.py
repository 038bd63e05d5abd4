"""Bags as rows with their gradients, and such rows as bags, in plain torch.

Legend: S slots, D gradient columns, U rows touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwright.runtime.lookup import Bags, BlockSpec
from shardwright.runtime.row_gradients import row_gradients


def slots_of(blocks: Sequence[BlockSpec]) -> list[range]:
    """The slots of each block."""
    ranges, start = [], 0
    for spec in blocks:
        ranges.append(range(start, start + spec.num_slots))
        start += spec.num_slots
    return ranges


def touched_rows(bags: Bags, gradients: Sequence[Tensor], slots: range) -> tuple[Tensor, Tensor]:
    """The rows of one block that this rank touched, with their gradients.

    Args:
        bags: this rank's bags of the whole group.
        gradients: the gradient of each slot's bags.
        slots: the block's.
    """
    counts = bags.counts[0]
    own = slice(sum(counts[: slots.start]), sum(counts[: slots.stop]))
    ids = own
    if bags.lengths is not None:
        ends = [0, *torch.cumsum(bags.lengths, 0).tolist()]
        ids = slice(ends[own.start], ends[own.stop])
    block_bags = Bags(
        ids=bags.ids[ids],
        lengths=None if bags.lengths is None else bags.lengths[own],
        weights=None if bags.weights is None else bags.weights[ids],
        counts=(tuple(counts[slot] for slot in slots),),
    )
    return row_gradients(block_bags, torch.cat([gradients[slot] for slot in slots]))


def rows_as_bags(
    blocks: Sequence[BlockSpec], rows_of: Sequence[tuple[Tensor, Tensor]], *, is_pooled: bool
) -> tuple[Bags, list[Tensor]]:
    """Rows and their gradients as bags of one id each, in the first slot of each block.

    Pooled lookups want as many bags in every slot: shorter ones are filled up with empty bags.

    Args:
        blocks: of the kernel group.
        rows_of: for each block ``[U]`` rows and ``[U, D]`` gradients; rows may repeat.
        is_pooled: whether the group's lookups are.

    Returns:
        Bags of one source, and the gradient of each slot's, ``[bags, D]``.
    """
    most = max(rows.numel() for rows, _ in rows_of)
    lengths: list[Tensor] = []
    pieces: list[Tensor] = []
    counts: list[int] = []
    for (rows, gradients), slots in zip(rows_of, slots_of(blocks), strict=True):
        for slot in slots:
            used = rows.numel() if slot == slots[0] else 0
            count = most if is_pooled else used
            length = torch.zeros(count, dtype=torch.int32, device=rows.device)
            length[:used] = 1
            gradient = gradients.new_zeros(count, gradients.shape[1])
            gradient[:used] = gradients[:used]
            lengths.append(length)
            pieces.append(gradient)
            counts.append(count)
    bags = Bags(
        ids=torch.cat([rows for rows, _ in rows_of]),
        lengths=torch.cat(lengths) if is_pooled else None,
        weights=None,
        counts=(tuple(counts),),
    )
    if blocks[0].request.is_weighted:  # the weights are in the rows' gradients already
        bags = evolve(bags, weights=torch.ones(bags.ids.numel(), dtype=torch.float32, device=bags.ids.device))
    return bags, pieces
