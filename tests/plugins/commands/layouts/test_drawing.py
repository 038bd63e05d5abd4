"""Layouts as pictures: every block is there, at its rows and columns, with its place."""

from __future__ import annotations

import re

import pytest

from shardwright.planning.layouts.layout import Block, BlockRun, ColumnRange, Layout
from shardwright.planning.layouts.row_maps import RowsModulo, RowsRange, RowsSplit
from shardwright_plugins.commands.layouts.drawing import draw
from shardwright_plugins.dataflows import Replicate

ALL = ColumnRange(0, 64)


def rows_of(picture: str) -> dict[str, list[str]]:
    """For each band of rows, the texts of its cells."""
    found = re.findall(r"^rows (\S+) +│(.*)│$", picture, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("│")] for name, cells in found}


def test_draw_rows_and_columns_cut_gives_each_block_its_cell() -> None:
    blocks = [
        Block(part, ColumnRange(start, stop), host_group=group, local_rank=rank)
        for group, (start, stop) in enumerate([(0, 32), (32, 64)])
        for rank, part in enumerate(RowsRange(9, parts=2))
    ]
    assert rows_of(draw(Layout(blocks))) == {
        "0-4": ["host A, local 0", "host B, local 0"],
        "5-8": ["host A, local 1", "host B, local 1"],
    }


def test_draw_lines_have_one_width_and_meet() -> None:
    rows = RowsRange(4, parts=2)
    blocks = [
        Block(rows[0], ColumnRange(0, 16), rank=0),
        Block(rows[0], ColumnRange(16, 64), rank=1),
        Block(rows[1], ColumnRange(0, 48), rank=2),
        Block(rows[1], ColumnRange(48, 64), rank=3),
    ]
    head, top, first, middle, second, bottom = draw(Layout(blocks)).splitlines()
    assert head.strip() == "columns 0-63"
    assert len({len(line) for line in (top, first, middle, second, bottom)}) == 1
    for place, (above, line, below) in enumerate(zip(first, middle, second, strict=True)):
        joined = {(True, True): "├┤┼", (True, False): "┴", (False, True): "┬", (False, False): "─ "}
        if place > len("rows 0-1"):
            assert line in joined[above == "│", below == "│"]


def test_draw_rows_dealt_one_by_one_lie_as_in_the_table() -> None:
    blocks = [Block(part, ALL, rank=rank) for rank, part in enumerate(RowsModulo(5, parts=2))]
    assert rows_of(draw(Layout(blocks))) == {f"{row}-{row}": [f"rank {row % 2}"] for row in range(5)}


def test_draw_many_changes_of_the_part_are_cut_short() -> None:
    blocks = [Block(part, ALL, rank=rank) for rank, part in enumerate(RowsModulo(1000, parts=2))]
    picture = draw(Layout(blocks))
    assert len(rows_of(picture)) == 12
    assert picture.endswith("and so on, to row 999")


def test_draw_empty_part_is_left_out() -> None:
    blocks = [Block(part, ALL, rank=rank) for rank, part in enumerate(RowsSplit((0, 3, 3, 5)))]
    assert rows_of(draw(Layout(blocks))) == {"0-2": ["rank 0"], "3-4": ["rank 2"]}


def test_draw_copies_are_one_box_with_all_ranks() -> None:
    (part,) = RowsRange(4, parts=1)
    copies = Layout([Block(part, ALL, rank=rank) for rank in range(3)], dataflow=Replicate())
    assert rows_of(draw(copies)) == {"0-3": ["a copy on each of ranks 0-2"]}


@pytest.mark.parametrize(
    ("block", "text"),
    [({}, "any rank"), ({"rank": 5}, "rank 5"), ({"host_group": 1}, "host B, any rank")],
)
def test_draw_says_where_a_block_may_be(block: dict[str, int], text: str) -> None:
    (part,) = RowsRange(2, parts=1)
    assert rows_of(draw(Layout([Block(part, ALL, **block)]))) == {"0-1": [text]}


def test_draw_cell_too_narrow_for_its_text_is_cut() -> None:
    (part,) = RowsRange(2, parts=1)
    blocks = [Block(part, ColumnRange(column, column + 1), rank=100 + column) for column in range(16)]
    picture = draw(Layout(blocks))
    assert len({len(line) for line in picture.splitlines()[1:]}) == 1
    assert "ra…" in picture


def test_draw_shows_copies_beside_the_rows_that_are_on_one_rank() -> None:
    rows = RowsSplit((0, 3, 7, 11))
    copies = BlockRun(rows, ALL, 2, is_copied=True, rank=0, dataflow=Replicate())
    layout = Layout([copies, BlockRun(rows, ALL, 2, first_part=1, rank=0)])
    assert rows_of(draw(layout)) == {
        "0-2": ["a copy on each of ranks 0-1"],
        "3-6": ["rank 0"],
        "7-10": ["rank 1"],
    }
