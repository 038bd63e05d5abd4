"""The gradient of each row that a batch looked up, and updates of rows by their gradients.

Legend: S slots, U rows of a block that have a gradient, D columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.step.segments import starts_of


def row_gradients(bags: Bags, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each distinct row.

    A row's gradient is the (weighted) sum of the gradients of the bags it was in. So this is a bag lookup: its bags are
    the rows, and its ids the former bags.

    Args:
        bags: bags that were looked up; their ids are rows of one tensor.
        gradient: gradients of the bags, ``[bags, D]`` float32.

    Returns:
        ``[U]`` rows in rising order and ``[U, D]`` gradients.
    """
    if bags.ids.numel() == 0:
        return bags.ids, gradient.new_zeros(0, gradient.shape[1])
    # Ids sorted stably: those of one row stand together, in the order of the batch, so that sums are reproducible.
    bag_of_id = bags.per_id(torch.arange(bags.num_bags, device=bags.ids.device))
    sorted_ids, order = torch.sort(bags.ids, stable=True)
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    weights = None if bags.weights is None else bags.weights[order]
    return rows, bag_sums(bag_of_id[order], gradient, counts, weights)


def bag_sums(ids: Tensor, rows: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the (weighted) sum of the rows of each bag, ``[bags, D]``.

    Args:
        ids: row numbers, bag after bag, ``[N]``.
        rows: rows to sum, ``[R, D]``.
        lengths: number of ids of each bag, ``[bags]``.
        weights: weight of each id, ``[N]``, or ``None``.
    """
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return F.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def rows_as_bags(
    rows_of: Sequence[tuple[Tensor, Tensor]],
    dims: Ints,
    first_slots: Ints,
    *,
    is_pooled: bool,
    is_weighted: bool,
    is_matrix: bool,
    is_ragged: bool = False,
    scale: float = 1.0,
) -> tuple[Bags, Tensor]:
    """Express updates of rows by their gradients as a lookup: bags of one id each, in the first slot of each block.

    Pooled lookups want the same number of bags in every slot, so shorter slots are filled up with empty bags, unless
    bags are ragged.

    Args:
        rows_of: rows ``[U]`` of each block, which may repeat, and their gradients ``[U, D]``.
        dims: gradient columns of each slot, ``[S]``.
        first_slots: first slot of each block.
        is_pooled: the lookup has a result for each bag.
        is_weighted: its ids have weights.
        is_matrix: its gradients stand as ``[bags, columns of all slots]``; else slot after slot.
        is_ragged: slots may have different numbers of bags.
        scale: factor of the gradients.

    Returns:
        The bags of one source, and their gradient, flat.
    """
    used = np.zeros(len(dims), dtype=np.int64)
    used[first_slots] = [len(rows) for rows, _ in rows_of]
    counts = np.full_like(used, used.max()) if is_pooled and not is_ragged else used
    ids = torch.cat([rows for rows, _ in rows_of])
    gradient = torch.zeros(int((counts * dims).sum()), dtype=torch.float32, device=ids.device)
    lengths = torch.zeros(int(counts.sum()), dtype=torch.int32, device=ids.device)
    starts, columns, values = (starts_of(own).tolist() for own in (counts, dims, counts * dims))
    matrix = gradient.view(int(counts[0]), -1) if is_matrix and len(gradient) else None
    for slot, (_, own) in zip(first_slots.tolist(), rows_of, strict=True):
        count, dim = own.shape
        lengths[starts[slot] : starts[slot] + count] = 1
        if not count:
            continue
        if matrix is not None:
            room = matrix[:count, columns[slot] : columns[slot] + dim]
        else:
            room = gradient[values[slot] : values[slot] + count * dim].view(count, dim)
        torch.mul(own, scale, out=room)
    # The weights of ids are in the rows' gradients already.
    weights = torch.ones(len(ids), dtype=torch.float32, device=ids.device) if is_weighted else None
    return Bags(ids, lengths if is_pooled else None, weights, counts[None], is_ragged), gradient
