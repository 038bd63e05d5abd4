"""The lookup: keys become rows of another lookup, whose blocks have one more row, of zeros, for keys that have none.

Legend: N ids, R rows of a block, D columns.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor
from torch.nn.functional import pad

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup, RowIndex
from shardwright.planning.layouts.blocks import Block, ColumnRange
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.runtime.ranks.devices import is_host, sent_to
from shardwright.runtime.sharded.tables.initialization import hashed
from shardwright.runtime.step.segments import starts_of

_STEP = "step"


class IndexedLookup(Lookup):
    """Blocks whose ids are keys.

    Args:
        blocks: specifications of the blocks.
        rows: lookup of their rows, each block with one row more.
        indexes: index of each block.
        columns: names of the columns of ids that each block's index is given.
    """

    def __init__(
        self,
        blocks: Sequence[BlockSpec],
        rows: Lookup,
        indexes: Sequence[RowIndex],
        columns: Sequence[Collection[str]],
    ) -> None:
        self.blocks, self._rows, self._indexes, self._columns = blocks, rows, indexes, columns
        self.states_per_row = rows.states_per_row
        self._sizes = [spec.block.num_rows for spec in blocks]
        self._first_slots = starts_of(np.array([spec.num_slots for spec in blocks]))
        self._first_states = []
        for block in range(len(blocks)):
            rows.weight(block)[-1:].zero_()
            self._first_states.append(
                {name: value[-1:].clone() for name, value in self._states(block).items()}
            )
            for value in (rows.weight(block), *self._states(block).values()):
                if type(value) is Tensor and not value[-1:].any():
                    _give_back(value)

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Sum the rows of each bag; in training rows are born and evicted first."""
        found = self._found(bags, training=training)
        result, saved = self._rows.forward(found, training=training)
        return result, (bags, saved, self._num_evicted) if training else None

    def anticipate(self, saved: Any) -> None:
        """Prepare the backward pass of the rows; if rows are evicted meanwhile, they are prepared again."""
        self._rows.anticipate(saved[1])

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Update; a key whose row was evicted since has none to update."""
        bags, inner, num_evicted = saved
        if num_evicted != self._num_evicted:
            inner = self._rows.prepare(self._found(bags, training=False))
        gradients = self._rows.backward(inner, gradient)
        for block, size in enumerate(self._sizes):
            self._reset(block, slice(size, None))
        return gradients

    def weight(self, block: int) -> Tensor:
        """The rows that keys have or may get."""
        return self._rows.weight(block)[:-1]

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """The optimizer state of these rows."""
        whole = self._rows.optimizer_state(block)
        return {name: value if name == _STEP else value[:-1] for name, value in whole.items()}

    def load_step(self, step: float) -> None:
        """Set the number of updates done."""
        self._rows.load_step(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from now on."""
        self._rows.set_learning_rate(learning_rate)

    def row_index(self, block: int) -> RowIndex:
        """The index of a block; when it is loaded, rows begin anew."""
        return _BlockIndex(self._indexes[block], partial(self._reset, block, slice(None)))

    @property
    def _num_evicted(self) -> int:
        return sum(index.num_evicted for index in self._indexes)

    def _states(self, block: int) -> Mapping[str, Tensor]:
        whole = self._rows.optimizer_state(block)
        return {name: value for name, value in whole.items() if name != _STEP}

    def _found(self, bags: Bags, *, training: bool) -> Bags:
        """The bags with rows for keys; a key without one has the block's last."""
        rows = torch.empty_like(bags.ids)
        spans = self._spans(bags)
        for block, index in enumerate(self._indexes):
            mine = spans[block :: len(self.blocks)]
            columns = {name: _joined(bags.columns[name], mine) for name in self._columns[block]}
            asked: dict[str, Any] = {"columns": columns} if columns else {}
            found, born = index.resolve(_joined(bags.ids, mine), training=training, **asked)
            self._begin(block, born)
            found = found.where(found >= 0, self._sizes[block])
            for span, own in zip(mine, found.split([span.stop - span.start for span in mine]), strict=True):
                rows[span] = own
        return evolve(bags, ids=rows)

    def _spans(self, bags: Bags) -> list[slice]:
        """The ids of each source and block, which follow one another."""
        stops = np.add.reduceat(bags.table, self._first_slots, axis=1).reshape(-1).cumsum()
        if bags.lengths is not None:
            ends = pad(bags.lengths.cumsum(0), (1, 0))
            stops = ends[sent_to(ends.device, stops)].cpu().numpy()
        return [slice(*span) for span in pairwise([0, *stops.tolist()])]

    def _begin(self, block: int, born: Tensor) -> None:
        """Set rows that were born to the values that they begin with."""
        if not len(born):
            return
        self._reset(block, born)
        spec, weight = self.blocks[block], self._rows.weight(block)
        scale = math.sqrt(1 / spec.table.num_embeddings)  # as tables are initialised by default
        keys = next(iter(self._indexes[block].state().values())).flatten()[born]
        values = first_values(keys, spec.block.columns, table=spec.table.name, scale=scale)
        weight[born] = values.to(weight)

    @torch.no_grad()
    def _reset(self, block: int, rows: Tensor | slice) -> None:
        """Zero rows, and put their optimizer state back to what it was at first."""
        self._rows.weight(block)[rows] = 0
        for name, value in self._states(block).items():
            value[rows] = self._first_states[block][name]


def _joined(values: Tensor, spans: Sequence[slice]) -> Tensor:
    return torch.cat([values[span] for span in spans])


class _BlockIndex(RowIndex):
    """An index whose rows are cleared when it is loaded.

    Args:
        index: the index.
        clear: function that clears the rows.
    """

    def __init__(self, index: RowIndex, clear: Callable[[], None]) -> None:
        self._index, self._clear = index, clear

    @property
    def num_evicted(self) -> int:  # type: ignore[override]
        return self._index.num_evicted

    def resolve(self, keys: Tensor, *, training: bool, **further: Any) -> tuple[Tensor, Tensor]:
        return self._index.resolve(keys, training=training, **further)

    def rows_in_use(self) -> Tensor:
        return self._index.rows_in_use()

    def state(self) -> Mapping[str, Tensor]:
        return self._index.state()

    def load(self, state: Mapping[str, Tensor]) -> Tensor:
        self._clear()
        return self._index.load(state)


def _give_back(values: Tensor) -> None:
    """Let the system have the memory of rows that nobody has, until they are written: it is zeros then.

    Pages of which a part belongs to others are left out. Memory that is a file's or a device's stays as it is.
    """
    start, end = values.data_ptr(), values.data_ptr() + values.numel() * values.itemsize
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if is_host(values.device) and values.is_contiguous() and first < last:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
        )


def first_values(keys: Tensor, columns: ColumnRange, *, table: str, scale: float) -> Tensor:
    """Draw the first values of the rows of keys, evenly from ``[-scale, scale)``; they follow from table and key alone.

    Args:
        keys: ``[N]`` int64.
        columns: columns of the block, D of them.
        table: name of the table, so that one key begins otherwise in each.
        scale: end of the range.

    Returns:
        ``[N, D]`` float32, on the CPU.
    """
    places = np.arange(columns.start, columns.stop, dtype=np.uint32)
    drawn = torch.from_numpy(hashed(zlib.crc32(table.encode()), keys.cpu().numpy().view(np.uint64), places))
    return drawn.mul_(2 * scale).sub_(scale)


def with_one_more(spec: BlockSpec) -> BlockSpec:
    """Extend a block by a row for keys that have none."""
    rows = RowsRange(spec.block.num_rows + 1)
    return evolve(spec, block=Block(rows[0], spec.block.columns, spec.block.rank))
