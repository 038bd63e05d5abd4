"""Rows that a window of one part has in common with the parts of another row map, by their places in both."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.row_maps import RowMap, RowPart
from shardwright.planning.layouts.stored_rows import rows_between

LocalRows: TypeAlias = slice | Ints
"""Rows of a block, by their places in it."""


@frozen
class SharedRows:
    """Rows that are in two parts, by their places in each.

    Args:
        old: places in the part they come from.
        new: places in the part they go to.
        count: number of rows.
    """

    old: LocalRows
    new: LocalRows
    count: int


NO_ROWS = SharedRows(slice(0, 0), slice(0, 0), 0)


@frozen(slots=False)
class RowWindow:
    """Neighbouring rows of a part that move together.

    Args:
        part: the part they come from.
        start: first local row.
        stop: local row after the last.
        new_map: row map that they go to; ``None`` if it is the one that they come from, so that parts are equal or have
            nothing in common.
    """

    part: RowPart
    start: int
    stop: int
    new_map: RowMap | None

    def shared_with(self, part: RowPart) -> SharedRows:
        """The rows that are in another part, too.

        Args:
            part: a part of the new layout's row map.
        """
        if self.new_map is None:
            if part.index != self.part.index:
                return NO_ROWS
            rows = slice(self.start, self.stop)
            return SharedRows(rows, rows, self.stop - self.start)
        old, new = self.part.bounds, part.bounds
        if old is not None and new is not None:
            first, last = max(old[0] + self.start, new[0]), min(old[0] + self.stop, new[1])
            if first >= last:
                return NO_ROWS
            return SharedRows(
                slice(first - old[0], last - old[0]), slice(first - new[0], last - new[0]), last - first
            )
        # Parts that are no runs: row by row.
        here = np.flatnonzero(self._new_parts == part.index)
        if not len(here):
            return NO_ROWS
        places = np.asarray(part.row_map.local_row_of(self._rows[here]), dtype=np.int64)
        return SharedRows(here + self.start, places, len(here))

    @cached_property
    def _rows(self) -> Any:
        """Rows of the table, int64 ``[stop - start]``."""
        return rows_between(self.part.rows, self.start, self.stop, self.part.row_map.num_rows)

    @cached_property
    def _new_parts(self) -> Any:
        """The part of each row under the new row map."""
        assert self.new_map is not None  # else parts are compared
        return np.asarray(self.new_map.part_of(self._rows))
