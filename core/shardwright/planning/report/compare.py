"""Two plans compared: which tables changed, what moves to other ranks, and how many bytes that is.

What moves is what a rank holds under the second plan and did not hold under the first: for copies of a table, each copy
that is new. Optimizer state travels with its rows and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.errors import PlanError, ShardwrightError
from shardwright.planning.layouts.layout import Block
from shardwright.planning.plan.inputs import InputTables
from shardwright.planning.plan.plan import ParameterSharding, ShardingPlan
from shardwright.planning.report.check import is_stated, real_value_ms
from shardwright.planning.tables.spec import DataType


@frozen
class TableChange:
    """One table that the plans shard differently.

    Args:
        path: its module and name.
        before: sharding type and compute kernel; empty where the first plan has no such table.
        after: sharding type and compute kernel in the second plan; empty likewise.
        moved_bytes: weights that ranks must get.
        total_bytes: weights that ranks hold under the second plan, copies counted.
        received_bytes: rank -> what it must get.
    """

    path: str
    before: tuple[str, str] | None
    after: tuple[str, str] | None
    moved_bytes: int
    total_bytes: int
    received_bytes: Mapping[int, int]


@frozen
class PlanDifference:
    """Differences between two plans.

    Args:
        changes: the tables that differ, in the order of the first plan, then of the second.
        num_equal: number of tables that do not differ.
        values_ms: the objective of each plan: what its placement costs, added up again, or, where that cannot be done
            here, what its document says.
        stated_ms: objective that each plan's document states instead, where it is another.
    """

    changes: tuple[TableChange, ...]
    num_equal: int
    values_ms: tuple[float | None, float | None]
    stated_ms: tuple[float | None, float | None] = (None, None)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all ranks must get."""
        return sum(change.moved_bytes for change in self.changes)

    def received_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank must get, of those that must get some."""
        received: dict[int, int] = {}
        for change in self.changes:
            for rank, size in change.received_bytes.items():
                received[rank] = received.get(rank, 0) + size
        return dict(sorted(received.items()))


def compare_plans(first: ShardingPlan, second: ShardingPlan) -> PlanDifference:
    """Find what moves when a model goes from one plan to another.

    Raises:
        PlanError: a table has another size in the second plan.
    """
    before, after = _tables(first), _tables(second)
    types = {**_data_types(first), **_data_types(second)}
    changes, num_equal = [], 0
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        if old is not None and old == new:
            num_equal += 1
        else:
            changes.append(_change(path, old, new, types.get(path, DataType.FP32)))
    (value, stated), (other_value, other_stated) = map(_value, (first, second))
    return PlanDifference(tuple(changes), num_equal, (value, other_value), (stated, other_stated))


def _value(plan: ShardingPlan) -> tuple[float | None, float | None]:
    """A plan's value, and what its document says if that is another."""
    stated: float | None = plan.document.get("objective", {}).get("value_ms")
    try:
        real = real_value_ms(plan)
    except ShardwrightError:  # a plugin that is not installed here: moves can be told without it
        real = None
    if real is None:
        return stated, None
    return real, None if is_stated(real, plan) else stated


def _tables(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    return {
        f"{module}.{name}" if module else name: sharding
        for module, tables in plan.plan.items()
        for name, sharding in tables.items()
    }


def _data_types(plan: ShardingPlan) -> dict[str, DataType]:
    """The element types, where the document has the tables' specifications."""
    return {table.path: table.data_type for table in InputTables.of(plan.document).tables.values()}


def _change(
    path: str, old: ParameterSharding | None, new: ParameterSharding | None, data_type: DataType
) -> TableChange:
    if old is not None and new is not None:
        _check_same_size(path, old, new)
    held = _by_rank(old.layout.blocks if old else ())
    received: dict[int, int] = {}
    total = 0
    for block in new.layout.blocks if new else ():
        assert block.rank is not None  # a plan's blocks have ranks
        cells = block.num_rows * block.num_columns
        there = sum(_common_cells(block, other) for other in held.get(block.rank, ()))
        total += cells
        if there < cells:
            received[block.rank] = received.get(block.rank, 0) + _bytes(cells - there, data_type)
    return TableChange(
        path,
        _way(old),
        _way(new),
        sum(received.values()),
        _bytes(total, data_type),
        received,
    )


def _way(sharding: ParameterSharding | None) -> tuple[str, str] | None:
    return (sharding.sharding_type, sharding.compute_kernel) if sharding else None


def _check_same_size(path: str, old: ParameterSharding, new: ParameterSharding) -> None:
    sizes = [
        (side.layout.row_map.num_rows, max(block.columns.stop for block in side.layout.blocks))
        for side in (old, new)
    ]
    if sizes[0] != sizes[1]:
        raise PlanError(
            f"table {path!r} has {sizes[0][0]} x {sizes[0][1]} elements in the first plan and {sizes[1][0]} x "
            f"{sizes[1][1]} in the second: these are no two plans of one model"
        )


def _bytes(cells: int, data_type: DataType) -> int:
    return -(-cells * data_type.bits // 8)


def _by_rank(blocks: Iterable[Block]) -> dict[Any, list[Block]]:
    held: dict[Any, list[Block]] = {}
    for block in blocks:
        held.setdefault(block.rank, []).append(block)
    return held


def _common_cells(one: Block, other: Block) -> int:
    """The elements that two blocks of a table have in common."""
    columns = min(one.columns.stop, other.columns.stop) - max(one.columns.start, other.columns.start)
    return max(columns, 0) * _common_rows(one, other) if columns > 0 else 0


def _common_rows(one: Block, other: Block) -> int:
    if one.rows == other.rows:
        return one.num_rows
    mine, theirs = one.rows.rows, other.rows.rows
    num_rows = one.rows.row_map.num_rows
    if isinstance(mine, slice) and isinstance(theirs, slice):
        return len(_common_steps(range(num_rows)[mine], range(num_rows)[theirs]))
    if isinstance(mine, slice):
        return _num_within(theirs, range(num_rows)[mine])
    if isinstance(theirs, slice):
        return _num_within(mine, range(num_rows)[theirs])
    return len(np.intersect1d(mine, theirs, assume_unique=True))


def _num_within(rows: Any, steps: range) -> int:
    """Count the rows that are among those of a slice."""
    return int(((rows >= steps.start) & (rows < steps.stop) & ((rows - steps.start) % steps.step == 0)).sum())


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
