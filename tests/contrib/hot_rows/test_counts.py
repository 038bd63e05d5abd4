"""Access counts, and the row map that parts a table by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright_hot_rows import AccessCounts, HotAndCold, HotRows

import shardwright as sw


def test_counts_of_rows_fall_and_leave_out_what_nobody_asked_for() -> None:
    counts = AccessCounts.of([3, 0, 9, 3, 1])
    assert counts.rows.tolist() == [2, 0, 3, 4]
    assert counts.counts.tolist() == [9, 3, 3, 1]
    assert counts.total == 16
    assert AccessCounts.of([3, 0, 9, 3, 1], most_rows=2).rows.tolist() == [2, 0]


def test_counts_measured_on_batches_are_those_of_their_ids() -> None:
    counts = AccessCounts.measured([torch.tensor([1, 1, 3]), np.array([3, 3, 0])], 5)
    assert (counts.rows.tolist(), counts.counts.tolist(), counts.total) == ([3, 1, 0], [3, 2, 1], 6)


def test_counts_measured_on_one_array_are_those_of_its_ids_and_others_than_rows_are_refused() -> None:
    assert AccessCounts.measured(np.array([[1, 1], [3, 0]]), 5).counts.tolist() == [2, 1, 1]
    assert AccessCounts.measured(torch.tensor([]).long(), 5).total == 0
    for ids in ([np.array([1, 5])], torch.tensor([-1])):
        with pytest.raises(sw.InvalidInputError, match="ids must be 0 <= id < 5"):
            AccessCounts.measured(ids, 5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_counts_rows_for_a_share_are_the_fewest_that_get_it(of_row: list[int], share: float) -> None:
    if not sum(of_row):
        return
    counts = AccessCounts.of(of_row)
    num_rows = counts.rows_for(share)
    assert counts.share_of(num_rows) >= share - 1e-9
    assert num_rows == 1 or counts.share_of(num_rows - 1) < share


def test_counts_in_extras_come_back_and_wrong_ones_say_what_is_wrong() -> None:
    counts = AccessCounts.of([3, 0, 9])
    again = AccessCounts.from_extras(counts.to_extras())
    assert again is not None
    assert (again.rows.tolist(), again.counts.tolist(), again.total) == ([2, 0], [9, 3], 12)
    assert AccessCounts.from_extras({"other": 1}) is None
    with pytest.raises(sw.InvalidInputError, match="an object of rows, counts and total: 'counts'"):
        AccessCounts.from_extras({"access_counts": {"rows": [1]}})


@pytest.mark.parametrize(
    ("rows", "counts", "total", "text"),
    [
        ([1, 1], [2, 1], 3, "2 counts for 1 different rows of 2"),
        ([1], [2, 1], 3, "2 counts for 1 different rows of 1"),
        ([1, 2], [1, 2], 3, "must fall from row to row"),
        ([1, 2], [2, 1], 2, "add up to 3"),
    ],
)
def test_counts_that_contradict_themselves_raise(rows: Any, counts: Any, total: int, text: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=text):
        AccessCounts(rows, counts, total)


def test_hot_rows_asked_for_alone_without_counts_say_what_to_give() -> None:
    table, topology = sw.TableSpec("user", 10, 8), sw.Topology(2, "cpu")
    alone = sw.ParameterConstraints(sharding_types=["hot_rows"])
    with pytest.raises(
        sw.InvalidInputError, match=r"'user' .* has no access counts: give .* extras=AccessCounts"
    ):
        list(HotRows().layouts(table, topology, alone))
    assert not list(HotRows().layouts(table, topology, sw.ParameterConstraints(["hot_rows", "row_wise"])))


def test_hot_rows_with_counts_of_another_table_raise_naming_both() -> None:
    rule = sw.ParameterConstraints(extras=AccessCounts.of([1, 2, 3, 4]).to_extras())
    table = sw.TableSpec("t", 3, 4, ["f"])
    with pytest.raises(sw.InvalidInputError, match=r"'t' \(3 x 4 FP32\) name row 3, which it does not have"):
        list(HotRows().layouts(table, sw.Topology(world_size=2, compute_device="cpu"), rule))


@given(st.integers(1, 40), st.data(), st.integers(1, 5))
def test_row_map_places_each_row_once_hot_ones_in_part_0(num_rows: int, data: Any, parts: int) -> None:
    hot = data.draw(st.sets(st.integers(0, num_rows - 1)))
    rows = HotAndCold(num_rows, hot=hot, cold_parts=parts, hot_share=0.5 if hot else 0.0)
    ids = np.arange(num_rows)
    part, local = rows.part_of(ids), rows.local_row_of(ids)
    assert set(ids[part == 0].tolist()) == hot
    for index in range(rows.num_parts):
        held = rows.rows_of(index)
        assert rows.num_rows_of(index) == len(held)
        assert part[held].tolist() == [index] * len(held)
        assert local[held].tolist() == list(range(len(held)))
    for array, tensor in (
        (part, rows.part_of(torch.from_numpy(ids))),
        (local, rows.local_row_of(torch.from_numpy(ids))),
    ):
        assert tensor.tolist() == array.tolist()
    beyond = num_rows + np.arange(20)
    told, limits = rows.part_of(beyond), [rows.num_rows_of(index) for index in range(rows.num_parts)]
    for index, row in zip(told.tolist(), rows.local_row_of(beyond).tolist(), strict=True):
        assert index > 0  # not hot
        assert index >= rows.num_parts or row >= limits[index]
    if len(hot) < num_rows:
        assert sum(rows.id_fraction_of(index) for index in range(rows.num_parts)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("hot", "share", "text"),
    [([4], 0.1, "row 4 is not in it"), ([1, 1], 0.1, "named twice"), ([1], 1.5, "between 0 and 1, got 1.5")],
)
def test_row_map_that_cannot_be_raises_with_the_numbers(hot: list[int], share: float, text: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=text):
        HotAndCold(4, hot=hot, cold_parts=2, hot_share=share)
