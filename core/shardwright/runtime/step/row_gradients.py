"""The gradient of each row that a batch looked up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.contracts.lookup import Bags


def row_gradients(bags: Bags, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each distinct row.

    A row's gradient is the (weighted) sum of the gradients of the bags it was in: a bag lookup the other way round.

    Args:
        bags: what was looked up, ids counting rows of one tensor.
        gradient: ``[bags, D]`` float32.

    Returns:
        ``[U]`` rows in rising order and ``[U, D]`` gradients.
    """
    if bags.ids.numel() == 0:
        return bags.ids, gradient.new_zeros(0, gradient.shape[1])
    bag_of_id = bags.per_id(torch.arange(bags.num_bags, device=bags.ids.device))
    sorted_ids, order = torch.sort(bags.ids, stable=True)
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    weights = None if bags.weights is None else bags.weights[order]
    return rows, bag_sums(bag_of_id[order], gradient, counts, weights)


def bag_sums(ids: Tensor, rows: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """``[bags, D]``: the (weighted) sum of the rows of each bag.

    Args:
        ids: ``[N]`` rows, bag after bag.
        rows: ``[R, D]``.
        lengths: ``[bags]``, ids of each bag.
        weights: ``[N]``, or ``None``.
    """
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return F.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
