"""Arranging what came home: pieces become a pooled collection's columns, or sequences in the order of their ids.

Legend: B batch size of this rank, C columns of the pooled output, D columns of an output, N ids of an output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.tables import PoolingType
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.groups import Arrival, Span
from shardwright.runtime.part import GradientOf


class Arrangement(ABC):
    """How a collection's outputs are made of arrivals, and an arrival's gradient of the outputs' gradients.

    Args:
        collection: tables and outputs.
        arrivals: what all parts bring home, in the order of their views.
        gradient_scale: every gradient is multiplied by it (``1 / W`` averages over ranks, as
            DistributedDataParallel does).
    """

    def __init__(self, collection: Collection, arrivals: Sequence[Arrival], *, gradient_scale: float) -> None:
        self._collection, self._arrivals, self.gradient_scale = collection, arrivals, gradient_scale

    @abstractmethod
    def shapes(self, batch: FeatureBatch) -> list[tuple[int, int]]:
        """The outputs' shapes."""

    @abstractmethod
    def outputs(
        self, views: Sequence[Tensor], places: Sequence[Tensor | None], batch: FeatureBatch
    ) -> tuple[Tensor, ...]:
        """The outputs' values.

        Args:
            views: a tensor for each arrival, ``[bags or ids, columns]``.
            places: for each arrival, the places of its ids among the feature's; ``None``: all, in order.
            batch: this rank's batch.
        """

    @abstractmethod
    def divided(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:
        """The outputs' gradients, divided where outputs are means."""

    @abstractmethod
    def pieces(
        self,
        gradients: Sequence[Tensor],
        arrivals: tuple[Arrival, ...],
        places: Callable[[Arrival], Tensor | None],
    ) -> list[Tensor]:
        """The pieces ``[bags or ids, columns]`` of gradients that belong to arrivals.

        Args:
            gradients: of the outputs.
            arrivals: the same object in every step.
            places: the places of an arrival's ids among the feature's; ``None``: all, in order.
        """

    def write_columns(self, gradients: Sequence[Tensor], arrivals: tuple[Arrival, ...], out: Tensor) -> None:
        """Write the pieces of pooled outputs' gradients side by side into ``out``, ``[bags, all columns]``."""
        raise AssertionError("only pooled outputs stand side by side")


class ArrangedGradients(GradientOf):
    """The gradients of one step's outputs, for one part.

    Args:
        arrangement: of the outputs.
        gradients: of the outputs, divided where they are means.
        places: the places of an arrival's ids.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        gradients: Sequence[Tensor],
        places: Callable[[Arrival], Tensor | None],
    ) -> None:
        self._arrangement, self._gradients, self._places = arrangement, gradients, places
        self.scale = arrangement.gradient_scale

    def __call__(self, arrival: Arrival) -> Tensor:  # noqa: D102 - described in the base class
        return self._arrangement.pieces(self._gradients, (arrival,), self._places)[0] * self.scale

    def side_by_side(self, arrivals: tuple[Arrival, ...], out: Tensor) -> None:  # noqa: D102
        self._arrangement.write_columns(self._gradients, arrivals, out)

    def unscaled(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:  # noqa: D102
        return self._arrangement.pieces(self._gradients, arrivals, self._places)


@frozen
class _Layer:
    """Arrivals whose results stand side by side in the columns ``start <= c < stop``."""

    start: int
    stop: int
    arrivals: list[int]


@frozen(eq=False)
class _MeanRun:
    """Neighbouring outputs of one dim that are means, and the feature of each."""

    start: int
    stop: int
    features: list[int]

    @property
    def dim(self) -> int:
        """Columns of each."""
        return (self.stop - self.start) // len(self.features)


@frozen(eq=False)
class _Columns:
    """Columns to be put side by side, by numpy in one call: for small batches four times as fast as views and `cat`.

    Args:
        unit: what is moved at once: four columns where all spans begin and end at such, else one.
        index: of units.
    """

    unit: Any
    index: npt.NDArray[np.int64]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], width: int) -> _Columns:
        edges = [width, *(edge for span in spans for edge in span)]
        size, unit = (1, np.float32) if any(edge % _FOUR for edge in edges) else (_FOUR, np.complex128)
        ranges = [np.arange(start // size, (start + count) // size) for start, count in spans]
        return cls(unit, np.concatenate([np.empty(0, np.int64), *ranges]))

    def take(self, source: Tensor, out: Tensor) -> None:
        """Write the columns of ``source`` into ``out``; both float32 on the CPU, ``out`` in one piece."""
        units = source.detach().contiguous().numpy().view(self.unit)
        # Every index is in range: "clip" only says that no test is needed.
        np.take(units, self.index, axis=1, out=out.numpy().view(self.unit), mode="clip")


@frozen(eq=False)
class _Wanted:
    """Arrivals whose gradients are asked for in every step, and where they stand.

    Args:
        arrivals: kept, so that nothing else has their identity.
        spans: first column and width of each.
        width: columns of the output.
    """

    arrivals: tuple[Arrival, ...]
    spans: list[Span]
    width: int

    @cached_property
    def are_all(self) -> bool:
        """Whether they are all columns, in order: these are cut apart in one call."""
        starts = [start for start, _ in self.spans]
        return starts == [*accumulate((size for _, size in self.spans[:-1]), initial=0)] and self.width == (
            sum(size for _, size in self.spans)
        )

    @cached_property
    def columns(self) -> _Columns:
        """Their columns, to be taken in one call."""
        return _Columns.of(self.spans, self.width)


_FOUR = 4  # columns of float32 are as many bytes as a complex128


class PooledArrangement(Arrangement):
    """One output ``[B, C]``: columns in order, partial sums added, means divided, once, here."""

    def __init__(self, collection: Collection, arrivals: Sequence[Arrival], *, gradient_scale: float) -> None:
        super().__init__(collection, arrivals, gradient_scale=gradient_scale)
        self._first, *self._partial = _layers([self._columns(a) for a in arrivals], collection.width)
        self._means = _mean_runs(collection)
        self._known: dict[int, _Wanted] = {}

    def _columns(self, arrival: Arrival) -> Span:
        """Where an arrival stands in the output."""
        start = self._collection.outputs[arrival.output].start
        return start + arrival.columns[0], start + arrival.columns[1]

    def shapes(self, batch: FeatureBatch) -> list[tuple[int, int]]:  # noqa: D102 - described in the base class
        return [(batch.batch_size, self._collection.width)]

    def outputs(  # noqa: D102
        self, views: Sequence[Tensor], places: Sequence[Tensor | None], batch: FeatureBatch
    ) -> tuple[Tensor, ...]:
        output = _joined([views[index] for index in self._first[0].arrivals])
        for layers in self._partial:
            for layer in layers:
                output[:, layer.start : layer.stop] += torch.cat([views[i] for i in layer.arrivals], dim=1)
        self._divide(output, batch)
        return (output,)

    def divided(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:  # noqa: D102
        if not self._means:
            return gradients
        divided = gradients[0].clone()
        self._divide(divided, batch)
        return (divided,)

    def pieces(  # noqa: D102
        self,
        gradients: Sequence[Tensor],
        arrivals: tuple[Arrival, ...],
        places: Callable[[Arrival], Tensor | None],
    ) -> list[Tensor]:
        gradient = gradients[0]
        if len(arrivals) > 1 and self._known_of(arrivals).are_all:
            return list(gradient.split_with_sizes([size for _, size in self._spans_of(arrivals)], 1))
        return [gradient.narrow(1, start, size) for start, size in self._spans_of(arrivals)]

    def write_columns(  # noqa: D102
        self, gradients: Sequence[Tensor], arrivals: tuple[Arrival, ...], out: Tensor
    ) -> None:
        gradient = gradients[0]
        if gradient.device.type != "cpu":
            torch.cat(self.pieces(gradients, arrivals, lambda arrival: None), dim=1, out=out)
            return
        self._known_of(arrivals).columns.take(gradient, out)

    def _spans_of(self, arrivals: tuple[Arrival, ...]) -> list[Span]:
        """First column and width of each arrival's."""
        return [self._span(arrivals[0])] if len(arrivals) == 1 else self._known_of(arrivals).spans

    def _known_of(self, arrivals: tuple[Arrival, ...]) -> _Wanted:
        """What follows from arrivals; found once for each tuple, which is kept as long."""
        known = self._known.get(id(arrivals))
        if known is None:
            spans = [self._span(arrival) for arrival in arrivals]
            known = self._known[id(arrivals)] = _Wanted(arrivals, spans, self._collection.width)
        return known

    def _span(self, arrival: Arrival) -> Span:
        start, stop = self._columns(arrival)
        return start, stop - start

    def _divide(self, columns: Tensor, batch: FeatureBatch) -> None:
        if not self._means:
            return
        inverse = batch.lengths.clamp(min=1).to(columns.dtype).reciprocal_()
        for run in self._means:
            values = columns[:, run.start : run.stop].unflatten(1, (len(run.features), run.dim))
            values *= inverse[run.features].t().unsqueeze(-1)


class SequenceArrangement(Arrangement):
    """An output ``[N, D]`` for each feature of each table: rows in the order of the feature's ids."""

    def shapes(self, batch: FeatureBatch) -> list[tuple[int, int]]:  # noqa: D102 - described in the base class
        return [(batch.ids[output.feature].numel(), output.dim) for output in self._collection.outputs]

    def outputs(  # noqa: D102
        self, views: Sequence[Tensor], places: Sequence[Tensor | None], batch: FeatureBatch
    ) -> tuple[Tensor, ...]:
        made: list[Tensor | None] = [None] * len(self._collection.outputs)
        for arrival, view, place in zip(self._arrivals, views, places, strict=True):
            output = self._collection.outputs[arrival.output]
            if place is None and arrival.dim == output.dim:
                made[arrival.output] = view.clone()
                continue
            values = made[arrival.output]
            if values is None:
                values = view.new_empty(batch.ids[output.feature].numel(), output.dim)
                made[arrival.output] = values
            columns = slice(*arrival.columns)
            values[slice(None) if place is None else place, columns] = view
        return tuple(value for value in made if value is not None)

    def divided(self, gradients: Sequence[Tensor], batch: FeatureBatch) -> Sequence[Tensor]:  # noqa: D102
        return gradients

    def pieces(  # noqa: D102
        self,
        gradients: Sequence[Tensor],
        arrivals: tuple[Arrival, ...],
        places: Callable[[Arrival], Tensor | None],
    ) -> list[Tensor]:
        return [self._piece(gradients[arrival.output], arrival, places(arrival)) for arrival in arrivals]

    @staticmethod
    def _piece(gradient: Tensor, arrival: Arrival, place: Tensor | None) -> Tensor:
        columns = gradient[:, arrival.columns[0] : arrival.columns[1]]
        return columns if place is None else columns[place]


def _joined(views: Sequence[Tensor]) -> Tensor:
    """Views ``[B, D]`` side by side; not copied if that is how they stand in memory, where copying takes long."""
    width = sum([view.shape[1] for view in views])
    if views[0].shape[0] * width >= _LARGE:
        place = views[0].data_ptr()
        for view in views:
            if view.data_ptr() != place or view.stride(0) != width:
                break
            place += view.shape[1] * view.element_size()
        else:
            return views[0].as_strided((views[0].shape[0], width), (width, 1))
    return torch.cat(list(views), dim=1)


_LARGE = 1 << 16  # elements; less is copied in the time that looking takes


def _layers(columns: Sequence[Span], width: int) -> list[list[_Layer]]:
    """Layers that together hold every arrival once; the first covers all columns, in one piece.

    Row parts of a table give partial sums of the same columns; each further layer holds the next one of them for each
    column that has more.
    """
    remaining = sorted(range(len(columns)), key=lambda arrival: columns[arrival])
    layers: list[list[_Layer]] = []
    while remaining:
        runs: list[_Layer] = []
        left: list[int] = []
        reached = 0
        for arrival in remaining:
            start, stop = columns[arrival]
            if start < reached:
                left.append(arrival)
                continue
            if runs and runs[-1].stop == start:
                runs[-1] = _Layer(runs[-1].start, stop, [*runs[-1].arrivals, arrival])
            else:
                runs.append(_Layer(start, stop, [arrival]))
            reached = stop
        layers.append(runs)
        remaining = left
    assert [(layer.start, layer.stop) for layer in layers[0]] == [(0, width)]  # Layout.check
    return layers


def _mean_runs(collection: Collection) -> list[_MeanRun]:
    runs: list[_MeanRun] = []
    for output in collection.outputs:
        if collection.tables[output.table].pooling is not PoolingType.MEAN:
            continue
        last = runs[-1] if runs else None
        if last and last.stop == output.start and last.dim == output.dim:
            runs[-1] = _MeanRun(last.start, output.stop, [*last.features, output.feature])
        else:
            runs.append(_MeanRun(output.start, output.stop, [output.feature]))
    return runs
