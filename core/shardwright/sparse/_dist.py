"""Tensors of a batch as ranks exchange them, under TorchRec's names. Sharded modules do not use them.

Legend: F keys, W ranks. A piece is what one rank sent of one key; pieces arrive rank by rank, then key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError
from shardwright.sparse import _ops

_OWNER = "KeyedJaggedTensor.dist_init"


def sums_of_runs(numbers: Sequence[int], key_splits: Sequence[int]) -> list[int]:
    """Sum the numbers of the keys of each split."""
    bounds = [0, *accumulate(key_splits)]
    return [sum(numbers[start:stop]) for start, stop in pairwise(bounds)]


@frozen(eq=False)
class Received:
    """Tensors that ranks sent, sorted by key.

    Args:
        lengths: Lengths of all bags, key by key, then rank by rank.
        values: `[V]`, likewise.
        weights: `[V]` or None.
        strides: Batch size of each key and rank, `[F, W]`.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    strides: list[list[int]]


def received(
    num_keys: int,
    tensors: Sequence[Tensor],
    *,
    has_strides: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: Sequence[int] | None,
) -> Received:
    """Sort the tensors that ranks sent by key.

    Args:
        num_keys: F.
        tensors: Lengths, values, strides if each key has its own, and weights if there are any.
        has_strides: Each key has its own batch size.
        num_workers: W.
        recat: The arriving piece that stands at each place of the result, `[F * W]`; derived if None.
        stride_per_rank: Batch size of each rank, where keys have none of their own.

    Raises:
        InvalidInputError: Tensors or sizes are missing or do not fit; the text gives the numbers.
    """
    wanted = 2 + has_strides
    if not wanted <= len(tensors) <= wanted + 1:
        names = "lengths, values and strides" if has_strides else "lengths and values"
        raise InvalidInputError(f"{_OWNER} takes {names}, and weights if any; got {len(tensors)} tensors.")
    lengths, values = tensors[:2]
    weights = tensors[wanted] if len(tensors) > wanted else None
    sizes = _sizes(num_keys, num_workers, tensors[2] if has_strides else None, stride_per_rank)
    if sum(sizes) != lengths.numel():
        raise InvalidInputError(
            f"{_OWNER}: got {lengths.numel()} lengths, but the batch sizes of {num_workers} ranks and {num_keys} keys "
            f"need {sum(sizes)}."
        )
    order = _order(num_keys, num_workers) if recat is None else recat.tolist()
    counts = [int(own.sum()) for own in lengths.split(sizes)]
    sorted_values, sorted_weights = _ops.permute_values(order, values, weights, counts)
    strides = [[sizes[place] for place in own] for own in _chunks(order, num_workers)]
    return Received(_ops.permute_runs(lengths, order, sizes), sorted_values, sorted_weights, strides)


def _sizes(
    num_keys: int, num_workers: int, strides: Tensor | None, stride_per_rank: Sequence[int] | None
) -> list[int]:
    """Batch size of each arriving piece: `[W * F]`."""
    if strides is not None:
        return [int(size) for size in strides.tolist()]
    if stride_per_rank is None or len(stride_per_rank) != num_workers:
        raise InvalidInputError(
            f"{_OWNER}: stride_per_rank must have a batch size for each of {num_workers} ranks, got {stride_per_rank}."
        )
    return [int(size) for size in np.repeat(stride_per_rank, num_keys)]


def _order(num_keys: int, num_workers: int) -> list[int]:
    """The arriving piece at each place, key by key, then rank by rank: `[F * W]`."""
    order: list[int] = torch.arange(num_keys * num_workers).view(num_workers, num_keys).t().flatten().tolist()
    return order


def _chunks(order: Sequence[int], size: int) -> list[Any]:
    return [order[start : start + size] for start in range(0, len(order), size)]
