"""The ways results take from the ranks that looked them up to the ranks that asked, and gradients back.

Legend: W ranks, L ranks of a host, B_w batch size of rank w, D columns of a slot. *Bags* are ids for sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Arrival, Group
from shardwright.runtime.part import GradientOf
from shardwright.runtime.wire import OutputCodecs, Segment


@frozen(eq=False)
class Trip:
    """What is fixed of one batch's way home.

    Args:
        batch_sizes: ``B_w`` of each rank.
        results: each local group's result, flat (see :class:`Lookup`).
        counts: for each source and local group, the bags of each slot.
        own: for each rank and group of it, the bags of each of its slots that this rank asked for.
        device: of all tensors.
    """

    batch_sizes: Sequence[int]
    results: Sequence[Tensor]
    counts: Sequence[Sequence[Sequence[int]]]
    own: Sequence[Sequence[Sequence[int]]]
    device: torch.device


class TripStep(ABC):
    """One batch's results on their way, then their gradients.

    Each method is called once, in this order, and for all ways before the next of any is: so the ways' collectives are
    under way together.
    """

    @abstractmethod
    def proceed(self) -> None:
        """Go on where results take more than one collective: wait for the one before, and start the last."""

    @abstractmethod
    def views(self) -> list[Tensor]:
        """Wait: ``[bags, D]`` for each of the path's arrivals."""

    @abstractmethod
    def send_gradients(self, gradient_of: GradientOf) -> None:
        """Start sending gradients."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Wait for gradients; returns each local group's, flat, in the order of its result."""


class ReturnPath(ABC):
    """The way home for the groups of one dataflow.

    Attributes:
        arrivals: what it brings to each rank, in the order of :meth:`TripStep.views`.
    """

    arrivals: Sequence[Arrival]

    @abstractmethod
    def __init__(self, groups: Sequence[Sequence[Group]], env: ShardingEnv, codecs: OutputCodecs) -> None:
        """Decide orders and sizes.

        Args:
            groups: the path's groups on each rank.
            env: the ranks.
            codecs: by what results and gradients of each output travel.
        """

    @abstractmethod
    def start(self, trip: Trip) -> TripStep:
        """Begin to send results."""

    @abstractmethod
    def summary(self) -> str:
        """One line for people."""


def _elements(group: Group, counts: Sequence[int], *, gradient: bool = False) -> int:
    """Elements of a group's result (or gradient) for slots of so many bags."""
    dims = [slot.gradient_dim if gradient else slot.dim for slot in group.slots]
    return sum(count * dim for count, dim in zip(counts, dims, strict=True))


def split_slots(group: Group, region: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views ``[bags, D]`` of each slot of a group's result for one rank."""
    dims = [slot.dim for slot in group.slots]
    if group.batch_major:
        return list(region.view(counts[0], group.width).split(dims, dim=1))
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    pieces = region.split(sizes)
    return [piece.view(count, dim) for piece, count, dim in zip(pieces, counts, dims, strict=True)]


def pack_slots(group: Group, pieces: Sequence[Tensor], region: Tensor) -> None:
    """Write ``[bags, D]`` gradients of a group's slots into ``region``, in the order of its result."""
    if group.batch_major:
        width = sum(piece.shape[1] for piece in pieces)
        torch.cat(list(pieces), dim=1, out=region.view(pieces[0].shape[0], width))
    else:
        torch.cat([piece.reshape(-1) for piece in pieces], out=region)


class DirectReturn(ReturnPath):
    """Each rank sends its results straight to the rank that asked: one collective, and one back."""

    def __init__(self, groups: Sequence[Sequence[Group]], env: ShardingEnv, codecs: OutputCodecs) -> None:
        self.groups, self.env = groups, env
        outputs = {slot.output for own in groups for group in own for slot in group.slots}
        self.results, self.gradients = codecs.wires(env.communicator, outputs)
        self.arrivals = [slot.arrival for own in groups for group in own for slot in group.slots]

    def start(self, trip: Trip) -> TripStep:  # noqa: D102 - described in the base class
        return _DirectTrip(self, trip)

    def summary(self) -> str:  # noqa: D102
        widths = [sum(group.width for group in groups) for groups in self.groups]
        return ", ".join(f"rank {rank} {width}" for rank, width in enumerate(widths))


class _DirectTrip(TripStep):
    def __init__(self, path: DirectReturn, trip: Trip) -> None:
        self._path, self._trip = path, evolve(trip, results=())  # results are sent here, not kept
        mine = path.groups[path.env.rank]
        sizes = [
            [_elements(group, own) for group, own in zip(mine, counts, strict=True)] for counts in trip.counts
        ]
        sent = _by_source(trip.results, sizes, trip.device)
        splits = [self._asked(rank) for rank in range(path.env.world_size)]
        self._transfer = path.results.exchange(
            sent,
            splits,
            [sum(own) for own in sizes],
            lambda: (self._answered(gradient=False), self._asked_for(gradient=False)),
            label="results",
        )

    def _asked_for(self, *, gradient: bool) -> list[list[Segment]]:
        """What comes from each rank (or goes to it, of gradients)."""
        pairs = zip(self._path.groups, self._trip.own, strict=True)
        return [_segments(groups, counts, gradient=gradient) for groups, counts in pairs]

    def _answered(self, *, gradient: bool) -> list[list[Segment]]:
        """What goes to each rank (or comes from it, of gradients)."""
        mine = self._path.groups[self._path.env.rank]
        return [_segments(mine, counts, gradient=gradient) for counts in self._trip.counts]

    def _asked(self, rank: int, *, gradient: bool = False) -> int:
        """Elements that come from (or gradients that go to) ``rank``."""
        pairs = zip(self._path.groups[rank], self._trip.own[rank], strict=True)
        return sum(_elements(group, counts, gradient=gradient) for group, counts in pairs)

    def proceed(self) -> None:
        """Results take one collective, which is under way."""

    def views(self) -> list[Tensor]:
        received = self._transfer.wait()
        views: list[Tensor] = []
        start = 0
        for groups, own in zip(self._path.groups, self._trip.own, strict=True):
            for group, counts in zip(groups, own, strict=True):
                stop = start + _elements(group, counts)
                views += split_slots(group, received[start:stop], counts)
                start = stop
        del self._transfer
        return views

    def send_gradients(self, gradient_of: GradientOf) -> None:
        path = self._path
        send_splits = [self._asked(rank, gradient=True) for rank in range(path.env.world_size)]
        sent = torch.empty(sum(send_splits), device=self._trip.device)
        start = 0
        for groups, own in zip(path.groups, self._trip.own, strict=True):
            for group, counts in zip(groups, own, strict=True):
                stop = start + _elements(group, counts, gradient=True)
                pack_slots(group, [gradient_of(slot.gradient) for slot in group.slots], sent[start:stop])
                start = stop
        self._sizes = [
            [
                _elements(g, own, gradient=True)
                for g, own in zip(path.groups[path.env.rank], counts, strict=True)
            ]
            for counts in self._trip.counts
        ]
        splits = [sum(own) for own in self._sizes]
        self._transfer = path.gradients.exchange(
            sent,
            splits,
            send_splits,
            lambda: (self._asked_for(gradient=True), self._answered(gradient=True)),
            label="gradients",
        )

    def gradients(self) -> list[Tensor]:
        return _by_group(self._transfer.wait(), self._sizes)


def _segments(groups: Sequence[Group], counts: Sequence[Sequence[int]], *, gradient: bool) -> list[Segment]:
    """Where the slots' blocks lie in the results (or gradients) of groups for one rank."""
    return [
        Segment(
            outputs=[slot.output for slot in group.slots],
            dims=[slot.gradient_dim if gradient else slot.dim for slot in group.slots],
            counts=own,
            batch_major=group.batch_major,
        )
        for group, own in zip(groups, counts, strict=True)
    ]


def _by_source(results: Sequence[Tensor], sizes: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Groups' results ``[source][group]`` in one tensor, from ``[group][source]``; ``sizes`` by source and group."""
    if len(results) == 1:
        return results[0]
    if not results:
        return torch.empty(0, device=device)
    pieces = [result.split([own[index] for own in sizes]) for index, result in enumerate(results)]
    return torch.cat([group[source] for source in range(len(sizes)) for group in pieces])


def _by_group(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each group's gradient, from ``[source][group]`` in one tensor."""
    num_groups = len(sizes[0])
    if num_groups == 1:
        return [received]
    pieces = received.split([size for own in sizes for size in own])
    return [torch.cat(pieces[group::num_groups]) for group in range(num_groups)]
