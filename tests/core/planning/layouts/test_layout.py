"""Row maps as bijections, layouts as exact covers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import (
    Block,
    BlockRun,
    ColumnRange,
    Exchange,
    InvalidInputError,
    Layout,
    RowMap,
    RowsModulo,
    RowsRange,
    RowsSplit,
    TableSpec,
)
from shardwright.planning.layouts.layout import from_data
from shardwright.planning.layouts.row_maps import ROW_MAPS
from shardwright_plugins.dataflows import Replicate
from shardwright_testing.row_maps import check_row_map


@frozen
class RowsShuffled(RowMap):
    """A plugin's row map that is no slice: row ``r`` in part ``7 r mod rows mod parts`` (rows not divisible by 7)."""

    name = "shuffled"
    num_rows: int
    parts: int

    @property
    def num_parts(self):
        return self.parts

    def _place(self, ids):
        return ids * 7 % self.num_rows

    def part_of(self, ids):
        return self._place(ids) % self.parts

    def local_row_of(self, ids):
        return self._place(ids) // self.parts

    def rows_of(self, part):
        rows = np.arange(self.num_rows)
        own = rows[self.part_of(rows) == part]
        return own[np.argsort(self.local_row_of(own))]


@st.composite
def row_maps(draw):
    kind = draw(st.sampled_from([*ROW_MAPS, RowsShuffled]))
    rows = draw(st.integers(1, 60))
    if kind is RowsSplit:
        inner = sorted(draw(st.lists(st.integers(0, rows), max_size=6)))
        return RowsSplit((0, *inner, rows))
    if kind is RowsShuffled:
        rows += 1 + (rows % 7 == 6)
    return kind(rows, parts=draw(st.integers(1, 9)))


@settings(max_examples=300)
@given(row_maps())
def test_row_map_keeps_the_contract_and_parts_know_their_bounds(row_map):
    check_row_map("it", row_map)
    for index, part in enumerate(row_map):
        assert part == row_map[index]
        if part.bounds is not None:
            held = np.arange(row_map.num_rows)[row_map.rows_of(index)]
            assert list(range(*part.bounds)) == held.tolist()


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_row_map_part_that_does_not_exist_raises(index):
    with pytest.raises(IndexError, match=f"part {index} of a row map with 3 parts"):
        RowsRange(7, parts=3)[index]


def test_rows_range_of_fewer_rows_than_parts_leaves_the_last_empty():
    assert [part.num_rows for part in RowsRange(3, parts=5)] == [1, 1, 1, 0, 0]
    assert [part.bounds for part in RowsRange(5, parts=3)] == [(0, 2), (2, 4), (4, 5)]
    assert [part.num_rows for part in RowsRange(0, parts=2)] == [0, 0]
    assert RowsRange(0, parts=2).id_fraction_of(1) == 0


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"name": "rangge", "num_rows": 3},
            "unknown name 'rangge'. Known: modulo, range, split. Did you mean 'range'?",
        ),
        ({"num_rows": 3}, "unknown name None. Known: modulo, range, split."),
        ({"name": "range"}, "'range': "),
        ({"name": "range", "num_rows": 3, "colour": 1}, "'colour'"),
        ({"name": "range", "num_rows": -3}, "num_rows must be an integer from 0, got -3"),
        (
            {"name": "split", "bounds": [0, 5, 2]},
            "bounds must rise from 0 to the number of rows, got (0, 5, 2)",
        ),
    ],
)
def test_from_data_wrong_data_raises_naming_what_is_wrong(data, text):
    with pytest.raises(InvalidInputError, match=re.escape(text)):
        from_data(data, ROW_MAPS)


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [
        (-1, 3, "start must be an integer from 0, got -1"),
        (4, 4, r"\[4, 4\) are empty"),
        (4, 2, r"\[4, 2\) are empty"),
    ],
)
def test_column_range_wrong_bounds_raise(start, stop, text):
    with pytest.raises(InvalidInputError, match=text):
        ColumnRange(start, stop)


TABLE = TableSpec("items", 10, 8, ("item",), module="sparse.bags")
TEXT = "table 'sparse.bags.items' (10 x 8 FP32)"


def blocks_of(row_map, *spans, rank=0):
    return [Block(part, ColumnRange(*span), rank=rank) for part in row_map for span in spans]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (blocks_of(RowsRange(9), (0, 8)), f"{TEXT}: the row map covers 9 rows"),
        (blocks_of(RowsRange(10, parts=2), (0, 4)), f"{TEXT}, row part 0: blocks reach column 4 of 8"),
        (blocks_of(RowsRange(10), (0, 3), (5, 8)), f"{TEXT}, row part 0: columns [3, 5) are not covered"),
        (blocks_of(RowsRange(10), (0, 5), (3, 8)), f"{TEXT}, row part 0: columns [3, 5) are covered twice"),
        (blocks_of(RowsRange(10), (0, 12)), f"{TEXT}, row part 0: blocks reach column 12 of 8"),
        (blocks_of(RowsRange(10, parts=2), (0, 8))[:1], f"{TEXT}, row part 1: blocks reach column 0 of 8"),
        (blocks_of(RowsRange(10), (0, 8), rank=3), f"{TEXT}: a block is placed on rank 3 of 2 ranks"),
    ],
)
def test_layout_check_wrong_cover_raises_with_table_and_numbers(blocks, text):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(text)}$"):
        Layout(blocks).check(TABLE, world_size=2)


def test_layout_check_row_map_whose_parts_lose_rows_raises_with_the_number():
    @frozen
    class Loses(RowsRange):
        def rows_of(self, part):
            return slice(0, 3)

    with pytest.raises(InvalidInputError, match="the parts of the row map hold 6 rows together"):
        Layout(blocks_of(Loses(10, parts=2), (0, 8))).check(TABLE)


def test_layout_placed_gives_each_block_its_rank_and_keeps_the_rest():
    layout = Layout(blocks_of(RowsRange(4, parts=2), (0, 1), rank=None), variant="v", extras={"a": 1})
    placed = layout.placed([5, 2])
    assert [block.rank for block in placed.blocks] == [5, 2]
    assert (placed.variant, placed.extras, placed.row_map) == ("v", {"a": 1}, layout.row_map)
    assert [block.rank for block in layout.blocks] == [None, None]
    with pytest.raises(ValueError, match="1 ranks were given for 2 blocks"):
        layout.placed([5])


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"rank": 1, "host_group": 0}, "rank 1 and host_group 0; with a rank its host is given"),
        ({"local_rank": 2}, "local_rank 2 and no host_group"),
        ({"host_group": -1}, "Block: host_group must be an integer from 0 or None, got -1"),
        ({"host_group": 0, "local_rank": -3}, "Block: local_rank must be an integer from 0 or None, got -3"),
    ],
)
def test_block_place_that_contradicts_itself_raises_with_the_numbers(place, text):
    with pytest.raises(InvalidInputError, match=re.escape(text)):
        Block(RowsRange(4)[0], ColumnRange(0, 1), **place)


def copies(ranks, row_map=None, columns=(0, 8)):
    blocks = [Block((row_map or RowsRange(10))[0], ColumnRange(*columns), rank=rank) for rank in ranks]
    return Layout(blocks, dataflow=Replicate())


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            copies([0, 1]),
            "rank 2 has 0 copies of row part 0; dataflow 'replicate' needs one on each of 3 ranks",
        ),
        (copies([0, 1, 1, 2]), "rank 1 has 2 copies"),
        (copies([0, 1, 2, 3]), "a block is placed on rank 3 of 3 ranks"),
        (
            copies([0, 1, 2], columns=(0, 4)),
            "the copy on rank 0 has 4 columns; dataflow 'replicate'",
        ),
        (copies([0, 1], RowsRange(10, parts=2)), "rank 2 has 0 copies of row part 0; dataflow 'replicate'"),
    ],
)
def test_layout_check_copies_that_are_not_one_on_each_rank_raise_with_the_numbers(layout, text):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(TEXT)}: {re.escape(text)}"):
        layout.check(TABLE, world_size=3)


HOT_AND_COLD = RowsSplit((0, 3, 7, 10))


def hot_and_cold(ranks=(0, 1), rows=HOT_AND_COLD):
    """Part 0 on every rank, the others on one each."""
    return Layout(
        [
            *(Block(rows[0], TABLE.all_columns, rank, dataflow=Replicate()) for rank in ranks),
            *(Block(rows[part], TABLE.all_columns, part - 1) for part in (1, 2)),
        ]
    )


def test_layout_of_blocks_among_runs_has_the_same_blocks_placed_or_not():
    run = BlockRun(HOT_AND_COLD, TABLE.all_columns, 2, is_copied=True, rank=0, dataflow=Replicate())
    blocks = list(hot_and_cold().blocks)
    mixed = Layout([run, *blocks[2:]])
    assert (mixed, mixed.digest()) == (hot_and_cold(), hot_and_cold().digest())
    placed = mixed.placed([1, 0, 1, 0])
    assert (placed, placed.digest()) == (hot_and_cold().placed([1, 0, 1, 0]), Layout(placed.blocks).digest())
    assert placed != mixed
    assert [placed.blocks[place].rank for place in range(-4, 4)] == [1, 0, 1, 0] * 2
    assert placed.blocks[1:3] == (placed.blocks[1], placed.blocks[2])
    assert [block.rank for block in placed.served_by([Exchange()]).blocks] == [1, 0]
    assert list(Layout(list(placed.blocks)).columns.rank) == list(placed.columns.rank) == [1, 0, 1, 0]
    with pytest.raises(IndexError):
        placed.blocks[4]


REFUSED = [
    pytest.param(
        lambda: Layout([]), "at least one block", id="layout without blocks or of two row maps raises 1"
    ),
    pytest.param(
        lambda: Layout([*blocks_of(RowsRange(4), (0, 1)), *blocks_of(RowsModulo(4), (0, 1))]),
        "parts of one row map",
        id="layout without blocks or of two row maps raises 2",
    ),
    pytest.param(
        lambda: Layout(blocks_of(RowsRange(4), (0, 1)), extras={3: "three"}),
        "a key of extras must be a text, got 3",
        id="layout without blocks or of two row maps raises 3",
    ),
    pytest.param(
        lambda: hot_and_cold([0]).check(TABLE, world_size=2),
        "rank 1 has 0 copies of row part 0; dataflow 'replicate'",
        id="layout of two dataflows with a copy missing raises naming rank and part",
    ),
    pytest.param(
        lambda: copies([0, 1, 2], RowsRange(10, parts=2)).check(TABLE, world_size=3),
        "row part 1: blocks reach column 0 of 8",
        id="layout without a row part raises naming it",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_call_is_an_error_that_says_what_is_wrong(call, text):
    with pytest.raises(InvalidInputError, match=text):
        call()
