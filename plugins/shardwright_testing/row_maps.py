"""Conformance tests of row maps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardwright.planning.layouts.row_maps import RowMap
from shardwright_testing.kernels.keys import keys_of

_EXTREMES = np.array([0, 1, -1, (1 << 63) - 1, -(1 << 63)])
_ROUNDING = 1e-9

MANY_ROWS = 10_000_000
"""Rows of a table that is too large for lists of them."""
_A_LIST_BYTES = 1 << 20


def check_row_map(where: str, row_map: RowMap) -> None:
    """A row map of rows or of keys keeps its contract."""
    assert 0 <= row_map.ns_per_id < 1e9, (
        f"{where}: ns_per_id is {row_map.ns_per_id}, not nanoseconds of 0 or more"
    )
    (_check_keys if row_map.takes_any_id else _check_rows)(where, row_map)
    sizes = [rows for rows, count in row_map.part_sizes() for _ in range(count)]
    wanted = [row_map.num_rows_of(part) for part in range(row_map.num_parts)]
    assert sizes == wanted, f"{where}: part_sizes() says {sizes}, the parts have {wanted}"


def check_counting(where: str, row_map: RowMap) -> None:
    """The planner's questions about a part of a large table are answered without a list of its rows.

    What is measured is memory: it tells a list from a formula on any machine, however busy.
    """
    part = row_map.num_parts - 1
    listed = _bytes_taken(lambda: row_map.num_rows_of(part))
    assert listed < _A_LIST_BYTES, (
        f"{where}: num_rows_of({part}) takes {listed} bytes for a table of {row_map.num_rows} rows: it lists them. The "
        "planner asks it of every part of every table, and a list of 1e9 rows takes seconds: give it a formula"
    )
    listed = _bytes_taken(lambda: row_map[part].bounds)
    assert listed < _A_LIST_BYTES, (
        f"{where}: whether the rows of part {part} are neighbours takes {listed} bytes for a table of "
        f"{row_map.num_rows} rows: rows_of() lists them. Say keeps_neighbours = False in the row map, or give slices"
    )


def _bytes_taken(work: Callable[[], object]) -> int:
    """The most memory that some work takes while it lasts."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()


def _check_rows(where: str, row_map: RowMap) -> None:
    ids = np.arange(row_map.num_rows)
    parts, locals_ = np.asarray(row_map.part_of(ids)), np.asarray(row_map.local_row_of(ids))
    _check_placed(where, row_map, ids, parts, locals_)
    for part in range(row_map.num_parts):
        held = np.arange(row_map.num_rows)[row_map.rows_of(part)]
        assert row_map.num_rows_of(part) == len(held), (
            f"{where}: num_rows_of({part}) is {row_map.num_rows_of(part)}, rows_of({part}) has {len(held)} rows"
        )
        _check_part(where, part, held, np.flatnonzero(parts == part), locals_)


def _check_keys(where: str, row_map: RowMap) -> None:
    """Any 64-bit number is in one part, and stays what it is: the kernel finds it a row; parts share the capacity."""
    keys = np.concatenate([keys_of(200).numpy(), _EXTREMES])
    parts, locals_ = np.asarray(row_map.part_of(keys)), np.asarray(row_map.local_row_of(keys))
    _check_placed(where, row_map, keys, parts, locals_)
    changed = np.flatnonzero(locals_ != keys)
    assert not len(changed), (
        f"{where}: takes_any_id, but local_row_of gives {locals_[changed[0]]} for the key {keys[changed[0]]}; the "
        "kernel needs the key itself"
    )
    held = np.concatenate(
        [np.arange(row_map.num_rows)[row_map.rows_of(part)] for part in range(row_map.num_parts)]
    )
    assert sorted(held.tolist()) == list(range(row_map.num_rows)), (
        f"{where}: its parts have {len(held)} rows, {len(set(held.tolist()))} different ones, of {row_map.num_rows}"
    )


def _check_placed(where: str, row_map: RowMap, ids: Any, parts: Any, locals_: Any) -> None:
    _check_torch_agrees(where, row_map, ids, parts, locals_)
    outside = np.flatnonzero((parts < 0) | (parts >= row_map.num_parts))
    assert not len(outside), (
        f"{where}: row {ids[outside[0]]} is in part {parts[outside[0]]} of {row_map.num_parts}"
    )
    fractions = [row_map.id_fraction_of(part) for part in range(row_map.num_parts)]
    assert all(0 <= fraction <= 1 + _ROUNDING for fraction in fractions), (
        f"{where}: id_fraction_of of the parts is {fractions}; each must be between 0 and 1"
    )
    lookups = sum(fractions)
    assert abs(lookups - 1) < _ROUNDING, (
        f"{where}: id_fraction_of of all {row_map.num_parts} parts is {lookups} together, it must be 1"
    )


def _check_part(where: str, part: int, held: Any, sent: Any, locals_: Any) -> None:
    """The rows that ``rows_of`` lists are those that ids are sent to, each at its local row."""
    missing, strange = np.setdiff1d(sent, held), np.setdiff1d(held, sent)
    assert not len(missing), (
        f"{where}: part_of sends row {missing[0]} to part {part}, rows_of({part}) lacks it"
    )
    assert not len(strange), f"{where}: rows_of({part}) has row {strange[0]}, part_of sends it elsewhere"
    for local, row in enumerate(held.tolist()):
        assert locals_[row] == local, (
            f"{where}: row {row} is local row {local} of part {part} by rows_of, and {locals_[row]} by local_row_of"
        )


def _check_torch_agrees(where: str, row_map: RowMap, ids: Any, parts: Any, locals_: Any) -> None:
    for name, of_numpy in (("part_of", parts), ("local_row_of", locals_)):
        of_torch = getattr(row_map, name)(torch.from_numpy(ids))
        assert isinstance(of_torch, torch.Tensor), (
            f"{where}: {name} of a tensor gives a {type(of_torch).__name__}, not a tensor"
        )
        assert np.array_equal(of_torch.numpy(), of_numpy), (
            f"{where}: {name} gives other values for a tensor than for an array"
        )
