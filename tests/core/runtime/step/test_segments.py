"""Pieces of flat tensors, moved together, against loops over the pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.runtime.step import segments


def ints(values):
    return np.array(values, dtype=np.int64)


def test_take_of_pieces_in_a_row_is_no_copy():
    values = torch.arange(20)
    taken = segments.take(values, ints([3, 5, 5]), ints([2, 0, 6]))
    assert taken.data_ptr() == values[3:].data_ptr()
    assert taken.tolist() == list(range(3, 11))


@pytest.mark.parametrize(
    "count", [6, 40]
)  # few pieces are copied one by one, of many short ones an index is made
@pytest.mark.parametrize("num_columns", [1, 2])
def test_take_is_the_pieces_one_after_the_other(count, num_columns):
    values = torch.arange(1000.0).view(-1, num_columns)
    starts = ints([37 * piece % 400 for piece in range(count)])
    sizes = ints([piece % 4 for piece in range(count)])
    pieces = [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert torch.equal(segments.take(values, starts, sizes), torch.cat(pieces))


@pytest.mark.parametrize("num_keys", [1, 256, 257, 300, 1 << 16, (1 << 16) + 1, 1 << 20, (1 << 32) + 1])
def test_order_of_is_stable_whatever_the_number_of_keys(num_keys):
    generator = torch.Generator().manual_seed(num_keys % 97)
    keys = torch.randint(0, num_keys, (2000,), generator=generator)
    keys[::3] = num_keys - 1
    assert torch.equal(segments.order_of(keys, num_keys), torch.argsort(keys, stable=True))
