"""The gradient of each row that a batch looked up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.contracts.lookup import Bags


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
