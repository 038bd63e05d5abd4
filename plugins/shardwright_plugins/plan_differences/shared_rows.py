"""Counts of the rows that parts of two row maps have in common, by arithmetic where parts are slices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from attrs import Factory, define

from shardwright.planning.layouts.row_maps import RowMap, RowPart
from shardwright.planning.layouts.stored_rows import rows_between

_ROWS_AT_ONCE = 1 << 20
"""Rows that are listed at once: 8 MiB of ids."""
_SAMPLE_KEYS = 1 << 16
"""Keys that stand for all where rows are found by keys: parts are then estimated to 1 % or so."""


@define(eq=False)
class SharedRowCounts:
    """Number of rows that each part of one row map has in common with each part of another.

    Args:
        new: the other row map.
    """

    new: RowMap
    _listed: dict[int, Mapping[int, int]] = Factory(dict)

    def of(self, old: RowPart, new: RowPart) -> int:
        """Count the rows that a part of the one map and a part of the other have in common."""
        if old == new:
            return old.num_rows
        if old.row_map.takes_any_id or self.new.takes_any_id:
            return self._expected(old, new)
        mine, theirs = old.rows, new.rows
        if isinstance(mine, slice) and isinstance(theirs, slice):
            num_rows = old.row_map.num_rows
            return len(_common_steps(range(num_rows)[mine], range(num_rows)[theirs]))
        if old.index not in self._listed:
            self._listed[old.index] = self._count(old)
        return self._listed[old.index].get(new.index, 0)

    def _expected(self, old: RowPart, new: RowPart) -> int:
        """Estimate how many rows of a full part have keys of the other part, from some keys: nobody knows them all."""
        keys = np.arange(_SAMPLE_KEYS, dtype=np.int64)
        here = keys[np.asarray(old.row_map.part_of(keys)) == old.index]
        there = np.asarray(self.new.part_of(here)) == new.index
        return round(old.num_rows * int(there.sum()) / max(len(here), 1))

    def _count(self, old: RowPart) -> Mapping[int, int]:
        """Count a part's rows under each part of the other map, row by row."""
        rows, counts = old.rows, np.zeros(self.new.num_parts, dtype=np.int64)
        for start in range(0, old.num_rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, old.num_rows)
            listed = rows_between(rows, start, stop, old.row_map.num_rows)
            counts += np.bincount(np.asarray(self.new.part_of(listed)), minlength=len(counts))
        return dict(enumerate(counts.tolist()))


def _common_steps(one: range, other: range) -> range:
    """The numbers that two rising ranges have in common: by the Chinese remainder theorem, however long they are."""
    divisor = math.gcd(one.step, other.step)
    if (other.start - one.start) % divisor:
        return range(0)
    step = one.step // divisor * other.step
    # one.start + k * one.step is other.start modulo other.step.
    k = (other.start - one.start) // divisor * pow(one.step // divisor, -1, other.step // divisor)
    first = (one.start + k * one.step) % step
    least = max(one.start, other.start)
    return range(least + (first - least) % step, min(one.stop, other.stop), step)
