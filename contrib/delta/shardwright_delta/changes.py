"""The rows of a model that changed since a mark.

Legend: R rows of a block that belong to ids, N rows of a record batch, C columns of a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from attrs import frozen
from torch import Tensor, nn

import shardwright as sw
from shardwright_delta.batches import Origin, batch_of
from shardwright_delta.blocks import HeldBlock, held_blocks, sharded_tables
from shardwright_delta.digests import Ints, digests


@frozen(eq=False)
class _Mark:
    """The rows of a block at some time.

    Args:
        ids: ids that had rows: ``[R]``.
        digests: digest of each row: ``[R, 2]``.
    """

    ids: Ints
    digests: Ints

    @classmethod
    def of(cls, held: HeldBlock) -> _Mark:
        rows, ids = held.rows_and_ids()
        return cls(ids, digests(value[rows] for value in held.values().values()))

    def differs(self, before: _Mark) -> npt.NDArray[np.bool_]:
        """A mask of the rows that are new or have other values than before: ``[R]``."""
        if np.array_equal(self.ids, before.ids):
            return np.any(self.digests != before.digests, axis=1)
        if not len(before.ids):
            return np.ones(len(self.ids), dtype=np.bool_)
        order = np.argsort(before.ids)
        places = order[np.searchsorted(before.ids, self.ids, sorter=order).clip(max=len(order) - 1)]
        was_there = before.ids[places] == self.ids
        return ~was_there | np.any(self.digests != before.digests[places], axis=1)


class Changes:
    """The rows of a model's sharded tables that change from mark to mark.

    Rows are compared by digests: a mark costs one pass over the tables, and 24 bytes a row in host memory. A row has
    changed if a bit of its weights has, of the optimizer state that its kernel keeps, or of what an index knows of its
    key.

    Args:
        model: a ``DistributedModelParallel``, or any module with sharded collections. The first mark is made now.

    Raises:
        InvalidInputError: the model has no sharded collection, so that no change of its would be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mark()

    def mark(self) -> None:
        """Set the mark: what changed before is in no increment."""
        self._marks, self._layouts = self._now(), self._layouts_now()

    def take(self) -> list[pa.RecordBatch]:
        """Return this rank's rows that changed since the mark, and set a new mark; no rank waits for another.

        Returns:
            A record batch for each block with changed rows, and one for each with keys that were evicted.

        Raises:
            UnsupportedError: the model was resharded since the mark.
        """
        layouts = self._layouts_now()
        tables = sorted(path for path in layouts if layouts[path] != self._layouts[path])
        if tables:  # on all ranks alike, also on those that have no block of them
            raise sw.UnsupportedError(
                f"tables {', '.join(tables)} were resharded since the mark, so that it is not known which rows "
                "changed: save a checkpoint as a new base, and mark()"
            )
        now = self._now()
        batches = [
            batch
            for held in _written(self._model)
            for batch in _batches(held, now[held.path, held.block], self._marks[held.path, held.block])
        ]
        self._marks = now
        return batches

    def _layouts_now(self) -> dict[str, sw.Layout]:
        return {table.state.table.path: table.state.sharding.layout for table in sharded_tables(self._model)}

    def _now(self) -> dict[tuple[str, sw.Block], _Mark]:
        return {(held.path, held.block): _Mark.of(held) for held in _written(self._model)}


def every_row(model: nn.Module) -> list[pa.RecordBatch]:
    """Return this rank's rows, those of all ids that have one: an increment from nothing on, for :func:`replay`.

    Args:
        model: a ``DistributedModelParallel``, or any module with sharded collections; no rank waits for another.

    Returns:
        A record batch for each block with rows.

    Raises:
        InvalidInputError: the model has no sharded collection.
    """
    nothing = _Mark(np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.int64))
    return [batch for held in _written(model) for batch in _batches(held, _Mark.of(held), nothing)]


def _written(model: nn.Module) -> Iterator[HeldBlock]:
    """The blocks that this rank writes."""
    return (held for held in held_blocks(model) if held.is_written)


def _batches(held: HeldBlock, now: _Mark, before: _Mark) -> Iterator[pa.RecordBatch]:
    columns, changed = held.block.columns, np.flatnonzero(now.differs(before))
    origin = Origin(held.path, (columns.start, columns.stop), held.step)
    if len(changed):
        rows, _ = held.rows_and_ids()
        places = changed if isinstance(rows, slice) else rows.cpu().numpy()[changed]
        values = {name: _chosen(value, places) for name, value in held.values().items()}
        yield batch_of(origin, now.ids[changed], values)
    gone = np.setdiff1d(before.ids, now.ids) if held.is_keyed else changed[:0]
    if len(gone):
        yield batch_of(origin, gone, {})


def _chosen(value: Tensor, places: Ints) -> Tensor:
    return value[places].cpu()
