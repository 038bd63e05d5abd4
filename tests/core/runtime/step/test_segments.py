"""Pieces of flat tensors, moved together, against loops over the pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.runtime.step import segments

EXAMPLES = settings(max_examples=150, deadline=None)
SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 5, 300]), max_size=6)


def ints(values):
    return np.array(values, dtype=np.int64)


@EXAMPLES
@given(SIZES, st.randoms(use_true_random=False), st.booleans())
def test_take_is_the_pieces_one_after_the_other(sizes, random, in_rows):
    values = torch.arange(1000.0)
    values = values.view(500, 2) if in_rows else values
    starts = [random.randrange(len(values) - size) for size in sizes]
    expected = [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    taken = segments.take(values, ints(starts), ints(sizes))
    assert torch.equal(taken, torch.cat([values[:0], *expected]))


def test_take_of_pieces_in_a_row_is_no_copy():
    values = torch.arange(20)
    taken = segments.take(values, ints([3, 5, 5]), ints([2, 0, 6]))
    assert taken.data_ptr() == values[3:].data_ptr()
    assert taken.tolist() == list(range(3, 11))


@EXAMPLES
@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_interleave_puts_the_pieces_for_a_peer_together_and_deal_takes_them_apart(num_parts, peers, random):
    sizes = ints([[random.choice([0, 1, 3, 200]) for _ in range(peers)] for _ in range(num_parts)])
    parts = [torch.rand(int(own.sum())) for own in sizes]
    pieces = [part.split(own.tolist()) for part, own in zip(parts, sizes, strict=True)]
    expected = [own[peer] for peer in range(peers) for own in pieces]
    together = segments.interleave(parts, sizes)
    assert torch.equal(together, torch.cat(expected))
    for part, dealt in zip(parts, segments.deal(together, sizes), strict=True):
        assert torch.equal(part, dealt)


@pytest.mark.parametrize("num_keys", [1, 256, 257, 300, 1 << 16, (1 << 16) + 1, 1 << 20, (1 << 32) + 1])
def test_order_of_is_stable_whatever_the_number_of_keys(num_keys):
    generator = torch.Generator().manual_seed(num_keys % 97)
    keys = torch.randint(0, num_keys, (2000,), generator=generator)
    keys[::3] = num_keys - 1
    assert torch.equal(segments.order_of(keys, num_keys), torch.argsort(keys, stable=True))


@EXAMPLES
@given(SIZES)
def test_sums_of_runs_that_may_be_empty(sizes):
    values = np.arange(sum(sizes))
    bounds = np.concatenate([[0], np.cumsum(ints(sizes))])
    expected = [values[start:stop].sum() for start, stop in pairwise(bounds)]
    assert segments.sums(values, bounds).tolist() == expected
