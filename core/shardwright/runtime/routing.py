"""Routing: a batch's ids, cut into the streams that the ranks' slots read.

Legend: F features, B batch size, S streams, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.row_maps import RowMap
from shardwright.runtime.collection import FeatureBatch
from shardwright.runtime.routing_plan import RoutingPlan


@frozen(eq=False)
class Routed:
    """A batch in streams.

    Args:
        lengths: ``[S, B]`` int32.
        ids: int64 ids of each stream, local to its row part.
        weights: float32 weights of each stream, or ``None``.
        positions: for each stream, the places of its ids among the feature's; ``None`` where it has all of them.
    """

    lengths: Tensor
    ids: Sequence[Tensor]
    weights: Sequence[Tensor] | None
    positions: Sequence[Tensor | None]

    @property
    def batch_size(self) -> int:
        """``B``."""
        return self.lengths.shape[1]


@frozen(eq=False)
class _Cut:
    """The features cut by one row map: their first stream each, all parts following it."""

    row_map: RowMap
    features: list[int]
    first_streams: list[int]


class Router:
    """Cuts batches into streams. Orders and maps are made once, here; a batch only moves data."""

    def __init__(self, plan: RoutingPlan) -> None:
        self._num_streams = len(plan.streams)
        self._whole = [(i, stream.feature) for i, stream in enumerate(plan.streams) if stream.row_map is None]
        cuts: dict[RowMap, _Cut] = {}
        for index, stream in enumerate(plan.streams):
            if stream.row_map is not None and stream.part == 0:
                cut = cuts.setdefault(stream.row_map, _Cut(stream.row_map, [], []))
                cut.features.append(stream.feature)
                cut.first_streams.append(index)
        self._cuts = list(cuts.values())

    def route(self, batch: FeatureBatch) -> Routed:
        """Cut a batch into streams."""
        if [feature for _, feature in self._whole] == list(range(len(batch.ids))) and not self._cuts:
            return Routed(batch.lengths, batch.ids, batch.weights, [None] * len(batch.ids))
        lengths = batch.lengths.new_empty((self._num_streams, batch.batch_size))
        ids: list[Tensor] = [lengths] * self._num_streams  # all are replaced below
        weights = list(ids)
        positions: list[Tensor | None] = [None] * self._num_streams
        for stream, feature in self._whole:
            lengths[stream] = batch.lengths[feature]
            ids[stream] = batch.ids[feature]
            if batch.weights is not None:
                weights[stream] = batch.weights[feature]
        for cut in self._cuts:
            pieces = _cut_by_rows(cut, batch)
            num_parts = cut.row_map.num_parts
            for index, first in enumerate(cut.first_streams):
                parts, own = (
                    slice(first, first + num_parts),
                    slice(index * num_parts, (index + 1) * num_parts),
                )
                lengths[parts] = pieces.lengths[own]
                ids[parts], positions[parts] = pieces.ids[own], pieces.positions[own]
                if pieces.weights is not None:
                    weights[parts] = pieces.weights[own]
        return Routed(lengths, ids, None if batch.weights is None else weights, positions)


def _cut_by_rows(cut: _Cut, batch: FeatureBatch) -> Routed:
    """Cut the features of ``cut`` into ``len(cut.features) * num_parts`` streams, feature by feature."""
    features, num_parts, batch_size = cut.features, cut.row_map.num_parts, batch.batch_size
    lengths = batch.lengths[features]  # [f, B]
    ids = torch.cat([batch.ids[feature] for feature in features])
    bag = torch.arange(lengths.numel(), device=ids.device).repeat_interleave(
        lengths.reshape(-1), output_size=ids.numel()
    )
    # Stream and bag of each id as one number; sorting by stream alone, stably, keeps the bags' order inside it.
    feature = bag // max(batch_size, 1)
    stream = feature * num_parts + cut.row_map.part_of(ids)
    num_streams = len(features) * num_parts
    cut_lengths = torch.bincount(
        stream * batch_size + bag % max(batch_size, 1), minlength=num_streams * batch_size
    ).view(num_streams, batch_size)
    order = torch.argsort(stream, stable=True)
    counts = cut_lengths.sum(1).tolist()
    starts = torch.tensor([0, *(batch.ids[f].numel() for f in features)], device=ids.device).cumsum(0)
    weights = None
    if batch.weights is not None:
        weights = torch.cat([batch.weights[f] for f in features])[order].split(counts)
    return Routed(
        lengths=cut_lengths.to(torch.int32),
        ids=cut.row_map.local_row_of(ids)[order].split(counts),
        weights=weights,
        positions=(order - starts[feature[order]]).split(counts),
    )
