"""Assembly of a collection's outputs from the tensors that its executors bring home, and of their gradients.

Legend: B batch size of this rank, C columns of the pooled output, D columns of an output, N ids of an output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.planning.tables.spec import PoolingType
from shardwright.runtime.ranks.devices import Constant, sent_to
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.columns import Columns, Move, Placement
from shardwright.runtime.step.segments import starts_of


class Arrangement(ABC):
    """Assembly of a collection's outputs from the executors' tensors.

    Args:
        collection: tables and outputs of the module.
        brings: columns of each tensor that the executors bring home.
    """

    def __init__(self, collection: Collection, brings: Sequence[Columns]) -> None:
        self._collection, self._brings = collection, brings

    @abstractmethod
    def outputs(self, brought: Sequence[Tensor], batch: FeatureBatch) -> list[Tensor]:
        """Values of the outputs. Columns that several tensors bring are added up."""

    @abstractmethod
    def gradients(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:
        """Gradients for the executors: those of the outputs, divided by the bag lengths where outputs are means."""


class PooledArrangement(Arrangement):
    """One output ``[B, C]``: columns are put in order, partial sums added, and means divided, each once.

    Where features have batch sizes of their own, each example of the whole batch then gets its rows.
    """

    def __init__(self, collection: Collection, brings: Sequence[Columns]) -> None:
        super().__init__(collection, brings)
        places = self._first_brought()
        self._used = np.unique(places[0]).tolist()  # others only add to what these bring
        self._arrange = self._arranging(places)
        self._width = collection.width
        self._means = _Means(collection)
        self._examples = _Examples(collection)

    def _first_brought(self) -> Ints:
        """Find, for each output column, the first tensor that brings it and its place there: ``[4, C]``.

        A place is the tensor, then the column's matrix, width and offset, as :class:`Placement` has them. Columns that
        are brought again, by it or by later tensors, are noted in ``_added``.
        """
        starts = np.array([output.start for output in self._collection.outputs], dtype=np.int64)
        found = np.full((4, self._collection.width), -1, dtype=np.int64)
        # Columns of the output; and tensor, matrix, width and offset of those that are added to them.
        self._added: list[tuple[slice, int, int, int, slice]] = []
        for index, own in enumerate(self._brings):
            sizes = own.stop - own.start
            placed = own.placed or Placement.in_one(starts_of(sizes), own.width)
            # Pieces written out: the output column of each of their columns, and its place.
            inside = np.arange(own.width) - starts_of(sizes).repeat(sizes)
            columns = (starts[own.output] + own.start).repeat(sizes) + inside
            of_pieces = np.stack([sizes * 0 + index, placed.matrix, placed.width, placed.offset])
            places = of_pieces.repeat(sizes, axis=1)
            places[3] += inside
            # Nobody brought it yet: it is copied; all others are added.
            is_new = found[0, columns] < 0
            is_new[np.delete(np.arange(len(columns)), np.unique(columns, return_index=True)[1])] = False
            found[:, columns[is_new]] = places[:, is_new]
            self._added += _slices(columns[~is_new], places[:, ~is_new])
        assert (found >= 0).all()  # Layout.check
        return found

    def _arranging(self, places: Ints) -> Move:
        """Plan the copy from the used tensors, concatenated flat, to the output."""
        begins, widths = _runs(np.arange(places.shape[1]), places)
        tensor, matrix, width, offset = places[:, begins]
        sizes = np.array([own.width for own in self._brings], dtype=np.int64)
        # Only used tensors are concatenated: count the columns of those before each.
        before = starts_of(sizes * np.isin(np.arange(len(sizes)), self._used))
        source = Placement(before[tensor] + matrix, width, offset)
        return Move(widths, source, Placement.in_one(begins, places.shape[1]))

    def outputs(self, brought: Sequence[Tensor], batch: FeatureBatch) -> list[Tensor]:  # noqa: D102
        flat, size = [own.reshape(-1) for own in brought], batch.batch_size
        used = flat[self._used[0]]
        if len(self._used) > 1:
            used = torch.cat([flat[index] for index in self._used])
        output = self._arrange(used, size).view(size, self._width)
        for columns, index, matrix, width, own in self._added:
            added = flat[index][matrix * size : (matrix + width) * size]
            output[:, columns] += added.view(size, width)[:, own]
        if self._means.has_means:
            self._means.divide(output, batch)
        return [
            output
            if batch.inverse is None
            else self._examples.of(output, sent_to(output.device, batch.inverse))
        ]

    def gradients(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:  # noqa: D102
        (gradient,) = gradients
        if batch.inverse is not None:
            gradient = self._examples.added(
                gradient, sent_to(gradient.device, batch.inverse), batch.batch_size
            )
        return [self._means.divided(gradient, batch) if self._means.has_means else gradient]


def _runs(columns: Ints, places: Ints) -> tuple[Ints, Ints]:
    """First index and size of each run of output columns ``[n]`` whose places ``[4, n]`` are neighbours, too."""
    steps = np.array([[1], [0], [0], [0], [1]])
    are_other = np.diff(np.concatenate([columns[None], places])) != steps
    begins = np.flatnonzero(np.concatenate([columns[:1] >= 0, are_other.any(0)]))
    return begins, np.diff(begins, append=len(columns))


def _slices(columns: Ints, places: Ints) -> Iterator[tuple[slice, int, int, int, slice]]:
    """Runs of output columns: their slice; and tensor, matrix, width, and slice in it, of the columns added to them."""
    begins, sizes = _runs(columns, places)
    for first, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        tensor, matrix, width, offset = places[:, first].tolist()
        start = int(columns[first])
        yield slice(start, start + size), tensor, matrix, width, slice(offset, offset + size)


def _units_of(collection: Collection) -> tuple[int, Ints]:
    """The greatest common divisor of all outputs' widths, and each output's width in such units."""
    dims = np.array([output.dim for output in collection.outputs], dtype=np.int64)
    unit = int(np.gcd.reduce(dims))
    return unit, dims // unit


class _Examples:
    """Rows of whole examples from those of features that have batch sizes of their own, and their gradients.

    Columns are copied in units: the greatest common divisor of all outputs' widths. Legend: E examples.
    """

    def __init__(self, collection: Collection) -> None:
        self._unit, units = _units_of(collection)
        features = np.array([output.feature for output in collection.outputs], dtype=np.int64)
        self._features, self._num_units = Constant(features.repeat(units)), int(units.sum())

    def of(self, columns: Tensor, inverse: Tensor) -> Tensor:
        """Repeat the rows ``[B, C]`` of each feature for its examples: ``[E, C]``."""
        units = columns.reshape(-1, self._unit)
        return units.index_select(0, self._places(inverse)).view(inverse.shape[1], columns.shape[1])

    def added(self, gradient: Tensor, inverse: Tensor, size: int) -> Tensor:
        """Add up the gradients ``[E, C]`` of each feature's row: ``[B, C]``, where B is ``size``."""
        rows = gradient.new_zeros(size * self._num_units, self._unit)
        rows.index_add_(0, self._places(inverse), gradient.reshape(-1, self._unit))
        return rows.view(size, gradient.shape[1])

    def _places(self, inverse: Tensor) -> Tensor:
        """Row of each unit of ``[E, units]`` among those of ``[B, units]``: ``place * units + unit``."""
        num_units = self._num_units
        places = inverse.index_select(0, self._features.on(inverse.device)).t() * num_units
        return (places + torch.arange(num_units, device=inverse.device)).reshape(-1)


class _Means:
    """Division of a pooled output's mean columns by the lengths of their feature's bags.

    Columns are scaled in units: the greatest common divisor of all outputs' widths.

    Attributes:
        has_means: some columns are means.
    """

    def __init__(self, collection: Collection) -> None:
        self._unit, units = _units_of(collection)
        of_output = [
            (output.feature, collection.tables[output.table].pooling is not PoolingType.MEAN)
            for output in collection.outputs
        ]
        features, are_sums = zip(*of_output, strict=True)
        self._features = Constant(np.repeat(np.array(features, dtype=np.int64), units))
        self._are_sums = Constant(np.repeat(are_sums, units))
        self.has_means, self._has_sums = not all(are_sums), any(are_sums)

    def divide(self, columns: Tensor, batch: FeatureBatch) -> None:
        """Divide the mean columns of ``[B, C]`` by the number of ids in each bag, in place."""
        self._units(columns).mul_(self._factors(columns, batch))

    def divided(self, columns: Tensor, batch: FeatureBatch) -> Tensor:
        """Divide as :meth:`divide` does, but leave the argument as it is and return a copy."""
        return (self._units(columns) * self._factors(columns, batch)).view(columns.shape)

    def _units(self, columns: Tensor) -> Tensor:
        return columns.view(columns.shape[0], columns.shape[1] // self._unit, self._unit)

    def _factors(self, columns: Tensor, batch: FeatureBatch) -> Tensor:
        """Factors of the units, ``[B, units, 1]``: 1 for sums, ``1 / max(ids of the bag, 1)`` for means."""
        of_bags = sent_to(columns.device, batch.of_means).t()
        factors = of_bags.index_select(1, self._features.on(columns.device))
        if self._has_sums:
            factors.masked_fill_(self._are_sums.on(columns.device), 1)
        return factors.unsqueeze(-1)


class SequenceArrangement(Arrangement):
    """One output ``[N, D]`` for each feature of each table; rows stand in the order of the feature's ids."""

    def __init__(self, collection: Collection, brings: Sequence[Columns]) -> None:
        super().__init__(collection, brings)
        # For each output: a range of its columns -> the tensors that bring it.
        self._tensors: list[dict[tuple[int, int], list[int]]] = [{} for _ in collection.outputs]
        for index, own in enumerate(brings):
            columns = (int(own.start[0]), int(own.stop[0]))
            self._tensors[int(own.output[0])].setdefault(columns, []).append(index)

    def outputs(self, brought: Sequence[Tensor], batch: FeatureBatch) -> list[Tensor]:  # noqa: D102
        return [_joined(own, brought) for own in self._tensors]

    def gradients(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:  # noqa: D102
        return gradients


def _joined(by_columns: Mapping[tuple[int, int], Sequence[int]], brought: Sequence[Tensor]) -> Tensor:
    """Build one output: add up tensors that bring the same columns, then put the sums side by side."""
    sums = {}
    for columns in sorted(by_columns):
        first, *others = (brought[index] for index in by_columns[columns])
        for other in others:
            first = first + other
        sums[columns] = first
    if len(sums) == 1:
        return next(iter(sums.values()))
    if all(stop == start for (_, stop), (start, _) in pairwise(sums)):
        return torch.cat(list(sums.values()), dim=1)
    # Row parts that are cut by columns beside others that are not: ranges overlap, and are added where they lie.
    output = first.new_zeros(len(first), max(stop for _, stop in sums))
    for (start, stop), values in sums.items():
        output[:, start:stop] += values
    return output
