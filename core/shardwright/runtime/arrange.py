"""Arranging pooled results: what came from the ranks becomes the output's columns, and gradients the reverse.

Legend: B batch size of this rank, W ranks, D columns of a slot, C columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.runtime.exchange_plan import ExchangePlan, Group, mean_outputs

Span = tuple[int, int]


@frozen
class _Layer:
    """Slots whose results stand side by side in the columns ``start <= c < stop``."""

    start: int
    stop: int
    slots: list[int]


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


class Arrangement:
    """Puts results in order, adds partial sums, divides means; packs gradients for the ranks that need them.

    Args:
        plan: the exchange.
        gradient_scale: every gradient is multiplied by it (``1 / W`` averages over ranks, as
            DistributedDataParallel does).
    """

    def __init__(self, plan: ExchangePlan, *, gradient_scale: float) -> None:
        self._plan, self._gradient_scale = plan, gradient_scale
        slots = [slot for rank in range(len(plan.groups)) for slot in plan.slots_of(rank)]
        self._first, *self._partial = _layers([slot.columns for slot in slots], plan.width)
        self._means = _mean_runs(plan)
        self.widths = [sum(group.width for group in groups) for groups in plan.groups]
        self.gradient_widths = [sum(group.gradient_width for group in groups) for groups in plan.groups]

    def output(self, received: Tensor, feature_lengths: Tensor) -> Tensor:
        """The pooled output.

        Args:
            received: float32, flat: each rank's groups' results for this rank's batch, rank by rank.
            feature_lengths: ``[F, B]`` int32, to divide means by.

        Returns:
            ``[B, C]`` float32.
        """
        batch_size = feature_lengths.shape[1]
        views = self._slot_views(received, batch_size)
        output = torch.cat([views[slot] for slot in self._first[0].slots], dim=1)
        for layers in self._partial:
            for layer in layers:
                output[:, layer.start : layer.stop] += torch.cat([views[slot] for slot in layer.slots], dim=1)
        self._divide(output, feature_lengths)
        return output

    def gradients(self, gradient: Tensor, feature_lengths: Tensor) -> Tensor:
        """What each rank gets of the output's gradient, flat, rank by rank.

        Args:
            gradient: ``[B, C]``.
            feature_lengths: ``[F, B]`` int32.

        Returns:
            ``[B * sum(gradient_widths)]`` float32.
        """
        batch_size = gradient.shape[0]
        scaled = gradient * self._gradient_scale
        self._divide(scaled, feature_lengths)
        packed = scaled.new_empty(batch_size * sum(self.gradient_widths))
        start = 0
        for groups in self._plan.groups:
            for group in groups:
                stop = start + batch_size * group.gradient_width
                _pack(group, scaled, packed[start:stop])
                start = stop
        return packed

    def _slot_views(self, received: Tensor, batch_size: int) -> list[Tensor]:
        """A view ``[B, D]`` for each slot, in send order."""
        views: list[Tensor] = []
        start = 0
        for groups in self._plan.groups:
            for group in groups:
                stop = start + batch_size * group.width
                views += _split(group, received[start:stop], batch_size)
                start = stop
        return views

    def _divide(self, columns: Tensor, feature_lengths: Tensor) -> None:
        if not self._means:
            return
        inverse = feature_lengths.clamp(min=1).to(columns.dtype).reciprocal_()
        for run in self._means:
            values = columns[:, run.start : run.stop].unflatten(1, (len(run.features), run.dim))
            values *= inverse[run.features].t().unsqueeze(-1)


def _split(group: Group, region: Tensor, batch_size: int) -> list[Tensor]:
    dims = [slot.dim for slot in group.slots]
    if group.kernel.batch_major:
        return list(region.view(batch_size, group.width).split(dims, dim=1))
    pieces = region.split([batch_size * dim for dim in dims])
    return [piece.view(batch_size, dim) for piece, dim in zip(pieces, dims, strict=True)]


def _pack(group: Group, gradient: Tensor, region: Tensor) -> None:
    """Copy the group's columns of ``gradient [B, C]`` into its ``region``, in the order of its results."""
    slices = [gradient[:, slot.gradient_columns[0] : slot.gradient_columns[1]] for slot in group.slots]
    if group.kernel.batch_major:
        torch.cat(slices, dim=1, out=region.view(gradient.shape[0], group.gradient_width))
    else:
        torch.cat([piece.reshape(-1) for piece in slices], out=region)


def _layers(columns: Sequence[Span], width: int) -> list[list[_Layer]]:
    """Layers that together hold every slot once; the first covers all columns, in one piece.

    Slots of different row parts of a table give partial sums of the same columns; each further layer holds the next
    one of them for each column that has more.
    """
    remaining = sorted(range(len(columns)), key=lambda slot: columns[slot])
    layers: list[list[_Layer]] = []
    while remaining:
        runs: list[_Layer] = []
        left: list[int] = []
        reached = 0
        for slot in remaining:
            start, stop = columns[slot]
            if start < reached:
                left.append(slot)
                continue
            if runs and runs[-1].stop == start:
                runs[-1] = _Layer(runs[-1].start, stop, [*runs[-1].slots, slot])
            else:
                runs.append(_Layer(start, stop, [slot]))
            reached = stop
        layers.append(runs)
        remaining = left
    assert [(layer.start, layer.stop) for layer in layers[0]] == [(0, width)]  # Layout.check
    return layers


def _mean_runs(plan: ExchangePlan) -> list[_MeanRun]:
    runs: list[_MeanRun] = []
    for output in mean_outputs(plan):
        last = runs[-1] if runs else None
        dim = output.stop - output.start
        if last and last.stop == output.start and last.dim == dim:
            runs[-1] = _MeanRun(last.start, output.stop, [*last.features, output.feature])
        else:
            runs.append(_MeanRun(output.start, output.stop, [output.feature]))
    return runs
