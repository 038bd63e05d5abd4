"""The order in which the rows of a table are stored outside of it, by its row map alone.

Two forms exist. In runs, row ``r`` of the table is row ``r`` of what is stored, and a part writes the runs of
neighbouring rows that it holds. By an index, the parts are stored one after the other, each in the order of its local
rows, and an index beside them says which row of the table each stored row is. Nothing here asks another rank.

Legend: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.planning.layouts.row_maps import RowMap

MOST_SHORT_RUNS = 1024
"""Rows of a table whose runs are never too many, even if each is a single row."""


@frozen
class RowRun:
    """Neighbouring rows that are neighbours in their part too.

    Args:
        row: first row of the table.
        local: its local row in the part.
        count: number of rows.
    """

    row: int
    local: int
    count: int


def is_stored_by_index(row_map: RowMap) -> bool:
    """True if rows are stored with an index: the map says so, or deals rows out in too many runs.

    The rows of a map that takes any id are its capacity, stored where they are.
    """
    if row_map.takes_any_id:
        return False
    if row_map.stored_as is not None:
        return row_map.stored_as == "index"
    if row_map.num_rows <= MOST_SHORT_RUNS:
        return False
    return any(part.bounds is None for part in row_map)


def runs_of(row_map: RowMap, part: int) -> Iterator[RowRun]:
    """The runs of a part, by its local rows."""
    rows = row_map.rows_of(part)
    if not isinstance(rows, slice):
        yield from _runs_of_array(np.asarray(rows))
        return
    every = range(*rows.indices(row_map.num_rows))
    if every.step == 1 and len(every):
        yield RowRun(every.start, 0, len(every))
    elif every.step != 1:
        yield from (RowRun(row, local, 1) for local, row in enumerate(every))


def _runs_of_array(rows: np.ndarray[Any, Any]) -> Iterator[RowRun]:
    if not len(rows):
        return
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield RowRun(int(rows[start]), start, stop - start)


def first_stored_row(row_map: RowMap, part: int) -> int:
    """Find the first row of a part when the parts are stored one after the other."""
    before, number = 0, 0
    for rows, count in row_map.part_sizes():
        here = min(count, part - number)
        before, number = before + rows * here, number + here
        if number == part:
            break
    return before


def rows_between(rows: slice | np.ndarray[Any, Any], start: int, stop: int, num_rows: int) -> Any:
    """Some of the rows of a part, by their local rows: int64 ``[stop - start]``.

    Args:
        rows: all rows of the part.
        start: first local row.
        stop: local row after the last.
        num_rows: ``R``.
    """
    if isinstance(rows, slice):
        some = range(*rows.indices(num_rows))[start:stop]
        return np.arange(some.start, some.stop, some.step, dtype=np.int64)
    return np.asarray(rows[start:stop], dtype=np.int64)
