"""State of sharded tables under the names, shapes and dtypes of the unsharded module.

Gathering is a collective, block by block, so that no more than one whole table and one block are in flight;
loading is not: each rank cuts its own blocks out of the whole tensor.

Legend: R rows of a table, D its columns; C columns of a value that a state keeps per row (D, or 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator
from shardwright.contracts.row_format import FloatRows, RowFormat
from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Block
from shardwright.planning.layouts.stored_rows import is_stored_by_index, runs_of
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.meeting import Meeting
from shardwright.runtime.sharded.tables.blocked_tensor import (
    PIECE_BYTES,
    BlockedTensor,
    BlockForm,
    Piece,
    own_storage,
)
from shardwright.runtime.step.kernel_groups import kernel_of, rows_of_parts


@frozen(eq=False)
class LocalBlock:
    """A block of a table on this rank, its number in its lookup, and the lookup's number."""

    block: Block
    index: int
    lookup: int


def _sliced(rows: Tensor, block: Block) -> Tensor:
    return rows[:, _columns(block, rows.shape[1])]


@frozen(eq=False, slots=False)
class TableState:
    """One sharded table: its specification, its part of the plan, and the blocks on this rank."""

    table: TableSpec
    sharding: ParameterSharding
    local: Sequence[LocalBlock]
    meeting: Meeting
    device: torch.device

    @property
    def communicator(self) -> Communicator:
        """The ranks that it is sharded over."""
        return self.meeting.env.communicator

    @cached_property
    def _layout(self) -> bytes:
        return self.sharding.digest()

    @cached_property
    def row_format(self) -> RowFormat:
        """The format of its rows."""
        found = kernel_of(self.sharding.compute_kernel).row_format(self.table.data_type)
        assert found is not None  # the engine has asked the kernel
        return found

    @property
    def is_float(self) -> bool:
        """True if its rows are floats of torch, of which any columns are a slice."""
        return isinstance(self.row_format, FloatRows)

    def check_optimizer_state(self, local: LocalBlock, name: str, value: Tensor) -> None:
        """Check that a state that an optimizer keeps of a block has a value for each element, or for each row.

        Args:
            local: the block.
            name: name of the state.
            value: the state.

        Raises:
            UnsupportedError: it is not known which rows and columns it is of.
        """
        rows, columns = local.block.num_rows, local.block.num_columns
        if tuple(value.shape) not in ((rows, columns), (rows, 1)):
            raise UnsupportedError(
                f"table {self.table.describe()}: its optimizer's state {name!r} has the shape {list(value.shape)} on a "
                f"block of {rows} x {columns}, so that it is not known which rows and columns it is of"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its stored rows."""
        found = getattr(torch, self.row_format.torch_name)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def row_width(self) -> int:
        """Elements of a stored row of the whole table."""
        return self._width(self.table.embedding_dim)

    def takes(self, shape: Sequence[int], width: int) -> bool:
        """Return whether values of so many rows may be loaded: of ids that are keys any number, of others all.

        Args:
            shape: shape of the values.
            width: elements that a row must have.
        """
        rows = (
            shape[0]
            if self.sharding.layout.row_map.takes_any_id and len(shape)
            else self.table.num_embeddings
        )
        return tuple(shape) == (rows, width)

    def _width(self, num_columns: int) -> int:
        return self.row_format.row_bytes(num_columns) // self.dtype.itemsize

    @property
    def is_parted(self) -> bool:
        """True if ranks have different parts of it, so that a rank's gradient is not the whole table's."""
        return self.communicator.world_size > 1 and not self.sharding.layout.is_replicated

    @property
    def most_blocks(self) -> int:
        """The blocks of the rank that has most, of those with rows."""
        columns = self.sharding.layout.columns
        has_rows = rows_of_parts(self.sharding.layout.row_map)[columns.part] > 0
        return int(np.bincount(columns.rank[has_rows], minlength=1).max())

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """The dimensions along which it is cut: 0 for rows, 1 for columns."""
        columns = self.sharding.layout.columns
        has_rows = rows_of_parts(self.sharding.layout.row_map) > 0
        is_cut = has_rows.sum() > 1, (columns.stop - columns.start < self.table.embedding_dim).any()
        return tuple(np.flatnonzero(is_cut).tolist())

    def rows(self, values: Callable[[LocalBlock], Tensor]) -> BlockedTensor:
        """The whole table's stored rows as this rank's blocks of them, shared storage; no collective.

        Args:
            values: function that returns a local block's stored rows.
        """
        rows = self.tensor(values, columns=self.row_width, dtype=self.dtype)
        if self.is_float:
            return rows
        why = (
            f"table {self.table.describe()}: rows of {self.row_format.name} are not saved in blocks: save a checkpoint "
            "of the float model, and pack what it loads; or save full_state_dict()"
        )
        return rows.with_form(evolve(rows.form, whole=self._gather_packed, no_reading=why, no_writing=why))

    def tensor(
        self, values: Callable[[LocalBlock], Tensor], *, columns: int, dtype: torch.dtype
    ) -> BlockedTensor:
        """The whole ``[R, C]`` tensor as this rank's blocks of it, shared storage; no collective.

        Args:
            values: function that returns a local block's tensor ``[rows, C of the block]``.
            columns: ``C``: ``D``, or 1 for one value a row (the same in every column block).
            dtype: dtype of the tensor.
        """
        form = BlockForm(
            lambda values: self.pieces(values, columns),
            lambda values: self._gather(values, columns, dtype),
            self.local,
            self._layout,
            self,
            f"table {self.table.describe()}: ",
            self._no_reading,
            self._no_reading if self.is_stored_by_index else "",
        )
        own, shape = [values(local).detach() for local in self.local], (self.table.num_embeddings, columns)
        return BlockedTensor(shape, dtype, self.device, own, form)

    def shown(self, value: BlockedTensor) -> Tensor:
        """A sharded tensor as state dicts have it: over several ranks itself, in one process plain.

        Args:
            value: the tensor, of this table.
        """
        if self.meeting.env.everyone.world_size > 1:
            return value
        # Rows of keys are made anew when they are loaded, which would clear what shares their memory.
        has_keys = self.sharding.layout.row_map.takes_any_id
        for local, own in value.blocks:
            if own.shape == value.shape and local.block.rows.bounds is not None and not has_keys:
                return own
        return value.full_tensor()

    def number(self, value: Tensor | None) -> BlockedTensor:
        """A number that is the same in all blocks, such as that of updates; no collective.

        Args:
            value: the number; none on a rank without a block.
        """
        owner = next(block.rank for block in self.sharding.layout.blocks if block.num_rows)
        assert owner is not None  # the plan's validator
        is_written = owner == self.communicator.rank

        def whole(values: Sequence[Tensor]) -> Tensor:
            self._meet()
            return torch.tensor(
                self.communicator.broadcast_object(float(values[0]) if values else 0.0, owner)
            )

        form = BlockForm(
            lambda values: [Piece((), (), own, is_written) for own in values],
            whole,
            self.local[:1],
            self._layout,
            owner=f"table {self.table.describe()}: ",
        )
        return BlockedTensor((), torch.float32, None, [] if value is None else [value], form)

    def _meet(self) -> None:
        """Wait for the other ranks, which gather too."""
        self.meeting.to_gather(f"gathering of table {self.table.name!r}")

    def _gather(self, values: Sequence[Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """The whole ``[R, C]`` tensor, block by block, so that no more than it and one block are in flight."""
        whole = torch.empty(self.table.num_embeddings, columns, dtype=dtype)
        for block, piece in self._every_block(values, dtype, columns):
            whole[row_index(block), _columns(block, columns)] = piece.to(whole.device)
        return whole

    def _gather_packed(self, values: Sequence[Tensor]) -> Tensor:
        """The whole table's stored rows, which columns are no slice of."""
        wholes: dict[tuple[int, int], Tensor] = {}  # of each range of columns
        for block, piece in self._every_block(values, self.dtype):
            span = block.columns.start, block.columns.stop
            whole = wholes.setdefault(
                span, torch.empty(self.table.num_embeddings, piece.shape[1], dtype=self.dtype)
            )
            whole[row_index(block)] = piece.to(whole.device)
        spans = sorted(wholes)
        return self.row_format.join([wholes[span] for span in spans], [stop - start for start, stop in spans])

    def _every_block(
        self, values: Sequence[Tensor], dtype: torch.dtype, columns: int = 0
    ) -> Iterator[tuple[Block, Tensor]]:
        """Every block of the table with its values, from the rank that has it; every rank makes this call.

        Args:
            values: values of the blocks here.
            dtype: dtype of them.
            columns: 1 where there is one value a row.
        """
        self._meet()
        mine = {_place(local.block): own for local, own in zip(self.local, values, strict=True)}
        for block in self.sharding.layout.distinct_blocks():
            if block.num_rows == 0 or (columns == 1 and block.columns.start > 0):
                continue
            own = mine.get(_place(block))
            if own is None:
                width = 1 if columns == 1 else self._width(block.num_columns)
                piece = torch.empty(block.num_rows, width, dtype=dtype, device=self.device)
            else:  # of the dtype that the others receive: a backend may end the process where bytes are too many
                piece = own.detach().to(self.device, dtype).contiguous()
            assert block.rank is not None  # the plan's validator
            self.communicator.broadcast(piece, block.rank)
            yield block, piece

    @property
    def is_stored_by_index(self) -> bool:
        """True if rows are stored part after part, with an index of their rows."""
        return is_stored_by_index(self.sharding.layout.row_map)

    @property
    def _no_reading(self) -> str:
        if self.sharding.layout.row_map.takes_any_id:
            why = "its ids are keys, and rows go to the keys that a rank has"
        elif self.is_stored_by_index:
            why = f"the row map {self.sharding.layout.row_map.name!r} stores its rows by an index"
        else:
            return ""
        return (
            f"table {self.table.describe()} is not for torch.distributed.checkpoint alone: {why}. Use "
            "shardwright.save_checkpoint and load_checkpoint"
        )

    def pieces(
        self,
        values: Sequence[Tensor],
        columns: int,
        runs_of_block: Callable[[Block], Iterable[tuple[int, int, int]]] | None = None,
    ) -> Iterator[Piece]:
        """The blocks here in pieces of bounded size, each a box of what is stored.

        Args:
            values: values of the blocks here.
            columns: ``C``.
            runs_of_block: function that gives the runs of a block: the first row of each in what is stored and in the
                block, and its number of rows. By default rows are stored as the table has them.
        """
        row_map = self.sharding.layout.row_map
        for local, own in zip(self.local, values, strict=True):
            span = _columns(local.block, columns)
            is_written = self.is_first_owner(local.block) and (columns > 1 or local.block.columns.start == 0)
            most = max(1, PIECE_BYTES // max(1, (span.stop - span.start) * own.element_size()))
            runs = runs_of_block(local.block) if runs_of_block else runs_of(row_map, local.block.rows.index)
            for stored, first, count in runs:
                for start in range(0, count, most):
                    part = own_storage(own[first + start : first + min(start + most, count)])
                    yield Piece((stored + start, span.start), tuple(part.shape), part, is_written)

    def is_first_owner(self, block: Block) -> bool:
        """True if this rank writes a block: of copies the first in the plan is written."""
        layout = self.sharding.layout
        if not layout.dataflow_of(block).is_replicated:
            return True
        place = _place(block)[:2]
        first = next(other for other in layout.blocks if _place(other)[:2] == place)
        return first.rank == block.rank

    def scatter_rows(
        self,
        whole: Tensor,
        target: Callable[[LocalBlock], Tensor],
        rows_of: Callable[[LocalBlock], Tensor | None] = lambda local: None,
    ) -> None:
        """Copy the local blocks' parts of the whole table's stored rows into their tensors; no collective.

        Args:
            whole: stored rows of the whole table.
            target: function that returns a local block's stored rows.
            rows_of: see :meth:`scatter`.
        """

        def packed(rows: Tensor, block: Block) -> Tensor:
            span = block.columns
            return self.row_format.columns(rows, self.table.embedding_dim, span.start, span.stop)

        self.scatter(whole, target, rows_of, _sliced if self.is_float else packed)

    def scatter(
        self,
        whole: Tensor,
        target: Callable[[LocalBlock], Tensor],
        rows_of: Callable[[LocalBlock], Tensor | None] = lambda local: None,
        columns_of: Callable[[Tensor, Block], Tensor] = _sliced,
    ) -> None:
        """Copy the local blocks' parts of ``whole [R, C]`` into their tensors; no collective.

        Args:
            whole: the whole table's tensor, ``[R, C]``, of a shape that :meth:`takes`.
            target: function that returns a local block's tensor ``[rows, C of the block]``.
            rows_of: function that returns the row of ``whole`` for each row of a block, -1 for none; if it returns
                ``None``, the block's row map determines them.
            columns_of: function that returns a block's columns of some rows; by default they are a slice.
        """
        for local in self.local:
            rows = rows_of(local)
            with torch.no_grad():
                if rows is None:
                    target(local).copy_(columns_of(whole[row_index(local.block)], local.block))
                else:
                    own, here = target(local), rows >= 0
                    own[here] = columns_of(whole[rows[here]], local.block).to(own.device, own.dtype)


def _place(block: Block) -> tuple[int, int, int | None]:
    """Key of a block in its layout; layouts may make new block objects each time they are read."""
    return block.rows.index, block.columns.start, block.rank


def row_index(block: Block) -> slice | Tensor:
    """The rows of the table that a block has."""
    rows = block.rows.rows
    return rows if isinstance(rows, slice) else torch.as_tensor(rows)


def _columns(block: Block, columns: int) -> slice:
    return slice(0, 1) if columns == 1 else slice(block.columns.start, block.columns.stop)
