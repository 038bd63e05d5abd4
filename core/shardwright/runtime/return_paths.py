"""The ways results take from the ranks that looked them up to the ranks that asked, and gradients back.

Legend: W ranks, L ranks of a host, B_w batch size of rank w, D columns of a slot. *Bags* are ids for sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Arrival, Group
from shardwright.runtime.part import GradientOf
from shardwright.runtime.wire import OutputCodecs, Segment

Counts: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank and group, the bags of each slot."""


MAX_KNOWN = 64
"""Of how many combinations of batch sizes is kept what follows from them."""


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
    counts: Counts
    own: Counts
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

    @classmethod
    def among(cls, env: ShardingEnv) -> type[ReturnPath]:
        """The path to take among these ranks: this one, unless a shorter one does the same there."""
        return cls

    @abstractmethod
    def start(self, trip: Trip) -> TripStep:
        """Begin to send results."""

    @abstractmethod
    def summary(self) -> str:
        """One line for people."""


def split_slots(
    group: Group, region: Tensor, counts: Sequence[int], *, gradient: bool = False
) -> list[Tensor]:
    """Views ``[bags, D]`` of each slot of a group's result (or its gradient) for one rank."""
    dims = group.gradient_dims if gradient else group.dims
    if group.batch_major:
        return list(region.view(counts[0], sum(dims)).split_with_sizes(dims, dim=1))
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    pieces = region.split_with_sizes(sizes)
    return [piece.view(count, dim) for piece, count, dim in zip(pieces, counts, dims, strict=True)]


def pack_slots(group: Group, pieces: Sequence[Tensor], region: Tensor) -> None:
    """Write ``[bags, D]`` gradients of a group's slots into ``region``, in the order of its result."""
    if group.batch_major:
        torch.cat(list(pieces), dim=1, out=region.view(-1, group.gradient_width))
    else:
        torch.cat([piece.reshape(-1) for piece in pieces], out=region)


@frozen(eq=False)
class _Sizes:
    """Elements that travel between this rank and the others.

    Args:
        asked: of the groups of each rank, what this rank asked for: ``[rank][group]``.
        answered: of this rank's groups, what each rank asked for: ``[rank][group]``.
    """

    asked: list[list[int]]
    answered: list[list[int]]
    asked_splits: list[int]
    answered_splits: list[int]

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Group]], rank: int, own: Counts, counts: Counts, *, gradient: bool
    ) -> _Sizes:
        def sizes(groups: Sequence[Group], counts: Sequence[Sequence[int]]) -> list[int]:
            pairs = zip(groups, counts, strict=True)
            return [group.num_elements(bags, gradient=gradient) for group, bags in pairs]

        asked = [sizes(of_rank, bags) for of_rank, bags in zip(groups, own, strict=True)]
        answered = [sizes(groups[rank], bags) for bags in counts]
        return cls(
            asked, answered, [sum(of_rank) for of_rank in asked], [sum(of_rank) for of_rank in answered]
        )


class DirectReturn(ReturnPath):
    """Each rank sends its results straight to the rank that asked: one collective, and one back."""

    def __init__(self, groups: Sequence[Sequence[Group]], env: ShardingEnv, codecs: OutputCodecs) -> None:
        self.groups, self.env = groups, env
        outputs = {slot.output for own in groups for group in own for slot in group.slots}
        self.results, self.gradients = codecs.wires(env.communicator, outputs)
        self.arrivals = [slot.arrival for own in groups for group in own for slot in group.slots]
        self.wanted = [tuple(slot.gradient for slot in group.slots) for own in groups for group in own]
        self._known: dict[tuple[Counts, Counts, bool], _Sizes] = {}

    def sizes(self, trip: Trip, *, gradient: bool) -> _Sizes:
        """What travels in a trip; the same for batches of the same sizes, as most are."""
        key = (trip.own, trip.counts, gradient)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KNOWN:  # sequences are of new sizes in every batch
                self._known.clear()
            known = _Sizes.of(self.groups, self.env.rank, trip.own, trip.counts, gradient=gradient)
            self._known[key] = known
        return known

    def start(self, trip: Trip) -> TripStep:  # noqa: D102 - described in the base class
        return _DirectTrip(self, trip)

    def summary(self) -> str:  # noqa: D102
        widths = [sum(group.width for group in groups) for groups in self.groups]
        return ", ".join(f"rank {rank} {width}" for rank, width in enumerate(widths))


class _DirectTrip(TripStep):
    def __init__(self, path: DirectReturn, trip: Trip) -> None:
        self._path, self._trip = path, evolve(trip, results=())  # results are sent here, not kept
        self._sizes = path.sizes(trip, gradient=False)
        self._transfer = path.results.exchange(
            _by_source(trip.results, self._sizes.answered, trip.device),
            self._sizes.asked_splits,
            self._sizes.answered_splits,
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

    def proceed(self) -> None:
        """Results take one collective, which is under way."""

    def views(self) -> list[Tensor]:
        regions = iter(self._regions(self._transfer.wait()))
        del self._transfer
        return [
            view
            for groups, own in zip(self._path.groups, self._trip.own, strict=True)
            for group, counts in zip(groups, own, strict=True)
            for view in split_slots(group, next(regions), counts)
        ]

    def _regions(self, buffer: Tensor) -> Sequence[Tensor]:
        """The part of each rank's groups in a buffer of what this rank asked for."""
        sizes = [size for own in self._sizes.asked for size in own]
        return [buffer] if len(sizes) == 1 else buffer.split_with_sizes(sizes)

    def send_gradients(self, gradient_of: GradientOf) -> None:
        path = self._path
        self._sizes = path.sizes(self._trip, gradient=True)
        sent = torch.empty(sum(self._sizes.asked_splits), dtype=torch.float32, device=self._trip.device)
        groups = (group for groups in path.groups for group in groups)
        for group, wanted, region in zip(groups, path.wanted, self._regions(sent), strict=True):
            if group.batch_major:
                gradient_of.side_by_side(wanted, region.view(-1, group.gradient_width))
            else:
                pack_slots(group, gradient_of.unscaled(wanted), region)
        self._transfer = path.gradients.exchange(
            sent.mul_(gradient_of.scale),
            self._sizes.answered_splits,
            self._sizes.asked_splits,
            lambda: (self._asked_for(gradient=True), self._answered(gradient=True)),
            label="gradients",
        )

    def gradients(self) -> list[Tensor]:
        return _by_group(self._transfer.wait(), self._sizes.answered)


def _segments(groups: Sequence[Group], counts: Sequence[Sequence[int]], *, gradient: bool) -> list[Segment]:
    """Where the slots' blocks lie in the results (or gradients) of groups for one rank."""
    return [
        Segment(
            outputs=[slot.output for slot in group.slots],
            dims=group.gradient_dims if gradient else group.dims,
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
        return torch.empty(0, dtype=torch.float32, device=device)
    pieces = [result.split_with_sizes([own[index] for own in sizes]) for index, result in enumerate(results)]
    return torch.cat([group[source] for source in range(len(sizes)) for group in pieces])


def _by_group(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each group's gradient, from ``[source][group]`` in one tensor."""
    num_groups = len(sizes[0])
    if num_groups == 1:
        return [received]
    pieces = received.split_with_sizes([size for own in sizes for size in own])
    return [torch.cat(pieces[group::num_groups]) for group in range(num_groups)]
