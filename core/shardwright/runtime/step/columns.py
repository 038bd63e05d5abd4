"""Columns of outputs, and moving them between the matrices and buffers that they stand in.

Legend: B batch size, Q units of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts.blocks import Ints

_MOST_KNOWN = 8  # batch sizes whose index is kept


@frozen(eq=False)
class Columns:
    """Columns of outputs that come home in one tensor.

    In a pooled collection that is ``[B, width]``, the columns side by side in this order. In another it is one
    output's, ``[N, D]``, a row for each of the feature's ids, and there is one element.

    Args:
        output: whose columns, ``[n]``.
        start: the first of them in the output, ``[n]``.
        stop: the one after the last, ``[n]``.
    """

    output: Ints
    start: Ints
    stop: Ints

    @property
    def width(self) -> int:
        """How many columns."""
        return int((self.stop - self.start).sum())


@frozen(eq=False)
class Placement:
    """Where columns stand in a flat buffer of matrices, one after the other, that all have ``B`` rows.

    Args:
        matrix: columns of all matrices before that in which each column's piece stands, ``[n]``.
        width: columns of that matrix, ``[n]``.
        offset: first column in it, ``[n]``.
    """

    matrix: Ints
    width: Ints
    offset: Ints

    @classmethod
    def in_one(cls, offset: Ints, width: int) -> Placement:
        """In a single matrix."""
        return cls(np.zeros_like(offset), np.full_like(offset, width), offset)

    @classmethod
    def in_a_row(cls, widths: Ints, matrix: Ints, num_matrices: int) -> Placement:
        """Side by side in matrices of their own.

        Args:
            widths: of each piece, ``[n]``.
            matrix: the number of each one's matrix, rising, ``[n]``.
            num_matrices: how many there are.
        """
        total = np.bincount(matrix, widths, num_matrices).astype(np.int64)
        before = np.cumsum(total) - total
        return cls(before[matrix], total[matrix], np.cumsum(widths) - widths - before[matrix])


Room = Callable[[int], Tensor]
"""Makes memory for so many float32 values."""


def selected(rows: Tensor, index: Tensor, room: Room | None = None) -> Tensor:
    """Some rows of a matrix, flat; made in a room if there is one."""
    if room is None:
        return rows.index_select(0, index).view(-1)
    made = room(len(index) * rows.shape[1])
    torch.index_select(rows, 0, index, out=made.view(len(index), rows.shape[1]))
    return made


class Move:
    """A copy of columns from one placement to another, in one call, whatever the number of columns and matrices.

    Columns are moved in units: as many at once as all pieces begin at and have multiples of.

    Args:
        widths: columns of each piece, ``[n]``.
        source: where they stand.
        target: where they go; that is filled from end to end.
    """

    def __init__(self, widths: Ints, source: Placement, target: Placement) -> None:
        widths, source, target = _merged(widths, source, target)
        edges = [
            widths,
            source.matrix,
            source.width,
            source.offset,
            target.matrix,
            target.width,
            target.offset,
        ]
        self.unit = int(np.gcd.reduce(np.concatenate(edges))) or 1
        units = widths // self.unit
        self._source, self._target = (_in_units(place, units, self.unit) for place in (source, target))
        self._known: dict[int, Tensor | slice] = {}

    def __call__(self, flat: Tensor, size: int, room: Room | None = None) -> Tensor:
        """The columns of ``size`` rows where they go, flat; not copied where they stand as they should.

        Args:
            flat: where they stand.
            size: rows.
            room: makes the memory that they are copied to.
        """
        index = self._index(size, flat.device)
        if isinstance(index, slice):
            return flat[index]
        units = flat.view(flat.numel() // self.unit, self.unit)
        return selected(units, index, room)

    def _index(self, size: int, device: torch.device) -> Tensor | slice:
        """For each unit of the target, which of the source it is; a slice of values where they are one run."""
        if size not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            source, target = (_units_of(place, size) for place in (self._source, self._target))
            index = np.empty(source.size, dtype=np.int64)
            index[target.reshape(-1)] = source.reshape(-1)
            first = int(index[0]) if len(index) else 0
            is_run = np.array_equal(index, np.arange(first, first + len(index)))
            run = slice(first * self.unit, (first + len(index)) * self.unit)
            self._known[size] = run if is_run else torch.from_numpy(index).to(device)
        return self._known[size]


def _merged(widths: Ints, source: Placement, target: Placement) -> tuple[Ints, Placement, Placement]:
    """Pieces that stand side by side in source and target as one, so that units are as large as can be."""
    if not len(widths):
        return widths, source, target
    begins = np.ones(len(widths), dtype=bool)
    begins[1:] = False
    for place in (source, target):
        begins[1:] |= np.diff(place.matrix) != 0
        begins[1:] |= place.offset[1:] != place.offset[:-1] + widths[:-1]
    first = np.flatnonzero(begins)
    source, target = (
        Placement(own.matrix[first], own.width[first], own.offset[first]) for own in (source, target)
    )
    return np.add.reduceat(widths, first), source, target


def _in_units(place: Placement, units: Ints, unit: int) -> Placement:
    """The placement of each unit, where pieces have so many: ``[Q]``."""
    inside = np.arange(units.sum()) - np.repeat(np.cumsum(units) - units, units)
    matrix, width, offset = (
        np.repeat(own // unit, units) for own in (place.matrix, place.width, place.offset)
    )
    return Placement(matrix, width, offset + inside)


def _units_of(place: Placement, size: int) -> Ints:
    """Where each unit of each sample stands: ``[B, Q]``."""
    found: Ints = place.matrix * size + place.offset + np.arange(size)[:, None] * place.width
    return found


def side_by_side(columns: Iterable[Columns]) -> Columns:
    """Columns of several tensors as those of one."""
    every = list(columns)
    output, start, stop = (
        np.concatenate([getattr(own, name) for own in every]) for name in ("output", "start", "stop")
    )
    return Columns(output, start, stop)
