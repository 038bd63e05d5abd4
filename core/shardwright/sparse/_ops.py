"""The jagged primitives, each with a path over FBGEMM's operators and one in plain torch that gives the same.

Legend: F keys, B bags of a key, N bags in all, V values in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from shardwright import _fbgemm

# What FBGEMM 1.8 pads on every device.
_FBGEMM_PADS = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)

_INT32_MAX = torch.iinfo(torch.int32).max

# On CPUs FBGEMM permutes small batches faster (less overhead), torch.cat large ones (it copies whole runs).
# Measured over 24 and 200 keys: 48 against 16 us at 3 thousand values, 0.16 against 0.29 ms at 250 thousand.
_CPU_VALUES_FOR_CAT = 65_536


def offsets_from_lengths(lengths: Tensor, num_values: int) -> Tensor:
    """Start of each bag, and end of the last one.

    Args:
        lengths: `[N]` or, to start anew in every row, `[F, B]`.
        num_values: Sum of the lengths. Beyond the range of int32, offsets are int64.

    Returns:
        `[N + 1]` or `[F, B + 1]`, of the dtype of the lengths; int64 in `torch.export`.
    """
    # A program that is exported cannot branch on a number of values that it reads from its input.
    if torch.compiler.is_exporting() or num_values > _INT32_MAX:
        lengths = lengths.long()
    if _fbgemm.serves("asynchronous_complete_cumsum", lengths.device.type):
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    # Nothing is written into a view: in `torch.export` that would fix whether there is one bag.
    return functional.pad(torch.cumsum(lengths, dim=-1, dtype=lengths.dtype), (1, 0))


def permute_keys(
    order: Sequence[int],
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    length_per_key: Sequence[int],
    order_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put the keys of a batch in another order; leaving keys out and repeating them is allowed.

    Args:
        order: The old position of each new key, `F'` of them.
        lengths: `[F, B]`.
        values: `[V]`, keys one after the other.
        weights: `[V]` or None. Gradients flow through them.
        length_per_key: How many values each old key has, `F` of them.
        order_tensor: `order` as an int32 tensor on the device of the values, which spares copying it there.

    Returns:
        lengths `[F', B]`, values, weights.
    """
    if not order:
        return lengths[:0], values[:0], None if weights is None else weights[:0]
    num_values = sum(length_per_key[i] for i in order)
    small = not values.is_cpu or num_values < _CPU_VALUES_FOR_CAT
    if small and _fbgemm.serves("permute_2D_sparse_data", values.device.type):
        if order_tensor is None:
            order_tensor = torch.tensor(order, dtype=torch.int32).to(values.device, non_blocking=True)
        return torch.ops.fbgemm.permute_2D_sparse_data(order_tensor, lengths, values, weights, num_values)
    index = torch.tensor(order).to(lengths.device) if order_tensor is None else order_tensor
    return (
        lengths.index_select(0, index),
        permute_runs(values, order, length_per_key),
        None if weights is None else permute_runs(weights, order, length_per_key),
    )


def padded_dense(values: Tensor, offsets: Tensor, width: int, padding_value: float) -> Tensor:
    """Lay bags out as rows of equal width: shorter ones are padded, of longer ones the first values are kept.

    Args:
        values: `[V, ...]`.
        offsets: `[B + 1]`.
        width: Columns of the result.
        padding_value: What stands where a bag has no value.

    Returns:
        `[B, width, ...]`.
    """
    if _pads_with_fbgemm(values):
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [width], padding_value)
    num_bags, inner = offsets.numel() - 1, values.shape[1:]
    if torch.compiler.is_exporting():
        # A program cannot branch on there being no value: one more makes sure that there is one to select.
        values = torch.cat([values, values.new_zeros(1, *inner)])
    elif values.numel() == 0:
        return values.new_full((num_bags, width, *inner), padding_value)
    column = torch.arange(width, device=values.device)
    position = offsets[:-1, None] + column
    present = (position < offsets[1:, None]).reshape(num_bags, width, *[1] * len(inner))
    rows = values[position.clamp(max=values.shape[0] - 1)]
    return torch.where(present, rows, torch.tensor(padding_value, dtype=values.dtype, device=values.device))


def merge_adjacent(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join spans that continue one another, so that they are copied at once.

    Args:
        spans: `(source, start, length)` in the order wanted.

    Returns:
        The same elements in the same order, in as few spans as possible.
    """
    merged: list[tuple[int, int, int]] = []
    for source, start, length in spans:
        if merged and merged[-1][0] == source and merged[-1][1] + merged[-1][2] == start:
            merged[-1] = (source, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((source, start, length))
    return merged


def permute_runs(values: Tensor, order: Sequence[int], length_per_key: Sequence[int]) -> Tensor:
    """Put the runs of a vector in another order.

    Args:
        values: `[V]`, one run after the other.
        order: The old position of each new run.
        length_per_key: The length of each old run.
    """
    if not order:
        return values[:0]
    starts = [0, *accumulate(length_per_key)]
    spans = merge_adjacent([(0, starts[i], length_per_key[i]) for i in order])
    return torch.cat([values.narrow(0, start, length) for _, start, length in spans])


def _pads_with_fbgemm(values: Tensor) -> bool:
    # The operator itself only knows how to differentiate; its forward is what has a kernel for a device. That is for
    # vectors and matrices, and not for all dtypes nor for rows of no columns.
    return (
        _fbgemm.serves("jagged_to_padded_dense_forward", values.device.type)
        and values.dim() <= 2
        and values.dtype in _FBGEMM_PADS
        and values.numel() > 0
    )
