"""The rows of a plan document: which part of which row map each shard holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwright.errors import PlanError
from shardwright.planning.layouts.layout import ColumnRange
from shardwright.planning.layouts.row_maps import RowMap, RowPart, RowsRange, RowsSplit


def row_parts(
    given: RowMap | None,
    rows: Sequence[tuple[int, int] | int],
    columns: Sequence[ColumnRange],
    num_rows: int,
    places: Sequence[str],
) -> list[RowPart]:
    """The part of the rows that each shard holds: by the row map given, or one derived from the bounds."""
    if given is None:
        bounds = [pair for pair in rows if isinstance(pair, tuple)]
        if len(bounds) < len(rows):
            index = next(index for index, pair in enumerate(rows) if not isinstance(pair, tuple))
            raise PlanError(f"{places[index]}: rows are given by part, which needs the table's row_map")
        row_map, parts = derive_row_map(bounds, columns, num_rows, places)
        return [row_map[part] for part in parts]
    if given.num_parts > len(rows):
        place = places[0].rpartition(", ")[0]
        raise PlanError(
            f"{place}: the row_map has {given.num_parts} parts, and there are {len(rows)} shards for them"
        )
    of_bounds: dict[tuple[int, int] | None, list[int]] = {}
    for part in given if any(isinstance(pair, tuple) for pair in rows) else ():
        of_bounds.setdefault(part.bounds, []).append(part.index)
    seen: Counter[Any] = Counter()
    found = []
    for pair, span, place in zip(rows, columns, places, strict=True):
        # Empty parts may have the same bounds: shards of the same columns are of different ones.
        fitting = of_bounds.get(pair, []) if isinstance(pair, tuple) else [pair]
        index = fitting[min(seen[pair, span], len(fitting) - 1)] if fitting else given.num_parts
        seen[pair, span] += 1
        if index >= given.num_parts:
            raise PlanError(f"{place}: the row_map {given!r:.200} has no part {pair}")
        found.append(given[index])
    return found


def derive_row_map(
    bounds: Sequence[tuple[int, int]],
    columns: Sequence[ColumnRange],
    num_rows: int,
    places: Sequence[str] = (),
) -> tuple[RowMap, list[int]]:
    """The row map whose parts have these bounds, and the part of each: equal runs where they are equal.

    Empty parts are told apart by their columns: shards of the same columns are of different parts.

    Raises:
        PlanError: the bounds overlap, or leave rows out.
    """
    seen: Counter[tuple[tuple[int, int], ColumnRange]] = Counter()
    keys: list[tuple[int, int, int]] = []
    for (start, stop), span in zip(bounds, columns, strict=True):
        occurrence = seen[(start, stop), span]
        seen[(start, stop), span] += 1
        if occurrence and start != stop:
            place = places[len(keys)] if places else "a shard"
            raise PlanError(
                f"{place}: rows [{start}, {stop}) and columns [{span.start}, {span.stop}) are covered twice"
            )
        keys.append((start, stop, occurrence))
    distinct = sorted(set(keys))
    reached = 0
    for start, stop, _ in distinct:
        if start != reached:
            what = "not covered" if start > reached else "covered twice, or cut elsewhere in other columns"
            place = f"{places[0].rpartition(', ')[0]}: " if places else ""
            raise PlanError(f"{place}rows [{min(start, reached)}, {max(start, reached)}) are {what}")
        reached = stop
    if reached != num_rows:
        place = f"{places[0].rpartition(', ')[0]}: " if places else ""
        raise PlanError(f"{place}the shards cover {reached} of {num_rows} rows")
    even = RowsRange(num_rows, parts=len(distinct))
    if [part.bounds for part in even] == [(start, stop) for start, stop, _ in distinct]:
        row_map: RowMap = even
    else:
        row_map = RowsSplit((0, *(stop for _, stop, _ in distinct)))
    index = {key: part for part, key in enumerate(distinct)}
    return row_map, [index[key] for key in keys]
