"""Outputs made of what parts bring home, and columns moved, against loops over single elements."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.buckets import EXAMPLES
from tests.core.runtime.plans import cuts

from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.step import columns
from shardwright.runtime.step.arrangement import PooledArrangement, SequenceArrangement
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.columns import Columns, Move, Placement


def ints(values):
    return np.array(values, dtype=np.int64)


def drawn_spans(collection, random):
    """Columns (output, start, stop), in any order, that bring each output once or twice, cut alike."""
    spans = []
    for output, own in enumerate(collection.outputs):
        edges = sorted({0, own.dim, *(random.randrange(own.dim + 1) for _ in range(2))})
        times = random.choice([1, 1, 2])
        spans += [(output, start, stop) for start, stop in pairwise(edges) for _ in range(times)]
    random.shuffle(spans)
    return spans


def dealt(spans):
    """The same in tensors, of which each brings a column once at most."""
    tensors = []
    for span in spans:
        place = next((own for own in tensors if span not in own), None)
        if place is None:
            tensors.append(place := [])
        place.append(span)
    return tensors


def as_columns(spans):
    return Columns(*(ints(column) for column in zip(*spans, strict=True)))


@EXAMPLES
@given(cuts(), st.integers(0, 3), st.integers(0, 9), st.randoms(use_true_random=False))
def test_pooled_arrangement_adds_what_is_brought_and_divides_means(case, batch_size, seed, random):
    collection, batch = case.collection(), case.read(case.batch(batch_size, seed))
    divisor = torch.ones(batch_size, collection.width)
    for output in collection.outputs:
        if case.tables[output.table].pooling == "MEAN":
            divisor[:, output.start : output.stop] = batch.lengths[output.feature].clamp(min=1)[:, None]
    tensors = dealt(drawn_spans(collection, random))
    arrangement = PooledArrangement(collection, [as_columns(spans) for spans in tensors])
    brought = [torch.rand(batch_size, sum(stop - start for _, start, stop in own)) for own in tensors]
    expected = torch.zeros(batch_size, collection.width)
    for spans, values in zip(tensors, brought, strict=True):
        column = 0
        for output, start, stop in spans:
            for place in range(start, stop):
                expected[:, collection.outputs[output].start + place] += values[:, column]
                column += 1
    (output,) = arrangement.outputs([own.clone() for own in brought], batch)
    torch.testing.assert_close(output, expected / divisor)

    gradient = torch.rand(batch_size, collection.width)
    before = gradient.clone()
    (own,) = arrangement.gradients([gradient], batch)
    torch.testing.assert_close(own, gradient / divisor)
    assert torch.equal(gradient, before)


@EXAMPLES
@given(cuts(is_pooled=False), st.integers(0, 3), st.integers(0, 9), st.randoms(use_true_random=False))
def test_sequence_arrangement_adds_what_is_brought_and_puts_columns_side_by_side(case, size, seed, random):
    collection, batch = case.collection(), case.read(case.batch(size, seed))
    spans = drawn_spans(collection, random)
    arrangement = SequenceArrangement(collection, [as_columns([span]) for span in spans])
    counts = [batch.ids[output.feature].numel() for output in collection.outputs]
    brought = [torch.rand(counts[output], stop - start) for output, start, stop in spans]
    expected = [torch.zeros(count, own.dim) for count, own in zip(counts, collection.outputs, strict=True)]
    for (output, start, stop), values in zip(spans, brought, strict=True):
        expected[output][:, start:stop] += values
    outputs = arrangement.outputs(brought, batch)
    for own, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(own, wanted)


@EXAMPLES
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
    st.sampled_from([0, columns._LARGE]),
)
def test_move_puts_columns_from_several_matrices_into_one(widths, size, num_matrices, random, least):
    matrix = sorted(random.randrange(num_matrices) for _ in widths)
    source = Placement.in_a_row(ints(widths), ints(matrix), num_matrices)
    order = list(range(len(widths)))
    random.shuffle(order)
    starts = [sum(widths[other] for other in order[: order.index(own)]) for own in range(len(widths))]
    move = Move(ints(widths), source, Placement.in_one(ints(starts), sum(widths)))
    pieces = [torch.rand(size, width) for width in widths]
    rows = [
        torch.cat(
            [torch.empty(size, 0), *(p for p, at in zip(pieces, matrix, strict=True) if at == number)], 1
        )
        for number in range(num_matrices)
    ]
    flat = torch.cat([own.reshape(-1) for own in rows])
    kept = flat.clone()
    expected = torch.cat([pieces[own] for own in order], 1).reshape(-1)
    rooms = []
    with mock.patch.object(columns, "_LARGE", least):  # by slices, and by an index
        for _ in range(2):  # the second time by what was kept
            assert torch.equal(move(flat, size), expected)
        made = move(flat, size, lambda count: rooms.append(torch.empty(count)) or rooms[-1])
    assert torch.equal(made, expected)
    assert all(made.data_ptr() == own.data_ptr() for own in rooms)
    assert torch.equal(flat, kept)


def test_columns_that_stand_as_they_should_are_not_copied():
    tables = [TableSpec(f"t{index}", 9, dim, (f"f{index}",)) for index, dim in enumerate((64, 32, 4))]
    collection = Collection.of(tables)
    arrangement = PooledArrangement(collection, [as_columns([(0, 0, 64), (1, 0, 32), (2, 0, 4)])])
    batch = FeatureBatch(torch.ones(3, 7, dtype=torch.int32), torch.zeros(21), {}, ints([7] * 3))
    brought = torch.rand(7, 100)
    (output,) = arrangement.outputs([brought], batch)
    assert output.data_ptr() == brought.data_ptr()


def test_move_takes_pieces_side_by_side_as_one():
    widths = ints([64, 64, 64, 64])
    ranks = ints([0, 0, 1, 1])
    move = Move(widths, Placement.in_one(ints([0, 64, 128, 192]), 256), Placement.in_a_row(widths, ranks, 2))
    assert move.unit == 128
    rows = torch.rand(3, 256)
    assert torch.equal(
        move(rows.view(-1), 3), torch.cat([rows[:, :128].reshape(-1), rows[:, 128:].reshape(-1)])
    )
