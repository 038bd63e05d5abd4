"""Columns and pieces that are moved, against loops over single ones."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import EXAMPLES

from shardwright import Collection, Columns, FeatureBatch, TableSpec
from shardwright.runtime.step import columns, segments
from shardwright.runtime.step.arrangement import PooledArrangement
from shardwright.runtime.step.columns import Move, Placement


def ints(values):
    return np.array(values, dtype=np.int64)


def as_columns(spans):
    return Columns(*(ints(column) for column in zip(*spans, strict=True)))


@EXAMPLES
@given(st.data(), st.integers(1, 9), st.integers(0, 3), st.sampled_from([0, columns._LARGE]))
def test_move_takes_pieces_that_share_columns(data, width, size, least):
    """Gradients of whole rows go to each rank that has a part of the columns."""
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, width - 1), st.integers(1, 9)), min_size=1, max_size=6)
    )
    spans = [(start, min(start + long, width)) for start, long in spans]
    matrix = sorted(data.draw(st.integers(0, 2)) for _ in spans)
    starts, stops = (ints(own) for own in zip(*spans, strict=True))
    move = Move(
        stops - starts, Placement.in_one(starts, width), Placement.in_a_row(stops - starts, ints(matrix), 3)
    )
    rows = torch.rand(size, width)
    expected = [
        torch.cat(
            [rows[:, start:stop] for (start, stop), at in zip(spans, matrix, strict=True) if at == number], 1
        )
        for number in sorted(set(matrix))
    ]
    with mock.patch.object(columns, "_LARGE", least):  # by slices, and by an index
        assert torch.equal(move(rows.view(-1), size), torch.cat([own.reshape(-1) for own in expected]))


def test_columns_that_stand_as_they_should_are_not_copied():
    tables = [TableSpec(f"t{index}", 9, dim, (f"f{index}",)) for index, dim in enumerate((64, 32, 4))]
    collection = Collection.of(tables)
    arrangement = PooledArrangement(collection, [as_columns([(0, 0, 64), (1, 0, 32), (2, 0, 4)])])
    batch = FeatureBatch(torch.ones(3, 7, dtype=torch.int32), torch.zeros(21), {}, ints([7] * 3))
    brought = torch.rand(7, 100)
    (output,) = arrangement.outputs([brought], batch)
    assert output.data_ptr() == brought.data_ptr()


def test_columns_are_put_in_order_and_added_up_from_where_they_arrive():
    tables = [TableSpec(f"t{index}", 9, dim, (f"f{index}",)) for index, dim in enumerate((8, 4, 6))]
    collection, size = Collection.of(tables), 5
    # Two matrices: columns of the outputs 2 and 0, then all of 1 and, once more, those of 2; beside them part of 0.
    placed = Placement.in_a_row(ints([6, 8, 4, 6]), ints([0, 0, 1, 1]), 2)
    arriving = attrs.evolve(as_columns([(2, 0, 6), (0, 0, 8), (1, 0, 4), (2, 0, 6)]), placed=placed)
    arrangement = PooledArrangement(collection, [arriving, as_columns([(0, 3, 5)])])
    batch = FeatureBatch(torch.ones(3, size, dtype=torch.int32), torch.zeros(3 * size), {}, ints([size] * 3))
    first, second, beside = (torch.rand(size, width) for width in (14, 10, 2))
    (output,) = arrangement.outputs([torch.cat([first.view(-1), second.view(-1)]), beside], batch)
    expected = torch.cat([first[:, 6:], second[:, :4], first[:, :6] + second[:, 4:]], 1)
    expected[:, 3:5] += beside
    assert torch.equal(output, expected)


class Emptied(dict):
    """What is known while another thread empties it."""

    def __setitem__(self, key, value):
        pass


def test_move_needs_nothing_that_another_thread_may_forget():
    pieces = Placement.in_one(ints([2, 0]), 4)
    move = Move(ints([2, 2]), pieces, Placement.in_one(ints([0, 2]), 4))
    move._known = Emptied()
    assert move(torch.arange(8.0), 2).tolist() == [2, 3, 0, 1, 6, 7, 4, 5]


def test_move_takes_pieces_side_by_side_as_one():
    widths = ints([64, 64, 64, 64])
    ranks = ints([0, 0, 1, 1])
    move = Move(widths, Placement.in_one(ints([0, 64, 128, 192]), 256), Placement.in_a_row(widths, ranks, 2))
    assert move.unit == 128
    rows = torch.rand(3, 256)
    assert torch.equal(
        move(rows.view(-1), 3), torch.cat([rows[:, :128].reshape(-1), rows[:, 128:].reshape(-1)])
    )


@pytest.mark.parametrize("num_keys", [1, 256, 257, 300, 1 << 16, (1 << 16) + 1, 1 << 20, (1 << 32) + 1])
def test_order_of_is_stable_whatever_the_number_of_keys(num_keys):
    generator = torch.Generator().manual_seed(num_keys % 97)
    keys = torch.randint(0, num_keys, (2000,), generator=generator)
    keys[::3] = num_keys - 1
    assert torch.equal(segments.order_of(keys, num_keys), torch.argsort(keys, stable=True))


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


@pytest.mark.parametrize(
    "bounds", [[0, 0, 3, 3, 5, 5], [0, 5], [0, 0], [0, 2, 2, 2]], ids=["mixed", "one", "none", "last"]
)
def test_sums_of_runs_some_of_them_empty_are_those_of_slices(bounds):
    values = ints([5, -7, 11, 13, 17, 19]).astype(np.int32)  # of which the last is in no run
    wanted = [values[start:stop].sum() for start, stop in pairwise(bounds)]
    assert segments.sums(values, ints(bounds)).tolist() == wanted


def test_run_or_places_of_neighbours_is_a_slice():
    values = ints([5, 7, 11, 13])
    assert segments.run_or_places(ints([1, 2, 3])) == slice(1, 4)
    assert values[segments.run_or_places(ints([]))].tolist() == []
    assert values[segments.run_or_places(ints([2, 1]))].tolist() == [11, 7]


def test_repeated_is_each_value_as_often_as_its_count_says():
    found = segments.repeated(ints([5, 7, 11]), ints([0, 3, 1]), torch.device("cpu"))
    assert found.tolist() == [7, 7, 7, 11]


@pytest.mark.parametrize("num_peers", [1, 2, 40])  # few pieces are copied one by one, many by an index
def test_interleaved_parts_stand_by_peer_and_are_dealt_again(num_peers):
    sizes = ints([[(3 * part + peer) % 5 for peer in range(num_peers)] for part in range(3)])
    parts = [100.0 * part + torch.arange(int(own.sum())) for part, own in enumerate(sizes)]
    pieces = zip(*(part.split(own.tolist()) for part, own in zip(parts, sizes, strict=True)), strict=True)
    merged = segments.Interleaving(sizes).of(parts)
    assert torch.equal(merged, torch.cat([piece for of_peer in pieces for piece in of_peer]))
    for found, part in zip(segments.Dealing(sizes).of(merged), parts, strict=True):
        assert torch.equal(found, part)


def test_last_result_is_computed_anew_only_for_other_arrays():
    seen, last = [], segments.LastResult()

    def product(first, second):
        seen.append(first.tolist())
        return first * second

    for first in ([2, 3], [2, 3], [3, 2], [2, 3]):
        assert last.of(product, ints(first), ints([1, 10])).tolist() == [first[0], 10 * first[1]]
    assert seen == [[2, 3], [3, 2], [2, 3]]
