"""The hierarchical way home: partial sums are added inside the host before they cross to other hosts.

Legend: L ranks of a host, h host, l local rank, B_w batch size of rank w. Rank ``h * L + l`` is local rank ``l`` of
host ``h``. Forward: 1. inside each host, local rank ``l`` gets its neighbours' partial sums for the batches of all
ranks with local rank ``l``, and adds them; 2. it sends the sums to those ranks. So ``1 / L`` of the direct way's bytes
cross hosts. Backward takes the same two steps the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Group, Slot
from shardwright.runtime.part import GradientOf
from shardwright.runtime.return_paths import DirectReturn, ReturnPath, Trip, TripStep, pack_slots, split_slots
from shardwright.runtime.wire import OutputCodecs, Segment


class HostReturn(ReturnPath):
    """Pooled partial sums of row parts that share a host."""

    def __init__(self, groups: Sequence[Sequence[Group]], env: ShardingEnv, codecs: OutputCodecs) -> None:
        _check_hosts(env)
        self.groups, self.env = groups, env
        self.host_size = env.local_world_size
        self.num_hosts = env.world_size // env.local_world_size
        self.sums = [_host_sums(self._slots_of_host(host)) for host in range(self.num_hosts)]
        self.arrivals = [slot.arrival for sums in self.sums for slot in sums]
        self.wanted = [tuple(slot.gradient for slot in sums) for sums in self.sums]
        outputs = {slot.output for sums in self.sums for slot in sums}
        self.results, self.gradients = codecs.wires(env.communicator, outputs)
        own = {slot: place for place, slot in enumerate(self.sums[env.rank // self.host_size])}
        # For each local group, the place of each slot among the host's sums.
        self.places = [[own[_summed(slot)] for slot in group.slots] for group in groups[env.rank]]

    @classmethod
    def among(cls, env: ShardingEnv) -> type[ReturnPath]:
        """On one host nothing crosses: partial sums go straight to who asked, who adds them."""
        return DirectReturn if env.local_world_size == env.world_size else cls

    def _slots_of_host(self, host: int) -> list[Slot]:
        ranks = range(host * self.host_size, (host + 1) * self.host_size)
        return [slot for rank in ranks for group in self.groups[rank] for slot in group.slots]

    def neighbours(self) -> list[int]:
        """The ranks of this host."""
        first = self.env.rank // self.host_size * self.host_size
        return list(range(first, first + self.host_size))

    def counterparts(self, local_rank: int) -> list[int]:
        """The ranks of all hosts with that local rank."""
        return list(range(local_rank, self.env.world_size, self.host_size))

    def width(self, host: int, *, gradient: bool = False) -> int:
        """Elements of one sample's sums (or their gradients) of a host."""
        return sum(slot.gradient_dim if gradient else slot.dim for slot in self.sums[host])

    def segments(self, rows: dict[int, tuple[int, int]], *, gradient: bool) -> list[list[Segment]]:
        """What travels between this rank and each other: the sums of a host for some samples.

        Args:
            rows: for each rank that anything travels to or from, the host whose sums they are, and the samples.
            gradient: whether it is their gradients.
        """
        return [
            [_segment(self.sums[rows[rank][0]], rows[rank][1], gradient=gradient)] if rank in rows else []
            for rank in range(self.env.world_size)
        ]

    def start(self, trip: Trip) -> TripStep:  # noqa: D102 - described in the base class
        return _HostTrip(self, trip)

    def summary(self) -> str:  # noqa: D102
        widths = ", ".join(f"host {host} {self.width(host)}" for host in range(self.num_hosts))
        return f"{widths} (summed inside the host)"


def _segment(sums: Sequence[Slot], rows: int, *, gradient: bool) -> Segment:
    """Sums (or their gradients) side by side."""
    return Segment(
        outputs=[slot.output for slot in sums],
        dims=[slot.gradient_dim if gradient else slot.dim for slot in sums],
        counts=[rows] * len(sums),
        batch_major=True,
    )


def _check_hosts(env: ShardingEnv) -> None:
    if env.world_size % env.local_world_size:
        raise UnsupportedError(
            f"{env.world_size} ranks do not divide into hosts of {env.local_world_size} (LOCAL_WORLD_SIZE); "
            "sums inside a host need equal hosts"
        )


def _summed(slot: Slot) -> Slot:
    """What slots of different row parts of one column block have in common: they add up."""
    return Slot(0, slot.output, slot.columns, slot.gradient_columns)


def _host_sums(slots: Sequence[Slot]) -> list[Slot]:
    return list(dict.fromkeys(_summed(slot) for slot in slots))


class _HostTrip(TripStep):
    def __init__(self, path: HostReturn, trip: Trip) -> None:
        self._path, self._trip, self._env = path, trip, path.env
        self._host = self._env.rank // path.host_size
        self._local = self._env.rank % path.host_size
        self._batch_sizes = trip.batch_sizes
        self._start_inside()
        self._trip = evolve(trip, results=())  # they are sent

    def proceed(self) -> None:
        self._start_crossing(self._transfer.wait().view(self._path.host_size, -1).sum(0))

    def _sizes(self, local_rank: int) -> list[int]:
        """The batch sizes of the ranks with that local rank, host by host."""
        return [self._batch_sizes[rank] for rank in self._path.counterparts(local_rank)]

    def _splits(self, by_rank: dict[int, int], width: int = 1) -> list[int]:
        """Splits over the world, zero but for the ranks given."""
        return [by_rank.get(rank, 0) * width for rank in range(self._env.world_size)]

    def _start_inside(self) -> None:
        """Collective, started: partial sums inside the host, those for its counterparts to each rank."""
        path, width = self._path, self._path.width(self._host)
        partial = self._partial_sums(width)
        sizes = self._inside_sizes()
        sent = torch.cat(
            [
                partial[other]
                for rank in path.neighbours()
                for other in path.counterparts(rank % path.host_size)
            ]
        ).view(-1)
        mine = dict.fromkeys(path.neighbours(), sizes[self._env.rank])
        self._transfer = path.results.exchange(
            sent,
            self._splits(mine, width),
            self._splits(sizes, width),
            lambda: (self._own_sums(sizes, gradient=False), self._own_sums(mine, gradient=False)),
            label="results inside the host",
        )

    def _inside_sizes(self) -> dict[int, int]:
        """For each neighbour the samples of all its counterparts, and itself."""
        return {rank: sum(self._sizes(rank % self._path.host_size)) for rank in self._path.neighbours()}

    def _own_sums(self, sizes: dict[int, int], *, gradient: bool) -> list[list[Segment]]:
        """This host's sums, for so many samples to (or from) each rank."""
        rows = {rank: (self._host, size) for rank, size in sizes.items()}
        return self._path.segments(rows, gradient=gradient)

    def _asked_sums(self, *, gradient: bool) -> list[list[Segment]]:
        """Each host's sums for this rank's samples, from (or to) its counterpart there."""
        batch_size = self._batch_sizes[self._env.rank]
        ranks = self._path.counterparts(self._local)
        rows = {rank: (rank // self._path.host_size, batch_size) for rank in ranks}
        return self._path.segments(rows, gradient=gradient)

    def _partial_sums(self, width: int) -> list[Tensor]:
        """For each rank's batch, this rank's partial sums ``[B_w, width]`` in the order of the host's sums."""
        path = self._path
        groups = path.groups[self._env.rank]
        starts = [0]
        for slot in path.sums[self._host]:
            starts.append(starts[-1] + slot.dim)
        device, sizes = self._trip.device, self._batch_sizes
        partial = [torch.zeros(size, width, dtype=torch.float32, device=device) for size in sizes]
        for index, (group, result) in enumerate(zip(groups, self._trip.results, strict=True)):
            pieces = result.split([size * group.width for size in self._batch_sizes])
            for source, piece in enumerate(pieces):
                views = split_slots(group, piece, self._trip.counts[source][index])
                for place, view in zip(path.places[index], views, strict=True):
                    partial[source][:, starts[place] : starts[place + 1]] += view
        return partial

    def _start_crossing(self, sums: Tensor) -> None:
        """Collective, started: sums to the counterparts that asked."""
        path = self._path
        ranks = path.counterparts(self._local)
        width, batch_size = path.width(self._host), self._batch_sizes[self._env.rank]
        self._arriving = [batch_size * path.width(rank // path.host_size) for rank in ranks]
        sizes = {rank: self._batch_sizes[rank] for rank in ranks}
        self._transfer = path.results.exchange(
            sums,
            self._splits(dict(zip(ranks, self._arriving, strict=True))),
            self._splits(sizes, width),
            lambda: (self._own_sums(sizes, gradient=False), self._asked_sums(gradient=False)),
            label="results across hosts",
        )

    def views(self) -> list[Tensor]:
        received = self._transfer.wait()
        views: list[Tensor] = []
        batch_size = self._batch_sizes[self._env.rank]
        for host, piece in enumerate(received.split(self._arriving)):
            dims = [slot.dim for slot in self._path.sums[host]]
            views += piece.view(batch_size, sum(dims)).split(dims, dim=1) if dims else []
        del self._transfer
        return views

    def gradients(self) -> list[Tensor]:
        return self._deal(self._spread_inside(self._transfer.wait()))

    def send_gradients(self, gradient_of: GradientOf) -> None:
        """Collective, started: this rank's gradients to its counterparts, theirs for this host's sums."""
        path = self._path
        batch_size = self._batch_sizes[self._env.rank]
        ranks = path.counterparts(self._local)
        leaving = [batch_size * path.width(rank // path.host_size, gradient=True) for rank in ranks]
        sent = torch.empty(sum(leaving), dtype=torch.float32, device=self._trip.device)
        for host, (wanted, region) in enumerate(zip(path.wanted, sent.split(leaving), strict=True)):
            if wanted:
                gradient_of.side_by_side(wanted, region.view(batch_size, path.width(host, gradient=True)))
        width = path.width(self._host, gradient=True)
        sizes = {rank: self._batch_sizes[rank] for rank in ranks}
        self._transfer = path.gradients.exchange(
            sent.mul_(gradient_of.scale),
            self._splits(sizes, width),
            self._splits(dict(zip(ranks, leaving, strict=True))),
            lambda: (self._asked_sums(gradient=True), self._own_sums(sizes, gradient=True)),
            label="gradients across hosts",
        )

    def _spread_inside(self, received: Tensor) -> list[Tensor]:
        """Collective: each neighbour's gradients to all; returns ``[B_w, width]`` for each rank's batch."""
        path, width = self._path, self._path.width(self._host, gradient=True)
        sizes = self._inside_sizes()
        mine = dict.fromkeys(path.neighbours(), sizes[self._env.rank])
        spread = path.gradients.exchange(
            received.repeat(path.host_size),
            self._splits(sizes, width),
            self._splits(mine, width),
            lambda: (self._own_sums(mine, gradient=True), self._own_sums(sizes, gradient=True)),
            label="gradients inside the host",
        ).wait()
        by_rank: dict[int, Tensor] = {}
        pieces = iter(
            spread.split([size * width for local in range(path.host_size) for size in self._sizes(local)])
        )
        for local in range(path.host_size):
            for rank in path.counterparts(local):
                by_rank[rank] = next(pieces).view(self._batch_sizes[rank], width)
        return [by_rank[rank] for rank in range(self._env.world_size)]

    def _deal(self, gradients: list[Tensor]) -> list[Tensor]:
        """Each local group's gradient, flat, in the order of its result."""
        path = self._path
        sums = path.sums[self._host]
        columns = [gradient.split([slot.gradient_dim for slot in sums], dim=1) for gradient in gradients]
        dealt = []
        for group, places in zip(path.groups[self._env.rank], path.places, strict=True):
            width = sum(slot.gradient_dim for slot in group.slots)
            flat = torch.empty(sum(self._batch_sizes) * width, dtype=torch.float32, device=self._trip.device)
            regions = flat.split([size * width for size in self._batch_sizes])
            for own, region in zip(columns, regions, strict=True):
                pack_slots(group, [own[place] for place in places], region)
            dealt.append(flat)
        return dealt
