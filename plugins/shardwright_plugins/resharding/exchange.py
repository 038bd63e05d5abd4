"""Exchanges of rows between the ranks' blocks, a bounded number of rows at a time.

Which bytes stand where in an exchange follows from the plans: sender and receiver go through the same flows in the same
order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from shardwright.planning.layouts.layout import Block
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright_plugins.plan_differences.layout_moves import Flow
from shardwright_plugins.resharding.blocks import (
    MovedValue,
    Place,
    TableMove,
    Values,
    flow_id,
    place_of,
)
from shardwright_plugins.resharding.windows import LocalRows, RowWindow, SharedRows

LABEL = "rows that are resharded"

_Arriving: TypeAlias = tuple[Tensor, LocalRows, int]
"""Columns of a new block, rows of it, and how many of these arrive."""


@define(eq=False)
class RowExchange:
    """The exchanges of one resharding on one rank.

    Args:
        env: the ranks.

    Attributes:
        sent_bytes: bytes that left this rank.
    """

    env: ShardingEnv
    sent_bytes: int = 0
    _buffers: dict[str, Tensor] = field(factory=dict)

    @torch.no_grad()
    def make(self, move: TableMove, flows: Sequence[Flow], start: int, stop: int) -> None:
        """Send rows of this rank's old blocks and receive those of its new ones; one all-to-all a value.

        Args:
            move: the table.
            flows: its flows from or to this rank.
            start: first local row, in each block of the old layout.
            stop: local row after the last.
        """
        shared = list(_shared_rows(move, flows, start, stop))
        for entry in move.values.entries:
            self._move(entry, move, shared)

    def _move(self, entry: MovedValue, move: TableMove, shared: Sequence[tuple[Flow, SharedRows]]) -> None:
        outgoing, incoming = defaultdict[Any, list[Tensor]](list), defaultdict[Any, list[_Arriving]](list)
        for flow, rows in shared:
            source, target = flow.source.rank, flow.target.rank
            if not (flow.carries_row_values if entry.is_per_row else flow.columns):
                continue
            if target != self.env.rank:
                outgoing[target].append(_read(_columns_of(move.sources, flow, flow.source, entry), rows.old))
                continue
            own = _columns_of(move.targets, flow, flow.target, entry)
            if source != self.env.rank:
                incoming[source].append((own, rows.new, rows.count))
                continue
            here = _columns_of(move.sources, flow, flow.source, entry)
            if here.data_ptr() != own.data_ptr():  # else the block stays where it is
                _write(own, rows.new, _read(here, rows.old))
        ranks = range(self.env.world_size)
        if len(ranks) > 1:
            self._exchange(
                entry.dtype, [outgoing[rank] for rank in ranks], [incoming[rank] for rank in ranks]
            )

    def _exchange(
        self,
        dtype: torch.dtype,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[_Arriving]],
    ) -> None:
        send_sizes = [sum(part.nbytes for part in own) for own in outgoing]
        sizes = [sum(count * own.shape[1] * dtype.itemsize for own, _, count in parts) for parts in incoming]
        sent, received = self._buffer("sent", sum(send_sizes)), self._buffer("received", sum(sizes))
        parts = [part.reshape(-1) for own in outgoing for part in own]
        for part, place in zip(parts, sent.view(dtype).split([len(part) for part in parts]), strict=True):
            place.copy_(part)
        self.env.communicator.all_to_all(received, sent, sizes, send_sizes, label=LABEL).wait()
        self.sent_bytes += len(sent)
        values, start = received.view(dtype), 0
        for own, rows, count in (part for parts in incoming for part in parts):
            stop = start + count * own.shape[1]
            _write(own, rows, values[start:stop].view(count, -1))
            start = stop

    def _buffer(self, what: str, num_bytes: int) -> Tensor:
        """Memory for all exchanges: an allocator may keep what is freed, and so a buffer of each."""
        if what not in self._buffers or len(self._buffers[what]) < num_bytes:
            self._buffers.pop(what, None)
            self._buffers[what] = torch.empty(num_bytes, dtype=torch.uint8, device=self.env.device_type)
        return self._buffers[what][:num_bytes]


def _shared_rows(
    move: TableMove, flows: Sequence[Flow], start: int, stop: int
) -> Iterator[tuple[Flow, SharedRows]]:
    """The flows that have rows in a window of the old blocks, each with these."""
    windows: dict[int, RowWindow] = {}
    new_map = None if move.layouts.is_same_map else move.new.layout.row_map
    for flow in flows:
        last = min(stop, flow.source.num_rows)
        if last <= start:
            continue
        if move.is_keyed:
            rows = move.keyed[flow_id(flow)].within(start, last)
        else:
            part = flow.source.rows
            window = windows.setdefault(part.index, RowWindow(part, start, last, new_map))
            rows = window.shared_with(flow.target.rows)
        if rows.count:
            yield flow, rows


def _columns_of(values: Mapping[Place, Values], flow: Flow, block: Block, entry: MovedValue) -> Tensor:
    """A block's values in the columns of a flow."""
    own = values[place_of(block)][entry.name]
    if entry.is_per_row or flow.columns is None:
        return own
    first = block.columns.start
    return own[:, flow.columns.start - first : flow.columns.stop - first]


def _on(rows: LocalRows, values: Tensor) -> Any:
    return rows if isinstance(rows, slice) else torch.from_numpy(rows).to(values.device)


def _read(values: Tensor, rows: LocalRows) -> Tensor:
    return values[_on(rows, values)]


def _write(own: Tensor, rows: LocalRows, values: Tensor) -> None:
    """Copy values to rows of a block; rows of -1 are of keys that get none."""
    if not isinstance(rows, slice) and (rows < 0).any():
        kept = np.flatnonzero(rows >= 0)
        rows, values = rows[kept], _read(values, kept)
    own[_on(rows, own)] = values.to(own.device, own.dtype)
