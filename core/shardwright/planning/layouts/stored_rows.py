"""The order in which the rows of a table are stored outside of it, by its row map alone.

Two forms exist. In runs, row ``r`` of the table is row ``r`` of what is stored, and a part writes the runs of
neighbouring rows that it holds. By an index, the parts are stored one after the other, each in the order of its local
rows, and an index beside them says which row of the table each stored row is. Nothing here asks another rank.

Legend: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from shardwright.planning.layouts.row_maps import RowMap

MOST_SHORT_RUNS = 1024
"""Rows of a table whose runs are never too many, even if each is a single row."""


def is_stored_by_index(row_map: RowMap) -> bool:
    """True if rows are stored with an index: the map says so, or deals rows out in too many runs.

    The rows of a map that takes any id are its capacity, stored where they are.
    """
    if row_map.takes_any_id:
        return False
    if row_map.stored_as is not None:
        return row_map.stored_as == "index"
    return row_map.num_rows > MOST_SHORT_RUNS and any(part.bounds is None for part in row_map)


def runs_of(row_map: RowMap, part: int) -> Iterator[tuple[int, int, int]]:
    """The runs of neighbouring rows that are neighbours in a part too.

    Returns:
        First row of the table, its local row in the part, and number of rows, by local rows.
    """
    rows = row_map.rows_of(part)
    count = row_map.num_rows_of(part)
    if isinstance(rows, slice) and rows.step in (None, 1):
        yield from [(rows.indices(row_map.num_rows)[0], 0, count)] * (count > 0)
        return
    listed = rows_between(rows, 0, count, row_map.num_rows)
    starts = [0, *(np.flatnonzero(np.diff(listed) != 1) + 1).tolist()] if count else []
    for start, stop in pairwise([*starts, count]):
        yield int(listed[start]), start, stop - start


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
