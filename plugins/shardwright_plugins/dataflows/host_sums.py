"""The hierarchical return path: partial sums are added inside the host before they cross to other hosts.

Legend: L ranks of a host, H hosts, W ranks, B batch size of this rank, B_w of rank w, R samples of all ranks. Rank
``h * L + l`` is local rank ``l`` of host ``h``. Forward:

1. Inside each host, local rank ``l`` gets its neighbours' partial sums for the batches of its counterparts, which are
   the ranks of all hosts with local rank ``l``, and adds them.
2. It sends the sums to those ranks.

So ``1 / L`` of the direct path's bytes cross hosts. Backward takes the two steps in reverse order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import Constant, sent_to
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.routed.direct import GRADIENTS, RESULTS, DirectReturn
from shardwright.runtime.routed.plan import RoutingPlan
from shardwright.runtime.routed.return_path import Answers, PathSlots, ReturnPath, ReturnStep
from shardwright.runtime.routed.section import columns_of, wire_of
from shardwright.runtime.routed.sections import Matrices
from shardwright.runtime.routed.wire import Transfer, Wire
from shardwright.runtime.step.columns import Move, Placement
from shardwright.runtime.step.kernel_groups import GroupKind
from shardwright.runtime.step.segments import starts_of, take


class HostReturn(ReturnPath):
    """The return path of pooled partial sums of row parts that share a host."""

    keeps_empty_bags: ClassVar[bool] = True

    def __init__(self, plan: RoutingPlan, slots: PathSlots, env: ShardingEnv) -> None:
        _check_hosts(env)
        self.host_size = env.local_world_size
        self.num_hosts = env.world_size // env.local_world_size
        self.rank, self.host, self.local = env.rank, *divmod(env.rank, env.local_world_size)
        alike: dict[object, list[int]] = {}
        for kind in slots.kinds:
            alike.setdefault(_what_is_alike(plan.kinds[kind]), []).append(kind)
        self.sums = [HostSums(plan, kinds, self) for kinds in alike.values()]
        self.brings = [own.brings for own in self.sums]
        self.wires = [
            Wire(env.communicator, [own.wire[direction] for own in self.sums])
            for direction in (RESULTS, GRADIENTS)
        ]
        ranks = np.arange(env.world_size)
        self.neighbours = ranks // self.host_size == self.host
        self.counterparts = ranks % self.host_size == self.local

    @classmethod
    def among(cls, env: ShardingEnv) -> type[ReturnPath]:
        """The path to take: the direct one if all ranks are on one host, because nothing crosses hosts then."""
        return DirectReturn if env.local_world_size == env.world_size else cls

    def start(self, answers: Answers) -> ReturnStep:  # noqa: D102 - described in the base class
        return _HostStep(self, answers)

    def summary(self) -> str:  # noqa: D102
        widths = np.sum([own.widths[RESULTS] for own in self.sums], axis=0)
        hosts = ", ".join(f"host {host} {width}" for host, width in enumerate(widths.tolist()))
        return f"{hosts} (summed inside the host)"


def _check_hosts(env: ShardingEnv) -> None:
    if env.world_size % env.local_world_size:
        raise UnsupportedError(
            f"{env.world_size} ranks do not divide into hosts of {env.local_world_size} (LOCAL_WORLD_SIZE); "
            "sums inside a host need equal hosts"
        )


def _what_is_alike(kind: GroupKind) -> object:
    """Key of the kinds whose sums may share a matrix: same codecs, and same width if a codec encodes whole rows."""
    writes_rows = any(codec is not None and not codec.is_elementwise for codec in kind.codecs)
    return kind.codecs, kind.widths if writes_rows else None


class HostSums:
    """The sums of each host, ``[samples, columns]``, for slots whose columns travel alike.

    Args:
        plan: routing plan of all slots.
        kinds: indices of the slots' kernel group kinds.
        path: the return path that the sums belong to.

    Attributes:
        brings: columns of the sums that arrive.
        widths: columns of each host's sums, and of their gradients, ``[H]`` each.
        wire: message segment of results, and of gradients.
    """

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int], path: HostReturn) -> None:
        slots = PathSlots.of_kinds(plan, kinds)
        ranks = np.repeat(np.arange(slots.columns.world_size), slots.columns.per_rank)
        # A host has one sum for each distinct (host, piece), in order of its first slot. The pair is one integer,
        # host * number of pieces + piece.
        keys = ranks // path.host_size * len(plan.pieces.output) + slots.columns.piece
        first = np.sort(np.unique(keys, return_index=True)[1])
        hosts, pieces = ranks[first] // path.host_size, slots.columns.piece[first].astype(np.int64)
        made = Matrices(plan, pieces, hosts, path.num_hosts)
        self.widths, self.brings, self.spread = made.widths, made.brings, made.spread
        self.local = LocalSums(plan, slots.groups, pieces[hosts == path.host])
        self.wire = wire_of(plan.kinds[kinds[0]], made.units)


class LocalSums:
    """The part of the host's sums that this rank's groups contribute to.

    Args:
        plan: routing plan of all slots.
        groups: indices of this rank's groups.
        pieces: piece of each of the host's sums, in their order.
    """

    def __init__(self, plan: RoutingPlan, groups: Sequence[int], pieces: Ints) -> None:
        self.groups = [(group, plan.groups[group]) for group in groups]
        place = np.zeros(len(plan.pieces.output), dtype=np.int64)
        place[pieces] = np.arange(len(pieces))
        first = int(plan.slots.first[plan.rank])
        own = [
            plan.slots.piece[first + group.slots.start : first + group.slots.stop] for _, group in self.groups
        ]
        self._placed = [place[slots] for slots in own]
        every = [columns_of(plan, pieces, gradient=gradient) for gradient in (False, True)]
        self._sizes = [columns.stop - columns.start for columns in every]
        self.width, self.gradient_width = (int(sizes.sum()) for sizes in self._sizes)

    @cached_property
    def _gather(self) -> Move | None:
        """Copy from the groups' columns, side by side, to the sums; ``None`` if a sum has no column here, or several.

        A copy serves only where each sum has exactly one contribution on this rank. Else columns are added.
        """
        placed, sizes = np.concatenate([np.zeros(0, np.int64), *self._placed]), self._sizes[RESULTS]
        if not np.array_equal(np.sort(placed), np.arange(len(sizes))):
            return None
        widths = sizes[placed]
        target = Placement.in_one(starts_of(sizes)[placed], self.width)
        return Move(widths, Placement.in_one(starts_of(widths), self.width), target)

    @cached_property
    def _column(self) -> Constant:
        """The column of the sums that each of the groups' columns is added to: ``[columns of the groups]``."""
        sizes = self._sizes[RESULTS]
        starts = starts_of(sizes)
        ranges = [
            np.arange(starts[place], starts[place] + sizes[place]) for own in self._placed for place in own
        ]
        return Constant(np.concatenate([np.zeros(0, np.int64), *ranges]))

    @cached_property
    def _deal(self) -> list[Move]:
        """Copies from the sums' gradient to each group's gradient, its slots side by side."""
        sizes = self._sizes[GRADIENTS]
        starts = starts_of(sizes)
        return [
            Move(
                sizes[placed],
                Placement.in_one(starts[placed], self.gradient_width),
                Placement.in_one(starts_of(sizes[placed]), int(sizes[placed].sum())),
            )
            for placed in self._placed
        ]

    def partial(self, answers: Answers) -> Tensor:
        """Compute this rank's partial sums for the samples of all ranks: ``[R, width]``."""
        samples = int(answers.batch_sizes.sum())
        looked_up = [
            _as_matrix(answers.results[index], group.kind, len(group.slots), answers.batch_sizes)
            for index, group in self.groups
        ]
        joined = _side_by_side(looked_up, samples, answers.device)
        if self._gather is not None:
            return self._gather(joined.view(-1), samples).view(samples, self.width)
        sums = torch.zeros(samples, self.width, dtype=torch.float32, device=answers.device)
        return sums.index_add_(1, self._column.on(answers.device), joined)

    def by_group(self, gradient: Tensor, batch_sizes: Ints) -> dict[int, Tensor]:
        """Deal the sums' gradient ``[R, width]`` to the groups: each one's flat gradient, by its index."""
        dealt = {}
        for (index, group), move in zip(self.groups, self._deal, strict=True):
            own = move(gradient.view(-1), len(gradient))
            dealt[index] = (
                own if group.kind.is_matrix else _as_rows(own, group.kind, len(group.slots), batch_sizes)
            )
        return dealt


def _side_by_side(matrices: Sequence[Tensor], samples: int, device: torch.device) -> Tensor:
    if len(matrices) == 1:
        return matrices[0]
    return torch.cat([torch.empty(samples, 0, dtype=torch.float32, device=device), *matrices], 1)


def _row_of(num_slots: int, batch_sizes: Ints) -> Tensor:
    """Row of each sample and slot, ``[R, S]``, in a group's result that stands rank by rank, then slot by slot.

    For sample ``b`` of rank ``w`` and slot ``s`` that is ``S * (samples of ranks before w) + s * B_w + b``.
    """
    first = np.repeat(starts_of(batch_sizes), batch_sizes)[:, None]
    inside = np.arange(len(first))[:, None] - first
    size = np.repeat(batch_sizes, batch_sizes)[:, None]
    return torch.from_numpy(first * num_slots + np.arange(num_slots) * size + inside)


def _as_matrix(result: Tensor, kind: GroupKind, num_slots: int, batch_sizes: Ints) -> Tensor:
    """Rearrange a group's result as ``[R, columns of all slots]``."""
    samples = int(batch_sizes.sum())
    if kind.is_matrix or kind.widths is None:
        return result.view(samples, result.numel() // max(samples, 1))
    width = kind.widths[RESULTS]
    index = _row_of(num_slots, batch_sizes).view(-1)
    return (
        result.view(samples * num_slots, width)
        .index_select(0, sent_to(result.device, index))
        .view(samples, num_slots * width)
    )


def _as_rows(gradient: Tensor, kind: GroupKind, num_slots: int, batch_sizes: Ints) -> Tensor:
    """Rearrange a gradient ``[R, columns of all slots]``, flat, slot after slot: the inverse of :func:`_as_matrix`."""
    assert kind.widths is not None  # slots whose results stand one after the other have one width
    index = _row_of(num_slots, batch_sizes).view(-1)
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(index))
    rows = gradient.view(len(index), kind.widths[GRADIENTS])
    return rows.index_select(0, sent_to(gradient.device, inverse)).view(-1)


class _HostStep(ReturnStep):
    def __init__(self, path: HostReturn, answers: Answers) -> None:
        self._path, self._batch_sizes = path, answers.batch_sizes
        self._size = int(answers.batch_sizes[path.rank])
        ranks = np.arange(len(answers.batch_sizes))
        # Ranks sorted by local rank, then by host: the samples that one neighbour sums stand together.
        self._order = np.lexsort((ranks // path.host_size, ranks % path.host_size))
        self._own_samples = int(answers.batch_sizes[path.counterparts].sum())
        self._start_inside([own.local.partial(answers) for own in path.sums])

    def _start_inside(self, partial: Sequence[Tensor]) -> None:
        """Start a collective inside the host: each neighbour gets this rank's partial sums for its counterparts."""
        sizes = self._batch_sizes[self._order]
        starts = starts_of(self._batch_sizes)[self._order]
        self._transfer = self._path.wires[RESULTS].exchange(
            [take(own, starts, sizes).reshape(-1) for own in partial],
            self._inside(self._samples_of_local_ranks(), RESULTS),
            self._inside(np.full(self._path.host_size, self._own_samples), RESULTS),
            label="results inside the host",
        )

    def _samples_of_local_ranks(self) -> Ints:
        """Samples of all ranks with each local rank: ``[L]``."""
        samples: Ints = self._batch_sizes.reshape(self._path.num_hosts, self._path.host_size).sum(0)
        return samples

    def _inside(self, samples: Ints, direction: int) -> Ints:
        """Values of each part to (or from) each rank, ``[P, W]``, inside the host.

        Args:
            samples: samples that each neighbour sends or gets sums for, ``[L]``.
            direction: results or gradients.
        """
        widths = np.array([[own.widths[direction][self._path.host]] for own in self._path.sums])
        return self._of(self._path.neighbours, widths * samples)

    def _of(self, ranks: Ints, values: Ints) -> Ints:
        """Put values of some ranks among zeros for the others, ``[P, W]``."""
        every = np.zeros((len(values), len(self._batch_sizes)), dtype=np.int64)
        every[:, ranks] = values
        return every

    def _crossing(self, direction: int) -> tuple[Ints, Ints]:
        """Values of each part between this rank and its counterparts, ``[P, W]`` each.

        The first are this host's sums for their samples; the second their hosts' sums for this rank's samples.
        """
        path = self._path
        widths = np.array([own.widths[direction] for own in path.sums])
        sizes = self._batch_sizes[path.counterparts]
        here = self._of(path.counterparts, widths[:, path.host : path.host + 1] * sizes)
        return here, self._of(path.counterparts, widths * self._size)

    def proceed(self) -> None:
        path = self._path
        arrived = self._transfer.wait()
        summed = [own.view(path.host_size, own.numel() // path.host_size).sum(0) for own in arrived]
        here, theirs = self._crossing(RESULTS)
        self._transfer = path.wires[RESULTS].exchange(summed, here, theirs, label="results across hosts")

    def outputs(self) -> list[Tensor]:
        return self._arrived()

    def _arrived(self) -> list[Tensor]:
        received = self._transfer.wait()
        del self._transfer
        return received

    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Start a collective across hosts: gradients of each host's sums go to the counterpart on that host."""
        self.scale_left = scale  # kernels multiply where they read
        here, theirs = self._crossing(GRADIENTS)
        flat = gradients[0].reshape(-1)
        self._transfer = self._path.wires[GRADIENTS].exchange(
            [own.spread(flat, self._size) for own in self._path.sums],
            theirs,
            here,
            label="gradients across hosts",
        )

    def gradients(self) -> Mapping[int, Tensor]:
        """Make the collective inside the host: every neighbour gets the gradients that this rank received."""
        path = self._path
        spread: Transfer = path.wires[GRADIENTS].exchange(
            [own.repeat(path.host_size) for own in self._arrived()],
            self._inside(np.full(path.host_size, self._own_samples), GRADIENTS),
            self._inside(self._samples_of_local_ranks(), GRADIENTS),
            label="gradients inside the host",
        )
        dealt: dict[int, Tensor] = {}
        for own, values in zip(path.sums, spread.wait(), strict=True):
            dealt |= own.local.by_group(self._by_rank(values, own.local.gradient_width), self._batch_sizes)
        return dealt

    def _by_rank(self, gradient: Tensor, width: int) -> Tensor:
        """Sort gradients, which stand by local rank, then by host, into rank order: ``[R, width]``."""
        sizes = self._batch_sizes[self._order]
        place = np.argsort(self._order)
        rows = gradient.view(int(sizes.sum()), width)
        return take(rows, starts_of(sizes)[place], sizes[place])
