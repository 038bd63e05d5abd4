"""The blocks of sharded tables on this rank, with all that is known of their rows.

Legend: R rows of a block, C columns of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen
from torch import Tensor, nn

import shardwright as sw
from shardwright_delta.digests import Ints

STATE = "optimizer."
"""Prefix of optimizer states among the values."""


@frozen(eq=False)
class HeldBlock:
    """A block of a table on this rank.

    Args:
        table: the sharded table.
        local: the block among the table's here.
    """

    table: Any
    local: Any

    @property
    def path(self) -> str:
        """The table's path in the model."""
        path: str = self.table.state.table.path
        return path

    @property
    def block(self) -> sw.Block:
        """The block's rows and columns."""
        block: sw.Block = self.local.block
        return block

    @property
    def is_keyed(self) -> bool:
        """True if ids are keys, whose rows an index finds."""
        return bool(self.table.row_state)

    @property
    def is_written(self) -> bool:
        """True on the rank that writes the block; of copies one rank does."""
        state = self.table.state
        return state.communicator.rank == 0 or not state.sharding.layout.dataflow_of(self.block).is_replicated

    @property
    def index(self) -> sw.RowIndex:
        """The index of a block whose ids are keys."""
        index: sw.RowIndex = self.table.index_of(self.local)
        return index

    @property
    def lookup(self) -> sw.Lookup:
        """The lookup that holds the block."""
        lookup: sw.Lookup = self.table.lookup_of(self.local)
        return lookup

    @property
    def step(self) -> float | None:
        """The number of updates done, where the optimizer counts them."""
        step = self.lookup.optimizer_state(self.local.index).get("step")
        return None if step is None else float(step)

    def values(self) -> dict[str, Tensor]:
        """Weights, optimizer states and what the index knows, in shared storage: ``[R, C]`` each."""
        states = self.lookup.optimizer_state(self.local.index)
        known: Mapping[str, Tensor] = self.index.state() if self.is_keyed else {}
        return {
            "weight": self.table.weight_of(self.local).detach(),
            **{STATE + name: value for name, value in states.items() if value.dim()},
            **known,
        }

    def rows_and_ids(self) -> tuple[Tensor | slice, Ints]:
        """The rows that belong to ids, and these: keys, or rows of the table."""
        if self.is_keyed:
            rows = self.index.rows_in_use()
            return rows, self.index.state()[self.table.row_state[0]].flatten()[rows].cpu().numpy()
        own = self.block.rows.rows
        ids = np.arange(self.table.state.table.num_embeddings)[own] if isinstance(own, slice) else own
        return slice(None), np.asarray(ids, dtype=np.int64)

    def holds(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """A mask of the ids that belong to the block's rows."""
        return np.asarray(self.block.rows.row_map.part_of(ids) == self.block.rows.index)


def held_blocks(model: nn.Module) -> Iterator[HeldBlock]:
    """List the blocks of a model's sharded tables on this rank.

    Raises:
        InvalidInputError: the model has no sharded collection.
    """
    return (HeldBlock(table, local) for table in sharded_tables(model) for local in table.state.local)


def sharded_tables(model: nn.Module) -> list[Any]:
    """List the sharded tables of a model, whether this rank has blocks of them or not.

    Args:
        model: a ``DistributedModelParallel``, or any module with sharded collections.

    Raises:
        InvalidInputError: the model has no sharded collection.
    """
    kinds = (sw.ShardedEmbeddingBagCollection, sw.ShardedEmbeddingCollection)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    tables = [table for one in modules if isinstance(one, kinds) for table in one.sharded_tables.values()]
    if not tables:
        raise sw.InvalidInputError(
            f"{type(model).__name__} has no sharded collection, whose rows could be told or set: give the "
            "DistributedModelParallel around it",
            subject="model",
        )
    return tables
