"""Routing: sorting a batch's ids into buckets, in the order of the slots that read them.

A reading is a feature with a row map. A bucket holds the ids of one reading in one row part; slots that read the same
part share it.

Legend: F features, B batch size, N ids, R readings, Q buckets, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import Constant, read_on_host, sent_to
from shardwright.runtime.routed.plan import RoutingPlan, SlotColumns
from shardwright.runtime.step.collection import FeatureBatch
from shardwright.runtime.step.kernel_groups import Bucketing, KernelGroup
from shardwright.runtime.step.segments import (
    LastResult,
    Selection,
    counts_of,
    order_of,
    places_where,
    repeated,
    spread,
    starts_of,
    take,
    total,
)
from shardwright.sparse import WEIGHTS


@frozen(eq=False)
class Bucketed:
    """The ids of a batch for some slots, slot after slot.

    Args:
        batch_size: ``B``.
        num_ids: number of ids of each slot, ``[S]``, in host memory.
        num_bags: number of bags of each slot, ``[S]``, in host memory; of sequences each id is a bag. The bags with
            which a feature is filled up to ``B`` are left out where its ids are not parted.
        ids: row of each id in the slot's block, ``[sum of num_ids]`` int64.
        lengths: number of ids of each bag, ``[sum of num_bags]`` int32; ``None`` for sequences.
        columns: columns of the ids by name, ``[sum of num_ids]`` each, as the batch has them.
        places: sample of each bag, or for sequences its place among the feature's ids, ``[sum of num_bags]``;
            ``None`` if each slot has all of them in order.
    """

    batch_size: int
    num_ids: Ints
    num_bags: Ints
    ids: Tensor
    lengths: Tensor | None
    columns: Mapping[str, Tensor]
    places: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the routed batch."""
        every = (self.ids, self.lengths, *self.columns.values(), self.places)
        return [tensor for tensor in every if tensor is not None]

    def with_places_on(self, device: torch.device) -> Bucketed:
        """The same with the places, which results are put in order by, on a device."""
        return self if self.places is None else evolve(self, places=sent_to(device, self.places))


class Router(ABC):
    """A router, which sorts a batch's ids into the buckets of some slots.

    Args:
        plan: routing plan of all slots.
        slots: the slots that it serves, on all ranks.
        features: indices of the features whose ids are sorted, in the order in which they are needed, ``[n]``.
    """

    bucketing: ClassVar[Bucketing]

    def __init__(self, plan: RoutingPlan, slots: SlotColumns, features: Ints) -> None:
        self.slots, self._features = slots, features
        self._is_pooled, self._last = plan.collection.is_pooled, LastResult()
        in_order = np.array_equal(features, np.arange(len(plan.collection.features)))
        self._index = None if in_order else Constant(features)

    def _selected(self, num_ids: Ints) -> tuple[Ints, Selection]:
        """Number of ids of each of its features, and their places among those of all features."""
        own = num_ids[self._features]
        return own, Selection(starts_of(num_ids)[self._features], own)

    def _lengths(self, batch: FeatureBatch) -> Tensor:
        """Lengths of the bags of its features, ``[n * B]``."""
        lengths = batch.lengths
        if self._index is not None:
            lengths = lengths.index_select(0, self._index.on(lengths.device))
        return lengths.reshape(-1)

    @abstractmethod
    def route(self, batch: FeatureBatch) -> Bucketed:
        """Sort the ids of a batch by slot."""


def routers_of(plan: RoutingPlan) -> list[Router]:
    """Make the routers of all slots: one for each bucketing that occurs, in their order."""
    cut = CutRouter if plan.collection.is_pooled else CutSequenceRouter
    kinds = {Bucketing.WHOLE: WholeRouter, Bucketing.CUT: cut, Bucketing.RAGGED: RaggedRouter}
    bucketing = plan.bucketing_of_piece[plan.slots.piece]
    present = sorted({kind.bucketing for kind in plan.kinds})
    return [kinds[own](plan, plan.slots.chosen(bucketing == own)) for own in present]


def own_slots(routers: Sequence[Router], rank: int) -> list[slice]:
    """The slots of each router among all slots of a rank, which stand router after router."""
    counts = [int(router.slots.per_rank[rank]) for router in routers]
    return [slice(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def runs_of_groups(groups: Sequence[KernelGroup], own: Sequence[slice]) -> list[tuple[int, slice]]:
    """The router of each of a rank's kernel groups, and its slots, which are a run of that router's slots.

    Args:
        groups: the groups.
        own: slots of each router, from :func:`own_slots`.
    """
    return [
        (number, slice(group.slots.start - span.start, group.slots.stop - span.start))
        for number, span in enumerate(own)
        for group in groups
        if span.start <= group.slots.start < span.stop
    ]


def route_all(routers: Sequence[Router], batch: FeatureBatch) -> tuple[list[Bucketed], list[Tensor]]:
    """Sort the ids of a batch by all routers.

    Returns:
        The sorted ids; and, where their weights are trained, for each router the place of each sorted id in the batch,
        by which gradients come back to it; else none.
    """
    if batch.trained_weights is None:
        return [router.route(batch) for router in routers], []
    # Numbers of the ids take the place of their weights, and so arrive where these would.
    weights = batch.columns[WEIGHTS]
    numbers = torch.arange(len(weights), device=weights.device)
    numbered_batch = evolve(batch, columns={**batch.columns, WEIGHTS: numbers})
    routed = [router.route(numbered_batch) for router in routers]
    places = [own.columns[WEIGHTS] for own in routed]
    found = [{**own.columns, WEIGHTS: weights.index_select(0, own.columns[WEIGHTS])} for own in routed]
    return [evolve(own, columns=of) for own, of in zip(routed, found, strict=True)], places


def added_at_home(
    parts: Sequence[Tensor], places: Sequence[Tensor], num_ids: int, device: torch.device
) -> Tensor:
    """Add up the gradients of the weights of each id of a batch: ``[N]`` float32.

    Args:
        parts: gradients in the order of each router's sorted ids.
        places: those that :func:`route_all` gave; none where this rank's weights are not trained.
        num_ids: ``N``.
        device: device of the gradients.
    """
    gradient = torch.zeros(num_ids, dtype=torch.float32, device=device)
    for part, own in zip(parts, places, strict=False):
        gradient.index_add_(0, sent_to(device, own), part)
    return gradient


class WholeRouter(Router):
    """The router of features whose ids are not parted: each slot gets all ids of its feature."""

    bucketing = Bucketing.WHOLE

    def __init__(self, plan: RoutingPlan, slots: SlotColumns) -> None:
        features = np.array([reading.feature for reading in plan.readings], dtype=np.int64)
        super().__init__(plan, slots, features[plan.pieces.reading[slots.piece]])

    def route(self, batch: FeatureBatch) -> Bucketed:  # noqa: D102 - described in the base class
        size, sizes = batch.batch_size, batch.sizes
        num_ids, ids, columns = batch.num_ids, batch.values, batch.columns
        if self._index is not None:
            num_ids, selection = self._last.of(self._selected, num_ids)
            ids = selection.of(ids)
            columns = columns and {name: selection.of(own) for name, own in columns.items()}
            sizes = None if sizes is None else sizes[self._features]
        if not self._is_pooled:
            return Bucketed(size, num_ids, num_ids, ids, None, columns, None)
        lengths = self._lengths(batch)
        if sizes is None:
            sizes = num_ids * 0 + size
        else:
            lengths = take(lengths, np.arange(len(sizes)) * size, sizes)
        return Bucketed(size, num_ids, sizes, ids, lengths, columns, None)


@frozen(eq=False)
class _Sorted:
    """Ids of a batch sorted by bucket.

    Args:
        batch: the batch.
        sizes: number of ids of each reading, ``[R]``.
        place: place of each sorted id among those of all readings, ``[N]``.
        buckets: bucket of each id of all readings, unsorted.
        counts: number of ids of each bucket, ``[Q]``, on the batch's device.
    """

    batch: FeatureBatch
    sizes: Ints
    place: Tensor
    buckets: Tensor
    counts: Tensor

    @property
    def bucket(self) -> Tensor:
        """The bucket of each sorted id: ``[N]``."""
        return self.buckets.index_select(0, self.place)


_BucketBags: TypeAlias = tuple[Ints, Ints, Tensor | None, Tensor | None]
"""Ids and bags of each bucket, lengths and places of the bags, as :class:`Bucketed` has them by slot."""


class _BucketRouter(Router):
    """Features whose ids are parted by row maps: each slot gets those of its part.

    Readings are ordered by the class of their row map, so that each class is called once. Buckets are ordered by the
    first slot that reads them, so that ids need no second sort if no two slots share a bucket.
    """

    def __init__(self, plan: RoutingPlan, slots: SlotColumns) -> None:
        used = np.unique(plan.pieces.reading[slots.piece]).tolist()
        used.sort(key=lambda place: torch.typename(type(plan.readings[place].row_map)))
        readings = [plan.readings[place] for place in used]
        features = np.array([reading.feature for reading in readings], dtype=np.int64)
        super().__init__(plan, slots, features)
        # Only features that are parted are cut.
        maps = [reading.row_map for reading in readings if reading.row_map is not None]
        self._by_class = [list(own) for _, own in groupby(maps, type)]
        num_parts = np.array([row_map.num_parts for row_map in maps], dtype=np.int64)
        self._first_part = starts_of(num_parts)
        first = np.zeros(len(plan.readings), dtype=np.int64)
        first[used] = self._first_part
        self._number_buckets(first[plan.pieces.reading[slots.piece]] + slots.part, int(num_parts.sum()))

    def _number_buckets(self, part_of_slot: Ints, num_parts: int) -> None:
        """Number the buckets.

        Args:
            part_of_slot: part that each slot reads, counted through all readings, ``[S]``.
            num_parts: parts of all readings.
        """
        num_slots = len(part_of_slot)
        # Written backwards, so that the first slot of each part is written last and stays.
        first_slot = np.full(num_parts, num_slots, dtype=np.int64)
        first_slot[part_of_slot[::-1]] = np.arange(num_slots)[::-1]
        used = np.flatnonzero(first_slot < num_slots)
        part_of_bucket = used[np.argsort(first_slot[used])]
        self._has_unread = len(used) < num_parts
        self._number_classes(part_of_bucket, num_parts)
        self._num_buckets = len(used)
        # Parts that are not read share the last bucket.
        bucket_of_part = np.full(num_parts, len(used), dtype=np.int64)
        bucket_of_part[part_of_bucket] = np.arange(len(used))
        self._bucket_of_part = Constant(bucket_of_part)
        self._bucket_of_slot = None if len(used) == num_slots else bucket_of_part[part_of_slot]

    def _number_classes(self, part_of_bucket: Ints, num_parts: int) -> None:
        """Give the buckets sort keys, as few as possible.

        Ids already stand reading after reading, and a stable sort keeps that order. So neighbouring buckets share a key
        as long as their readings rise. In the usual order of slots, rank after rank, the key is the rank.
        """
        reading = np.searchsorted(self._first_part, part_of_bucket, side="right") - 1
        # A new key begins at each bucket whose reading does not rise.
        falls = np.concatenate([[False], reading[1:] <= reading[:-1]])
        classes = np.cumsum(falls)
        unread = int(classes.max(initial=-1)) + 1
        # Ids of unread parts sort last, and are cut off.
        class_of_part = np.full(num_parts, unread, dtype=np.int32)
        class_of_part[part_of_bucket] = classes
        self._class_of_part, self._num_classes = Constant(class_of_part), unread + self._has_unread

    def route(self, batch: FeatureBatch) -> Bucketed:
        sizes, selection = self._last.of(self._selected, batch.num_ids)
        rows, parts = self._placed(selection.of(batch.values), sizes)
        buckets = self._bucket_of_part.on(parts.device).index_select(0, parts)
        counts = counts_of(buckets, self._num_buckets + self._has_unread)[: self._num_buckets]
        keys = self._class_of_part.on(parts.device).index_select(0, parts)
        place = order_of(keys, self._num_classes)
        if self._has_unread:
            place = place[: int(read_on_host(counts.sum()))]
        num_ids, num_bags, lengths, places = self._bags(_Sorted(batch, sizes, place, buckets, counts))
        columns = batch.columns and {
            name: selection.of(own).index_select(0, place) for name, own in batch.columns.items()
        }
        ids = rows.index_select(0, place)
        routed = Bucketed(batch.batch_size, num_ids, num_bags, ids, lengths, columns, places)
        return routed if self._bucket_of_slot is None else _repeated(routed, self._bucket_of_slot)

    def _placed(self, ids: Tensor, sizes: Ints) -> tuple[Tensor, Tensor]:
        """Find the row of each id in its part, and its part, counted through all readings: ``[N]`` each."""
        counts = sizes.tolist()
        if len(self._by_class) == 1:
            (maps,) = self._by_class
            parts, rows = maps[0].place(maps, ids, counts)
        else:
            found, first, start = [], 0, 0
            for maps in self._by_class:
                own = counts[first : first + len(maps)]
                first, stop = first + len(maps), start + sum(own)
                found.append(maps[0].place(maps, ids[start:stop], own))
                start = stop
            parts, rows = map(torch.cat, zip(*found, strict=True))
        return rows, parts + repeated(self._first_part, sizes, ids.device)

    @abstractmethod
    def _bags(self, ids: _Sorted) -> _BucketBags:
        """Compute the bags of each bucket."""

    def _samples(self, ids: _Sorted) -> Tensor:
        """The sample of each sorted id: ``[N]`` int32."""
        size, lengths = ids.batch.batch_size, self._lengths(ids.batch)
        samples = torch.arange(size, dtype=torch.int32, device=lengths.device).repeat(len(self._features))
        return spread(samples, lengths, int(total(ids.sizes))).index_select(0, ids.place)


class CutRouter(_BucketRouter):
    """A router of parted ids with a bag for each sample."""

    bucketing = Bucketing.CUT

    def _bags(self, ids: _Sorted) -> _BucketBags:
        size, num_buckets = ids.batch.batch_size, self._num_buckets
        # Bag of each id: bucket * B + sample. Counting the ids of each bag gives its length, empty bags too.
        bag = ids.bucket.mul_(size).add_(self._samples(ids))
        lengths = counts_of(bag, num_buckets * size)
        num_ids = read_on_host(ids.counts).numpy()
        return num_ids, np.full(num_buckets, size), lengths.to(torch.int32), None


class RaggedRouter(_BucketRouter):
    """A router of parted ids that leaves out bags without ids."""

    bucketing = Bucketing.RAGGED

    def _bags(self, ids: _Sorted) -> _BucketBags:
        samples, bucket = self._samples(ids), ids.bucket
        # A bag begins where the bucket or the sample changes. The last mark ends the last bag.
        begins = torch.ones(samples.shape[0] + 1, dtype=torch.bool, device=samples.device)
        torch.ne(samples[1:], samples[:-1], out=begins[1:-1])
        begins[1:-1] |= bucket[1:] != bucket[:-1]
        num_bags = torch.zeros_like(ids.counts).scatter_add_(0, bucket, begins[:-1].long())
        num_ids, num_bags = read_on_host(torch.stack([ids.counts, num_bags])).numpy()
        edges = places_where(begins, int(total(num_bags)) + 1)
        lengths = (edges[1:] - edges[:-1]).to(torch.int32)
        return num_ids, num_bags, lengths, samples.index_select(0, edges[:-1])


class CutSequenceRouter(_BucketRouter):
    """A router of parted ids of sequences: each id is a bag of its own."""

    bucketing = Bucketing.CUT

    def _bags(self, ids: _Sorted) -> _BucketBags:
        num_ids = read_on_host(ids.counts).numpy()
        # Place of each id among its feature's: its place among all readings' ids, less the start of its reading.
        first = repeated(starts_of(ids.sizes), ids.sizes, ids.place.device)
        return num_ids, num_ids, None, ids.place - first.index_select(0, ids.place)


def _repeated(buckets: Bucketed, bucket_of_slot: Ints) -> Bucketed:
    """Copy buckets to the slots that read them; some buckets are read by several slots."""
    num_ids, num_bags = buckets.num_ids[bucket_of_slot], buckets.num_bags[bucket_of_slot]
    first_id = starts_of(buckets.num_ids)[bucket_of_slot]
    first_bag = starts_of(buckets.num_bags)[bucket_of_slot]
    return Bucketed(
        batch_size=buckets.batch_size,
        num_ids=num_ids,
        num_bags=num_bags,
        ids=take(buckets.ids, first_id, num_ids),
        lengths=None if buckets.lengths is None else take(buckets.lengths, first_bag, num_bags),
        columns={name: take(own, first_id, num_ids) for name, own in buckets.columns.items()},
        places=None if buckets.places is None else take(buckets.places, first_bag, num_bags),
    )
