"""Values of a table's blocks that move: weights, and optimizer states of kernels and of the user's optimizers.

Legend: D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.errors import DistributedError, UnsupportedError
from shardwright.planning.layouts.layout import Block
from shardwright.planning.layouts.moves import LayoutMove
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.resharding.users import Holder
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.sharded.tables.table_state import LocalBlock

WEIGHT, STEP = "weight", "step"

Place: TypeAlias = tuple[int, int]
"""A block on one rank: its row part, and its first column."""


def place_of(block: Block) -> Place:
    """The place of a block among those of its table on one rank."""
    return block.rows.index, block.columns.start


@frozen
class MovedValue:
    """A value that a table has for each element, or for each row.

    Args:
        name: :data:`WEIGHT`, or that of an optimizer state.
        dtype: dtype of its elements.
        is_per_row: a row has one, the same in every column block.
    """

    name: str
    dtype: torch.dtype
    is_per_row: bool

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row of a block of so many columns."""
        return self.dtype.itemsize * (1 if self.is_per_row else num_columns)


@frozen
class TableValues:
    """Description of a table's values, the same on all ranks with a block of it.

    Args:
        entries: the values that move.
        step: updates done, where a kernel counts them.
        optimizer: the user's optimizer that has the table; ``None`` if none has.
        plain: numbers that this optimizer keeps of a block.
    """

    entries: tuple[MovedValue, ...]
    step: float | None = None
    optimizer: Holder | None = None
    plain: Mapping[str, Any] = field(factory=dict)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of the whole table."""
        return sum(entry.row_bytes(dim) for entry in self.entries)

    @property
    def own_states(self) -> list[MovedValue]:
        """States that the user's optimizer keeps."""
        return [entry for entry in self.entries if entry.name != WEIGHT] if self.optimizer else []


Values: TypeAlias = dict[str, Tensor]
"""A block's tensors ``[rows, columns]`` or ``[rows, 1]``, by the names of entries."""


@define(eq=False, slots=False)
class TableMove:
    """A table on its way from one plan to another, as one rank has it.

    Args:
        spec: the table.
        old: its part of the plan until now.
        new: its part of the new plan.
        values: the values that move; none of a table without rows.
        sources: the values of the blocks that are here, until they have left.
        targets: those of the new blocks here, once there are such.
        row_state: names of what the kernel knows of each row, where rows are found by keys; else empty.
        row_states: these values of the blocks that are here.
    """

    spec: TableSpec
    old: ParameterSharding
    new: ParameterSharding
    values: TableValues
    sources: dict[Place, Values] = field(factory=dict)
    targets: dict[Place, Values] = field(factory=dict)
    row_state: Sequence[str] = ()
    row_states: dict[Place, Mapping[str, Tensor]] = field(factory=dict)

    @property
    def is_keyed(self) -> bool:
        """Mark of a table whose rows are found by keys."""
        return bool(self.row_state)

    @cached_property
    def layouts(self) -> LayoutMove:
        """The move of its rows and columns."""
        has_row_values = any(entry.is_per_row for entry in self.values.entries)
        return LayoutMove(self.old.layout, self.new.layout, has_row_values)


def lookup_values(lookup: Lookup, index: int) -> Values:
    """The weights of a block and the states that its kernel keeps, shared storage."""
    states = {name: value for name, value in lookup.optimizer_state(index).items() if name != STEP}
    return {WEIGHT: lookup.weight(index).detach(), **states}


def values_of(table: ShardedTable, local: LocalBlock, state: Mapping[str, Any]) -> Values:
    """A local block's values, with the tensors that the user's optimizer keeps of it.

    Raises:
        UnsupportedError: of a state it is not known which rows and columns it is of.
    """
    own = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    rows, columns = local.block.num_rows, local.block.num_columns
    for name, value in own.items():
        if tuple(value.shape) not in ((rows, columns), (rows, 1)):
            raise UnsupportedError(
                f"table {table.state.table.describe()}: its optimizer's state {name!r} has the shape "
                f"{list(value.shape)} on a block of {rows} x {columns}, so that it is not known which rows and columns "
                "it is of"
            )
    return {**lookup_values(table.lookup_of(local), local.index), **own}


def describe_values(
    table: ShardedTable, states: Sequence[Mapping[str, Any]], optimizer: Holder | None
) -> TableValues | None:
    """A rank's description of a table's values; ``None`` where it has no block of it.

    Args:
        table: the table.
        states: the user's optimizer's state of each local block.
        optimizer: see :class:`TableValues`.
    """
    if not table.state.local:
        return None
    local, lookup = table.state.local[0], table.lookup_of(table.state.local[0])
    values, columns = values_of(table, local, states[0]), local.block.num_columns
    kept = lookup.optimizer_state(local.index)
    entries = tuple(
        MovedValue(name, value.dtype, name in lookup.states_per_row or value.shape[1] != columns)
        for name, value in sorted(values.items())
    )
    plain = {name: value for name, value in states[0].items() if name not in values}
    return TableValues(entries, float(kept[STEP]) if STEP in kept else None, optimizer, plain)


def agreed_values(table: TableSpec, told: Sequence[TableValues | None]) -> TableValues:
    """The description on which all ranks with a block of a table agree.

    Raises:
        DistributedError: they say different things.
    """
    said = [values for values in told if values is not None]
    if not said:
        return TableValues(())
    for rank, other in enumerate(told):
        if other is not None and (other.entries, other.optimizer) != (said[0].entries, said[0].optimizer):
            raise DistributedError(
                f"table {table.describe()}: its blocks have other values on rank {rank} "
                f"({_named(other)}) than on another rank ({_named(said[0])}): make one step on all ranks, and "
                "give every rank the same optimizers, before you reshard"
            )
    return said[0]


def _named(values: TableValues) -> str:
    whose = f" of optimizer {values.optimizer.optimizer}" if values.optimizer else ""
    return ", ".join(entry.name for entry in values.entries) + whose


def new_states(lookup: Lookup, index: int, values: TableValues) -> Values:
    """Zeros for the states that the user's optimizer keeps of a new block."""
    weight = lookup.weight(index)
    return {
        entry.name: torch.zeros(
            weight.shape[0],
            1 if entry.is_per_row else weight.shape[1],
            dtype=entry.dtype,
            device=weight.device,
        )
        for entry in values.own_states
    }
