"""Bags as rows with their gradients, and such rows as bags, in plain torch.

Legend: S slots, D gradient columns, U rows touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwright.runtime.buffers import joined
from shardwright.runtime.lookup import Bags, BlockSpec
from shardwright.runtime.row_gradients import row_gradients


def slots_of(blocks: Sequence[BlockSpec]) -> list[range]:
    """The slots of each block."""
    ranges, start = [], 0
    for spec in blocks:
        ranges.append(range(start, start + spec.num_slots))
        start += spec.num_slots
    return ranges


def bags_of_slots(bags: Bags, num_ids: Sequence[int], slots: Sequence[int]) -> Bags:
    """The bags of some slots.

    Args:
        bags: of one source, of all slots.
        num_ids: ids of each slot.
        slots: which.
    """
    if len(slots) == bags.num_slots:
        return bags
    counts = bags.counts[0]

    def of_slots(values: Tensor | None, sizes: Sequence[int]) -> Tensor | None:
        if values is None:
            return None
        pieces = values.split(list(sizes))
        return joined([pieces[slot] for slot in slots])

    ids = of_slots(bags.ids, num_ids)
    assert ids is not None  # bags have ids
    return Bags(
        ids=ids,
        lengths=of_slots(bags.lengths, counts),
        weights=of_slots(bags.weights, num_ids),
        counts=(tuple(counts[slot] for slot in slots),),
    )


def touched_rows(
    bags: Bags, num_ids: Sequence[int], gradients: Sequence[Tensor], slots: range
) -> tuple[Tensor, Tensor]:
    """The rows of one block that this rank touched, with their gradients.

    Args:
        bags: this rank's bags of the whole group.
        num_ids: ids of each slot.
        gradients: the gradient of each slot's bags.
        slots: the block's.
    """
    own = bags_of_slots(bags, num_ids, slots)
    return row_gradients(own, torch.cat([gradients[slot] for slot in slots]))


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
