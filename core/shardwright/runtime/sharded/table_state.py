"""State of sharded tables under the names, shapes and dtypes of the unsharded module.

Gathering is a collective, block by block, so that no more than one whole table and one block are in flight;
loading is not: each rank cuts its own blocks out of the whole tensor.

Legend: R rows of a table, D its columns; C columns of a value that a state keeps per row (D, or 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.layout import Block
from shardwright.planning.plan.plan import ParameterSharding
from shardwright.planning.tables.spec import TableSpec


@frozen(eq=False)
class LocalBlock:
    """A block of a table on this rank: which, and the lookup's number for it."""

    block: Block
    index: int
    lookup: int


@frozen(eq=False)
class TableState:
    """One sharded table: its specification, how it is sharded, and the blocks that are here."""

    table: TableSpec
    sharding: ParameterSharding
    local: Sequence[LocalBlock]
    communicator: Communicator
    device: torch.device

    @property
    def is_parted(self) -> bool:
        """Whether ranks have different parts of it, so that a rank's gradient of it is not the table's."""
        return self.communicator.world_size > 1 and not self.sharding.layout.is_replicated

    def gather(self, values: Callable[[LocalBlock], Tensor], *, columns: int, dtype: torch.dtype) -> Tensor:
        """The whole ``[R, C]`` tensor on every rank, in host memory; every rank makes this call.

        Args:
            values: a local block's tensor ``[rows, C of the block]``.
            columns: ``C``: ``D``, or 1 for a value a row (the same in every column block).
            dtype: of the tensor.
        """
        whole = torch.empty(self.table.num_embeddings, columns, dtype=dtype)
        mine = {_place(local.block): local for local in self.local}
        for block in self.sharding.layout.distinct_blocks():
            if block.num_rows == 0 or (columns == 1 and block.columns.start > 0):
                continue
            piece = self._piece(mine.get(_place(block)), block, values, columns, dtype)
            assert block.rank is not None  # the plan's validator
            self.communicator.broadcast(piece, block.rank)
            whole[_row_index(block), _columns(block, columns)] = piece.to(whole.device)
        return whole

    def _piece(
        self,
        local: LocalBlock | None,
        block: Block,
        values: Callable[[LocalBlock], Tensor],
        columns: int,
        dtype: torch.dtype,
    ) -> Tensor:
        if local is not None:
            # Of the dtype that the others receive: a backend may end the process where bytes are too many.
            return values(local).detach().to(dtype).contiguous()
        width = 1 if columns == 1 else block.num_columns
        return torch.empty(block.num_rows, width, dtype=dtype, device=self.device)

    def scatter(
        self,
        whole: Tensor,
        target: Callable[[LocalBlock], Tensor],
        rows_of: Callable[[LocalBlock], Tensor | None] = lambda local: None,
    ) -> None:
        """Copy the local blocks' parts of ``whole [R, C]`` into their tensors; no collective.

        Args:
            whole: of the table.
            target: a local block's tensor ``[rows, C of the block]``.
            rows_of: where a block's rows are in ``whole``, -1 where nowhere; ``None``: where its row map has them.

        Raises:
            InvalidInputError: the shape is not the table's.
        """
        num_rows, dim = self.table.num_embeddings, self.table.embedding_dim
        if tuple(whole.shape) not in ((num_rows, dim), (num_rows, 1)):
            raise InvalidInputError(
                f"table {self.table.describe()}: the tensor to load has shape {list(whole.shape)}"
            )
        columns = whole.shape[1]
        for local in self.local:
            rows, span = rows_of(local), _columns(local.block, columns)
            with torch.no_grad():
                if rows is None:
                    target(local).copy_(whole[_row_index(local.block), span])
                else:
                    own, here = target(local), rows >= 0
                    own[here] = whole[rows[here], span].to(own.device, own.dtype)


def _place(block: Block) -> tuple[int, int, int | None]:
    """What tells the blocks of a layout apart: they may be made anew each time that one looks at them."""
    return block.rows.index, block.columns.start, block.rank


def _row_index(block: Block) -> slice | Tensor:
    rows = block.rows.rows
    return rows if isinstance(rows, slice) else torch.as_tensor(rows)


def _columns(block: Block, columns: int) -> slice:
    return slice(0, 1) if columns == 1 else slice(block.columns.start, block.columns.stop)
