"""Rows on their way: windows of tables joined to pieces of bounded size, an all-to-all for each.

Which bytes stand where in a piece follows from the plans: sender and receiver go through the same flows in the same
order. A chunk is one entry of one flow in one window; it begins at a multiple of eight bytes.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from shardwright.planning.layouts.moves import Flow, LocalRows, RowWindow
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.resharding.blocks import MovedValue, TableMove, place_of
from shardwright.runtime.sharded.resharding.keyed import FlowId, KeyedRows, flow_id

LABEL = "rows that are resharded"
_ALIGNED = 8  # bytes: any dtype may begin there


@frozen(eq=False)
class Window:
    """Rows of every block of one table that move together.

    Args:
        table: the table, by number.
        start: first local row, in each block of the old layout.
        stop: local row after the last.
        num_bytes: most that a rank sends or receives for it.
        is_last: all rows of the table have moved after it.
    """

    table: int
    start: int
    stop: int
    num_bytes: int
    is_last: bool


def pieces_of(
    moves: Sequence[TableMove], is_moving: Sequence[bool], piece_bytes: int
) -> Iterator[list[Window]]:
    """The windows of all tables that move in order, joined to pieces; a single row may be more than a piece."""
    piece: list[Window] = []
    for window in _windows(moves, is_moving, piece_bytes):
        if piece and sum(other.num_bytes for other in piece) + window.num_bytes > piece_bytes:
            yield piece
            piece = []
        piece.append(window)
    if piece:
        yield piece


def _windows(moves: Sequence[TableMove], is_moving: Sequence[bool], piece_bytes: int) -> Iterator[Window]:
    for table, move in enumerate(moves):
        if not is_moving[table]:
            continue
        layouts = move.layouts
        row_bytes = layouts.rows_at_once * (
            move.values.row_bytes(move.spec.embedding_dim) + _ALIGNED * len(move.values.entries)
        )
        most = max(1, piece_bytes // max(1, row_bytes))
        for start in range(0, layouts.longest, most):
            stop = min(start + most, layouts.longest)
            yield Window(table, start, stop, row_bytes * (stop - start), stop == layouts.longest)


@frozen(eq=False)
class _Chunk:
    """One entry of one flow in one window.

    Args:
        entry: the value that travels.
        values: the block's tensor, where it is here.
        rows: rows of it.
        columns: columns of it.
        shape: rows and columns that travel.
        may_drop_rows: rows of -1 are of keys that get no row.
    """

    entry: MovedValue
    values: Tensor
    rows: LocalRows
    columns: slice
    shape: tuple[int, int]
    may_drop_rows: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes in the piece, filled up."""
        exact = self.shape[0] * self.shape[1] * self.entry.dtype.itemsize
        return -(-exact // _ALIGNED) * _ALIGNED

    def read(self) -> Tensor:
        """The values, ``[rows, columns]``."""
        own = self.values[:, self.columns]
        return own[self.rows] if isinstance(self.rows, slice) else own.index_select(0, _on(self.rows, own))

    def write(self, values: Tensor) -> None:
        """Take values over, ``[rows, columns]``."""
        own = self.values[:, self.columns]
        if isinstance(self.rows, slice):
            own[self.rows] = values.to(own.device, own.dtype)
            return
        rows = _on(self.rows, own)
        if self.may_drop_rows:
            rows, values = rows[rows >= 0], values[_on(self.rows >= 0, values)]
        own[rows] = values.to(own.device, own.dtype)

    def put(self, piece: Tensor) -> None:
        """Write the values into their bytes of a piece."""
        exact = self.shape[0] * self.shape[1] * self.entry.dtype.itemsize
        place = piece[:exact].view(self.entry.dtype).view(self.shape)
        place.copy_(self.read())

    def take(self, piece: Tensor) -> None:
        """Read the values from their bytes of a piece."""
        exact = self.shape[0] * self.shape[1] * self.entry.dtype.itemsize
        self.write(piece[:exact].view(self.entry.dtype).view(self.shape))


def _on(rows: Any, values: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(values.device)


@define(eq=False)
class RowExchange:
    """The exchanges of one resharding on one rank.

    Args:
        env: the ranks.
        moves: the tables.

    Attributes:
        sent_bytes: bytes that left this rank.
        keyed: rows of each flow of tables whose rows are found by keys, by the tables' numbers.
    """

    env: ShardingEnv
    moves: Sequence[TableMove]
    sent_bytes: int = 0
    keyed: dict[int, dict[FlowId, KeyedRows]] = field(factory=dict)
    _flows: dict[int, list[Flow]] = field(factory=dict)
    _rooms: dict[str, Tensor] = field(factory=dict)

    @torch.no_grad()
    def make(self, piece: Sequence[Window]) -> None:
        """One all-to-all: rows of this rank's old blocks go out, those of its new ones come in."""
        outgoing: list[list[_Chunk]] = [[] for _ in range(self.env.world_size)]
        incoming: list[list[_Chunk]] = [[] for _ in range(self.env.world_size)]
        for window in piece:
            for flow, sent, received in self._chunks(window):
                if flow.source.rank == flow.target.rank:
                    _copy(sent, received)
                elif sent:
                    outgoing[_known(flow.target.rank)] += sent
                else:
                    incoming[_known(flow.source.rank)] += received
        if self.env.world_size > 1:
            self._exchange(outgoing, incoming)

    def _exchange(self, outgoing: Sequence[Sequence[_Chunk]], incoming: Sequence[Sequence[_Chunk]]) -> None:
        send_splits, splits = (
            [sum(c.num_bytes for c in own) for own in side] for side in (outgoing, incoming)
        )
        sent = self._room("sent", sum(send_splits))
        start = 0
        for chunk in (chunk for own in outgoing for chunk in own):
            chunk.put(sent[start : start + chunk.num_bytes])
            start += chunk.num_bytes
        received = self._room("received", sum(splits))
        work = self.env.communicator.all_to_all(received, sent, splits, send_splits, label=LABEL)
        work.wait()
        self.sent_bytes += len(sent)
        start = 0
        for chunk in (chunk for own in incoming for chunk in own):
            chunk.take(received[start : start + chunk.num_bytes])
            start += chunk.num_bytes

    def _room(self, what: str, num_bytes: int) -> Tensor:
        """Memory for a piece, the same for all: an allocator may keep what is freed, and so one of each piece."""
        if what not in self._rooms or len(self._rooms[what]) < num_bytes:
            self._rooms.pop(what, None)
            self._rooms[what] = torch.empty(num_bytes, dtype=torch.uint8, device=self.env.device_type)
        return self._rooms[what][:num_bytes]

    def _chunks(self, window: Window) -> Iterator[tuple[Flow, list[_Chunk], list[_Chunk]]]:
        """The flows of a window that this rank is in: what it sends by each, and what it receives."""
        move = self.moves[window.table]
        if window.table not in self._flows:
            self._flows = {window.table: list(move.layouts.flows(self.env.rank))}
        is_same_map = move.layouts.is_same_map
        rows_of: dict[int, RowWindow] = {}
        for flow in self._flows[window.table]:
            part = flow.source.rows
            stop = min(window.stop, flow.source.num_rows)
            if stop <= window.start:
                continue
            if move.is_keyed:
                shared = self.keyed[window.table][flow_id(flow)].within(window.start, stop)
            else:
                rows = rows_of.setdefault(part.index, RowWindow(part, window.start, stop))
                shared = rows.shared_with(flow.target.rows, is_same_map=is_same_map)
            if not shared.count:
                continue
            sides = (
                (move.sources, flow.source, shared.old),
                (move.targets, flow.target, shared.new),
            )
            sent, received = (
                _chunks_of(move, flow, values.get(place_of(block)), block.columns.start, places, shared.count)
                if block.rank == self.env.rank
                else []
                for values, block, places in sides
            )
            yield flow, sent, received


def _chunks_of(
    move: TableMove, flow: Flow, values: Any, first_column: int, rows: LocalRows, count: int
) -> list[_Chunk]:
    """The chunks of a flow in one window, in the order of the entries."""
    assert values is not None  # blocks that the plans have on this rank
    chunks = []
    for entry in move.values.entries:
        if entry.is_per_row and flow.carries_row_values:
            chunks.append(_Chunk(entry, values[entry.name], rows, slice(0, 1), (count, 1), move.is_keyed))
        elif not entry.is_per_row and flow.columns is not None:
            own = slice(flow.columns.start - first_column, flow.columns.stop - first_column)
            shape = count, len(flow.columns)
            chunks.append(_Chunk(entry, values[entry.name], rows, own, shape, move.is_keyed))
    return chunks


def _copy(sent: Sequence[_Chunk], received: Sequence[_Chunk]) -> None:
    """Rows that stay on this rank; those of a block that stays as it is are where they go."""
    for source, target in zip(sent, received, strict=True):
        if source.values.data_ptr() != target.values.data_ptr():
            target.write(source.read())


def _known(rank: int | None) -> int:
    assert rank is not None  # a plan's blocks have ranks
    return rank
