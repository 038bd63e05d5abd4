"""Routing: a batch's ids, cut into the streams that the ranks' slots read.

Legend: F features, B batch size, S streams, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts import RowMap
from shardwright.runtime.exchange_plan import ExchangePlan
from shardwright.runtime.inputs import BatchCheck
from shardwright.sparse import KeyedJaggedTensor


@frozen(eq=False)
class Routed:
    """A batch in streams.

    Args:
        batch_size: ``B``.
        feature_lengths: ``[F, B]`` int32, of whole features (means are divided by them).
        lengths: ``[S, B]`` int32.
        ids: int64 ids of each stream, local to its row part.
        weights: float32 weights of each stream, or ``None``.
    """

    batch_size: int
    feature_lengths: Tensor
    lengths: Tensor
    ids: Sequence[Tensor]
    weights: Sequence[Tensor] | None


@frozen(eq=False)
class _Cut:
    """The features cut by one row map: their first stream each, all parts following it."""

    row_map: RowMap
    features: list[int]
    first_streams: list[int]


class Router:
    """Cuts batches into streams. Orders and maps are made once, here; a batch only moves data."""

    def __init__(self, plan: ExchangePlan, *, is_weighted: bool) -> None:
        self._check = BatchCheck(plan, is_weighted=is_weighted)
        self._is_weighted = is_weighted
        self._num_streams = len(plan.streams)
        self._whole = [(i, stream.feature) for i, stream in enumerate(plan.streams) if stream.row_map is None]
        cuts: dict[RowMap, _Cut] = {}
        for index, stream in enumerate(plan.streams):
            if stream.row_map is not None and stream.part == 0:
                cut = cuts.setdefault(stream.row_map, _Cut(stream.row_map, [], []))
                cut.features.append(stream.feature)
                cut.first_streams.append(index)
        self._cuts = list(cuts.values())

    def route(self, features: KeyedJaggedTensor) -> Routed:
        """Cut a batch into streams.

        Raises:
            BatchProblem: a feature or weights are missing, or an id is out of range.
        """
        positions = self._check.positions(features)
        bounds = features.offset_per_key()
        spans = [(bounds[position], bounds[position + 1]) for position in positions]
        values = _in_a_row(features.values().to(torch.int64))  # its bytes are sent
        ids = [values[start:stop] for start, stop in spans]
        self._check.check_ids(ids)
        batch_size = features.stride()
        lengths = features.lengths().to(torch.int32).view(len(bounds) - 1, batch_size)
        if positions != list(range(lengths.shape[0])):
            lengths = lengths[positions]
        weights = None
        if self._is_weighted:
            all_weights = _in_a_row(features.weights().detach().to(torch.float32))
            weights = [all_weights[start:stop] for start, stop in spans]
        return self._cut(lengths, ids, weights)

    def _cut(self, lengths: Tensor, ids: list[Tensor], weights: list[Tensor] | None) -> Routed:
        if not self._cuts and [feature for _, feature in self._whole] == list(range(len(ids))):
            return Routed(lengths.shape[1], lengths, lengths, ids, weights)
        stream_lengths = lengths.new_empty((self._num_streams, lengths.shape[1]))
        stream_ids: list[Tensor] = [lengths.new_empty(0)] * self._num_streams
        stream_weights = list(stream_ids)
        for stream, feature in self._whole:
            stream_lengths[stream] = lengths[feature]
            stream_ids[stream] = ids[feature]
            if weights is not None:
                stream_weights[stream] = weights[feature]
        for cut in self._cuts:
            pieces = _cut_by_rows(cut, lengths, ids, weights)
            for index, first in enumerate(cut.first_streams):
                parts = slice(first, first + cut.row_map.num_parts)
                own = slice(index * cut.row_map.num_parts, (index + 1) * cut.row_map.num_parts)
                stream_lengths[parts] = pieces.lengths[own]
                stream_ids[parts] = pieces.ids[own]
                if pieces.weights is not None:
                    stream_weights[parts] = pieces.weights[own]
        return Routed(
            lengths.shape[1],
            lengths,
            stream_lengths,
            stream_ids,
            stream_weights if weights is not None else None,
        )


def _in_a_row(tensor: Tensor) -> Tensor:
    """The values one after the other, as they must be to be viewed as bytes."""
    # An empty tensor may have a stride of 0 (numpy makes such), which torch calls contiguous but does not view.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def _cut_by_rows(cut: _Cut, lengths: Tensor, ids: list[Tensor], weights: list[Tensor] | None) -> Routed:
    """Cut the features of ``cut`` into ``len(cut.features) * num_parts`` streams, feature by feature."""
    features, num_parts, batch_size = cut.features, cut.row_map.num_parts, lengths.shape[1]
    own_lengths = lengths[features]  # [f, B]
    own_ids = torch.cat([ids[feature] for feature in features])
    bag = torch.arange(own_lengths.numel(), device=lengths.device).repeat_interleave(
        own_lengths.reshape(-1), output_size=own_ids.numel()
    )
    # Stream and bag of each id as one number; sorting by stream alone, stably, keeps the bags' order inside it.
    stream = (bag // max(batch_size, 1)) * num_parts + cut.row_map.part_of(own_ids)
    num_streams = len(features) * num_parts
    cut_lengths = torch.bincount(
        stream * batch_size + bag % max(batch_size, 1), minlength=num_streams * batch_size
    ).view(num_streams, batch_size)
    order = torch.argsort(stream, stable=True)
    counts = cut_lengths.sum(1).tolist()
    sorted_ids = cut.row_map.local_row_of(own_ids)[order].split(counts)
    sorted_weights = None
    if weights is not None:
        sorted_weights = torch.cat([weights[feature] for feature in features])[order].split(counts)
    return Routed(batch_size, own_lengths, cut_lengths.to(torch.int32), sorted_ids, sorted_weights)
