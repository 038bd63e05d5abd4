"""Tables on their way from one plan to another, and the values of their blocks: weights and optimizer states.

Legend: D columns of a table, N rows of a flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.errors import DistributedError
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.layout import Block
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.collections.sharded_collection import (
    ShardedCollection,
    ShardingInputs,
    engine_of,
)
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable, local_blocks
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright.runtime.step.engine import CollectionEngine
from shardwright.runtime.step.kernel_groups import kernel_of
from shardwright_plugins.plan_differences.layout_moves import Flow, LayoutMove
from shardwright_plugins.resharding.unbuilt import UnbuiltLookup
from shardwright_plugins.resharding.users import Holder
from shardwright_plugins.resharding.windows import SharedRows

WEIGHT, STEP = "weight", "step"

Place: TypeAlias = tuple[int, int]
"""A block on one rank: its row part, and its first column."""

FlowId: TypeAlias = tuple[int | None, Place, int | None, Place]
"""A flow of a table: ranks and places of its blocks."""

LookupId: TypeAlias = tuple[int, int]
"""A lookup of one rank: its collection's number, and its own."""


def place_of(block: Block) -> Place:
    """The place of a block among those of its table on one rank."""
    return block.rows.index, block.columns.start


def flow_id(flow: Flow) -> FlowId:
    """The key of a flow among those of its table."""
    return flow.source.rank, place_of(flow.source), flow.target.rank, place_of(flow.target)


@frozen(eq=False)
class KeyedRows:
    """Rows of one flow of a table whose rows are found by keys, by their local rows in its blocks.

    Args:
        old: local rows of the source, rising: ``[N]``.
        new: local rows of the target, -1 of keys that get none; on other ranks than its own, zeros. ``[N]``.
    """

    old: Ints
    new: Ints

    def within(self, start: int, stop: int) -> SharedRows:
        """Those that are in a window of the source."""
        first, last = np.searchsorted(self.old, (start, stop))
        return SharedRows(self.old[first:last], self.new[first:last], int(last - first))


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

    @property
    def own_states(self) -> list[MovedValue]:
        """States that the user's optimizer keeps."""
        return [entry for entry in self.entries if entry.name != WEIGHT] if self.optimizer else []


Values: TypeAlias = dict[str, Tensor]
"""A block's tensors ``[rows, columns]`` or ``[rows, 1]``, by the names of entries."""


@define(eq=False, slots=False)
class ModuleMove:
    """A collection on its way from one plan to another.

    Args:
        number: its place among those that change.
        module: the collection.
        inputs: its part of the new plan.
    """

    number: int
    module: ShardedCollection
    inputs: ShardingInputs

    @cached_property
    def unbuilt(self) -> CollectionEngine:
        """The engine of the new plan, over lookups that hold nothing."""
        return engine_of(self.inputs, self.module.engine, UnbuiltLookup)

    @cached_property
    def kept(self) -> dict[int, int]:
        """The lookups that stay as they are: numbers of the new engine's, and what they were in the old one."""
        old = [(group.kernel_name, group.blocks) for group in self.module.engine.groups]
        new = [(group.kernel_name, group.blocks) for group in self.unbuilt.groups]
        return {number: old.index(group) for number, group in enumerate(new) if group in old}

    @cached_property
    def blocks(self) -> dict[str, list[LocalBlock]]:
        """The new blocks here, by table."""
        return local_blocks(self.unbuilt)


@define(eq=False, slots=False)
class TableMove:
    """A table on its way from one plan to another, as one rank has it.

    Args:
        owner: its collection.
        spec: the table.
        values: the values that move; none of a table without rows.
        old: its part of the plan until now.
        before: its old blocks here.

    Attributes:
        sources: the values of the old blocks here, until they have left.
        targets: those of the new blocks here, once there are such.
        row_states: what the indexes know of the rows of the old blocks here, where rows are found by keys.
        keyed: rows of each flow from or to this rank, likewise.
    """

    owner: ModuleMove
    spec: TableSpec
    values: TableValues
    old: ParameterSharding
    before: Sequence[LocalBlock]
    sources: dict[Place, Values] = field(factory=dict, init=False)
    targets: dict[Place, Values] = field(factory=dict, init=False)
    row_states: dict[Place, Mapping[str, Tensor]] = field(factory=dict, init=False)
    keyed: dict[FlowId, KeyedRows] = field(factory=dict, init=False)

    @property
    def new(self) -> ParameterSharding:
        """Its part of the new plan."""
        return self.owner.inputs.params[self.spec.name]

    @property
    def after(self) -> Sequence[LocalBlock]:
        """Its new blocks here."""
        return self.owner.blocks.get(self.spec.name, ())

    @property
    def table(self) -> ShardedTable:
        """The table as it is sharded now."""
        return self.owner.module.sharded_tables[self.spec.name]

    @cached_property
    def row_state(self) -> Sequence[str]:
        """The names of what the kernel knows of each row, where rows are found by keys; else empty."""
        return kernel_of(self.old.compute_kernel).row_state if self.old.layout.row_map.takes_any_id else ()

    @property
    def is_keyed(self) -> bool:
        """True if its rows are found by keys."""
        return bool(self.row_state)

    @cached_property
    def is_moving(self) -> bool:
        """True if rows go to other blocks; else only lookups may be new."""
        return self.old.layout.digest() != self.new.layout.digest()

    @cached_property
    def is_kept(self) -> bool:
        """True if all of its blocks here stay where they are, in memory too."""
        return not self.leaving and not self.coming

    @cached_property
    def leaving(self) -> set[LookupId]:
        """The lookups here with old blocks of it that do not stay."""
        kept = set(self.owner.kept.values())
        return {(self.owner.number, own.lookup) for own in self.before if own.lookup not in kept}

    @cached_property
    def coming(self) -> set[LookupId]:
        """The lookups here with new blocks of it that are allocated."""
        return {(self.owner.number, own.lookup) for own in self.after if own.lookup not in self.owner.kept}

    @cached_property
    def layouts(self) -> LayoutMove:
        """The move of its rows and columns."""
        has_row_values = any(entry.is_per_row for entry in self.values.entries)
        return LayoutMove(self.old.layout, self.new.layout, has_row_values)

    def piece(self, most_bytes: int) -> tuple[int, int]:
        """Rows of each old block that move at a time, and the most bytes that a rank then sends or receives at once.

        Args:
            most_bytes: bytes to stay within; a single row may have more.
        """
        dim = self.spec.embedding_dim
        widest = max((entry.row_bytes(dim) for entry in self.values.entries), default=1)
        row_bytes = self.layouts.rows_at_once * widest
        rows = max(1, min(most_bytes // row_bytes, self.layouts.longest))
        return rows, rows * row_bytes

    def extra_bytes(self, local: Sequence[LocalBlock]) -> int:
        """Bytes beside some blocks here: what the user's optimizer keeps of them, and keys on their way, about."""
        if self.is_kept:
            return 0
        states = self.values.own_states
        kept = sum(
            own.block.num_rows * entry.row_bytes(own.block.num_columns) for own in local for entry in states
        )
        # Row numbers and keys are there twice, with those found for them; int64.
        keys = 2 * 8 * (1 + len(self.row_state)) if self.is_keyed else 0
        return kept + keys * sum(own.block.num_rows for own in (*self.before, *self.after))


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
    for name, value in own.items():
        table.state.check_optimizer_state(local, name, value)
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
    rows, columns = lookup.weight(index).shape
    device = lookup.weight(index).device
    return {
        entry.name: torch.zeros(rows, 1 if entry.is_per_row else columns, dtype=entry.dtype, device=device)
        for entry in values.own_states
    }
