"""The rows of a plan document: which part of which row map each shard holds, where its bounds tell.

Empty parts may have equal bounds. They are told apart by their columns: shards of the same columns are of different
parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.row_maps import RowMap, RowsRange, RowsSplit

Bounds: TypeAlias = tuple[int, int]
Shard: TypeAlias = tuple[Bounds | None, Bounds | None]
"""Bounds of a shard's rows, ``None`` where its part is no run of neighbours; and of its columns."""


def parts_of(row_map: RowMap, shards: Sequence[Shard]) -> list[int]:
    """The part of each shard's rows, by their bounds.

    Raises:
        InvalidInputError: no part of the row map has such bounds.
    """
    part = {key: part for part, key in enumerate(_numbered((own.bounds, None) for own in row_map))}
    found = []
    for bounds, number in _numbered(shards):
        if (bounds, 0) not in part:
            raise InvalidInputError(f"the row_map {row_map!r:.200} has no part {bounds}")
        found.append(part.get((bounds, number), part[bounds, 0]))  # copies are of one part
    return found


def derive_row_map(shards: Sequence[tuple[Bounds, Bounds]], num_rows: int) -> RowMap:
    """The row map whose parts have the bounds of shards: equal runs where they are equal.

    Raises:
        InvalidInputError: the bounds overlap, or leave rows out.
    """
    keys = _numbered(shards)
    for index, (((start, stop), span), (_, number)) in enumerate(zip(shards, keys, strict=True)):
        if number and start != stop:
            raise InvalidInputError(
                f"shard {index}: rows [{start}, {stop}) and columns [{span[0]}, {span[1]}) are covered twice"
            )
    distinct = [bounds for bounds, _ in sorted(set(keys)) if bounds is not None]
    reached = 0
    for start, stop in distinct:
        if start != reached:
            what = "not covered" if start > reached else "covered twice, or cut elsewhere in other columns"
            raise InvalidInputError(f"rows [{min(start, reached)}, {max(start, reached)}) are {what}")
        reached = stop
    if reached != num_rows:
        raise InvalidInputError(f"the shards cover {reached} of {num_rows} rows")
    even = RowsRange(num_rows, parts=len(distinct))
    is_even = [part.bounds for part in even] == distinct
    return even if is_even else RowsSplit((0, *(stop for _, stop in distinct)))


def _numbered(shards: Iterable[Shard]) -> list[tuple[Bounds | None, int]]:
    """The bounds of shards, each with the number of shards before it that have the same bounds and columns."""
    seen = Counter[Shard]()
    found = []
    for shard in shards:
        found.append((shard[0], seen[shard]))
        seen[shard] += 1
    return found
