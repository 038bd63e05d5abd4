"""Columns of outputs, and copies of them between matrices and flat buffers.

Legend: B batch size, n pieces (runs of columns), Q units of one sample. A unit is a number of neighbouring columns that
are moved together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.segments import run_or_places

_MOST_KNOWN = 8  # batch sizes whose index is kept
_CACHE_LINE = 16
"""Float32 values of a cache line. On a CPU, indexed reads of less take twice as long as copies of whole pieces: for 17
pieces of 8 to 128 columns 126 us and 68 us (512 samples, AMD EPYC), or 0.71 ms and 0.29 ms (2048)."""
_LARGE = 256
"""Samples from which pieces are copied. By 64 the calls cost more than they save (25 us, and 17 us by an index), by 512
they pay; between these nothing was measured."""
_FEW = 8
"""Matrices up to which calls for each of them are made; two were measured."""


@frozen(eq=False)
class Columns:
    """Columns of outputs that return in one tensor.

    In a pooled collection the tensor is ``[B, width]``: the pieces side by side in this order. In a collection of
    sequences it is one output's ``[N, D]``, a row for each id of the feature, and ``n`` is 1.

    Args:
        output: index of the output of each piece, ``[n]``.
        start: first column of each piece in its output, ``[n]``.
        stop: column after the last of each piece, ``[n]``.
        placed: placement of the pieces in the tensor, in a pooled collection, where they do not stand in one matrix in
            this order; the tensor is flat then.
    """

    output: Ints
    start: Ints
    stop: Ints
    placed: Placement | None = None

    @property
    def width(self) -> int:
        """Number of columns of all pieces."""
        return int((self.stop - self.start).sum())


@frozen(eq=False)
class Placement:
    """Positions of pieces in a flat buffer of matrices ``[B, width]``, one after the other.

    Column ``offset`` of sample ``b`` stands at element ``matrix * B + b * width + offset``.

    Args:
        matrix: columns of all matrices before the piece's own, ``[n]``.
        width: columns of the piece's matrix, ``[n]``.
        offset: first column of the piece in its matrix, ``[n]``.
    """

    matrix: Ints
    width: Ints
    offset: Ints

    def of(self, pieces: Ints) -> Placement:
        """The placement of some pieces."""
        return Placement(self.matrix[pieces], self.width[pieces], self.offset[pieces])

    @classmethod
    def in_one(cls, offset: Ints, width: int) -> Placement:
        """Place pieces in a single matrix ``[B, width]``."""
        return cls(np.zeros_like(offset), np.full_like(offset, width), offset)

    @classmethod
    def in_a_row(cls, widths: Ints, matrix: Ints, num_matrices: int) -> Placement:
        """Place pieces side by side, each in the matrix that it names.

        Args:
            widths: columns of each piece, ``[n]``.
            matrix: number of each piece's matrix, rising, ``[n]``.
            num_matrices: number of matrices, empty ones included.
        """
        total = np.bincount(matrix, widths, num_matrices).astype(np.int64)
        before = np.cumsum(total) - total
        return cls(before[matrix], total[matrix], np.cumsum(widths) - widths - before[matrix])


Room = Callable[[int], Tensor]
"""A function that makes memory for a number of float32 values."""


def selected(rows: Tensor, index: Tensor, room: Room | None = None) -> Tensor:
    """Copy some rows of a matrix, flat, into memory of ``room`` if given."""
    if room is None:
        return rows.index_select(0, index).view(-1)
    count, width = index.shape[0], rows.shape[1]
    made = room(count * width)
    torch.index_select(rows, 0, index, out=made.view(count, width))
    return made


class Move:
    """A copy of columns from one placement to another, as one indexed read.

    Columns are moved in units: the greatest common divisor of all widths and offsets of both placements.

    Args:
        widths: columns of each piece, ``[n]``.
        source: placement of the pieces in the buffer that is read.
        target: placement of the pieces in the result, which they fill without gaps.
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
        is_slow = self.unit < _CACHE_LINE and len(widths)
        self._slices = _Slices.of(widths, source, target) if is_slow else None

    def __call__(self, flat: Tensor, size: int, room: Room | None = None) -> Tensor:
        """Copy the columns of ``size`` samples; a view is returned where they stand in order already.

        Args:
            flat: buffer in which they stand, flat.
            size: number of samples.
            room: maker of the memory that they are copied to.
        """
        if self._slices is not None and size >= _LARGE and flat.is_cpu:
            return self._slices(flat, size, room)
        index = self._known.get(size)
        if index is None:  # another thread may empty what is known
            index = self._known[size] = self._index(size, flat.device)
        if isinstance(index, slice):
            return flat[index]
        units = flat.view(-1, self.unit)
        return selected(units, index, room)

    def _index(self, size: int, device: torch.device) -> Tensor | slice:
        """Source unit of each target unit, ``[B * Q]``; a slice of values if they are one run of the source."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        source, target = (_units_of(place, size) for place in (self._source, self._target))
        # Both list the units in one order; inverting the target side gives the source unit of each place.
        index = np.empty(source.size, dtype=np.int64)
        index[target.reshape(-1)] = source.reshape(-1)
        run = run_or_places(index)
        return (
            slice(run.start * self.unit, run.stop * self.unit)
            if isinstance(run, slice)
            else sent_to(device, index)
        )


@frozen(eq=False)
class _Slices:
    """A copy of columns as slices of matrices that are put side by side.

    Args:
        sources: columns before each matrix that is read, its columns, and the widths into which it is cut.
        targets: columns before each matrix of the result, its columns, and its pieces: source and number of the cut.
    """

    sources: list[tuple[int, int, list[int]]]
    targets: list[tuple[int, int, list[tuple[int, int]]]]

    @classmethod
    def of(cls, widths: Ints, source: Placement, target: Placement) -> _Slices | None:
        """Cut the matrices; ``None`` if they are many, or move whole.

        They are cut wherever a piece begins or ends, so that pieces which share columns are several cuts each.
        """
        firsts = [np.unique(place.matrix) for place in (source, target)]
        if not max(map(len, firsts)) < min(_FEW + 1, len(widths)):
            return None
        order = np.argsort(target.matrix + target.offset)
        widths, source, target = widths[order], source.of(order), target.of(order)
        sources: list[tuple[int, int, list[int]]] = []
        cuts: dict[int, list[tuple[int, int]]] = {}
        for number, first in enumerate(firsts[0].tolist()):
            own = np.flatnonzero(source.matrix == first)
            begins, ends = source.offset[own], source.offset[own] + widths[own]
            edges = np.unique(np.concatenate([[0, source.width[own[0]]], begins, ends]))
            sources.append((first, int(edges[-1]), np.diff(edges).tolist()))
            spans = zip(
                own.tolist(),
                *(np.searchsorted(edges, place).tolist() for place in (begins, ends)),
                strict=True,
            )
            cuts |= {piece: [(number, cut) for cut in range(start, stop)] for piece, start, stop in spans}
        targets = []
        for first in firsts[1].tolist():
            own = np.flatnonzero(target.matrix == first)
            targets.append(
                (first, int(widths[own].sum()), [cut for piece in own.tolist() for cut in cuts[piece]])
            )
        return cls(sources, targets)

    def __call__(self, flat: Tensor, size: int, room: Room | None) -> Tensor:
        cuts = [
            flat[first * size : (first + width) * size].view(size, width).split_with_sizes(parts, 1)
            for first, width, parts in self.sources
        ]
        *_, (first, width, _) = self.targets
        made = flat.new_empty((first + width) * size) if room is None else room((first + width) * size)
        for first, width, pieces in self.targets:
            own = made[first * size : (first + width) * size].view(size, width)
            torch.cat([cuts[source][cut] for source, cut in pieces], 1, out=own)
        return made


def _merged(widths: Ints, source: Placement, target: Placement) -> tuple[Ints, Placement, Placement]:
    """Merge pieces that are neighbours in source and target, so that units are as large as possible."""
    if not len(widths):
        return widths, source, target
    begins = np.ones(len(widths), dtype=bool)
    begins[1:] = False
    for place in (source, target):
        begins[1:] |= np.diff(place.matrix) != 0
        begins[1:] |= place.offset[1:] != place.offset[:-1] + widths[:-1]
    first = np.flatnonzero(begins)
    return np.add.reduceat(widths, first), source.of(first), target.of(first)


def _in_units(place: Placement, units: Ints, unit: int) -> Placement:
    """Placement of each unit, ``[Q]``, counted in units; ``units`` says how many each piece has."""
    # Number of each unit inside its piece: 0, 1, ... from each piece's start.
    inside = np.arange(units.sum()) - np.repeat(np.cumsum(units) - units, units)
    matrix, width, offset = (
        np.repeat(own // unit, units) for own in (place.matrix, place.width, place.offset)
    )
    return Placement(matrix, width, offset + inside)


def _units_of(place: Placement, size: int) -> Ints:
    """Position of each unit of each sample, ``[B, Q]``: ``matrix * B + b * width + offset``."""
    found: Ints = place.matrix * size + place.offset + np.arange(size)[:, None] * place.width
    return found
