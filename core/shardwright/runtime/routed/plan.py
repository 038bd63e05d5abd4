"""What is decided when a module is sharded: the slots of all ranks as columns of numbers, and the local kernel groups.

Legend: W ranks, S slots of all ranks, G kernel groups of all ranks, P pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from shardwright.contracts.codec import Codec
from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.lookup import BlockSpec
from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.blocks import BlockColumns, Ints
from shardwright.planning.layouts.layout import Dataflow
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.plan.plan import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.step.collection import Collection
from shardwright.runtime.step.kernel_groups import Bucketing, GroupKind, KernelGroup, kernel_of, rows_of_parts
from shardwright.runtime.step.segments import order_of

NO_CODECS: tuple[Codec | None, Codec | None] = (None, None)


@frozen
class Reading:
    """A feature whose ids are parted by a row map; ``None``: they are not."""

    feature: int
    row_map: RowMap | None


@frozen(eq=False)
class Pieces:
    """The pieces of outputs that slots bring, as columns: a feature looked up in a range of a table's columns.

    Args:
        output: ``[P]``.
        start: its first column in the output, ``[P]``.
        stop: the column after its last, ``[P]``.
        gradient_start: likewise of the columns whose gradient it gets, ``[P]``.
        gradient_stop: ``[P]``.
        reading: where its ids come from, ``[P]``.
        group: its kernel group, ``[P]``.
    """

    output: Ints
    start: Ints
    stop: Ints
    gradient_start: Ints
    gradient_stop: Ints
    reading: Ints
    group: Ints


@frozen(eq=False)
class SlotColumns:
    """The slots of all ranks, in the order in which they are sent.

    Args:
        first: the first slot of each rank, and where the last rank's end, ``[W + 1]``.
        part: the row part that each reads, ``[S]``.
        piece: what each brings, ``[S]``.
    """

    first: Ints
    part: Ints
    piece: Ints

    @property
    def world_size(self) -> int:
        """``W``."""
        return len(self.first) - 1

    @cached_property
    def per_rank(self) -> Ints:
        """How many slots each rank has: ``[W]``."""
        return np.diff(self.first)

    def chosen(self, is_chosen: Any) -> SlotColumns:
        """Some of the slots: ``is_chosen`` is a mask ``[S]``."""
        if is_chosen.all():
            return self
        before = np.concatenate([[0], np.cumsum(is_chosen)])
        return SlotColumns(before[self.first], self.part[is_chosen], self.piece[is_chosen])


@frozen(eq=False)
class RoutingPlan:
    """Where all ids of some tables of a collection go, and what comes back.

    Args:
        collection: of all tables.
        rank: this rank.
        readings: features and their row maps.
        pieces: what slots bring.
        slots: of all ranks.
        kinds: of the kernel groups of all ranks, ``G``, in the order of their slots on each rank.
        groups: of this rank.
    """

    collection: Collection
    rank: int
    readings: tuple[Reading, ...]
    pieces: Pieces
    slots: SlotColumns
    kinds: tuple[GroupKind, ...]
    groups: tuple[KernelGroup, ...]

    def alone(self) -> RoutingPlan:
        """The slots of this rank as those of the one rank of a world."""
        own = slice(*self.slots.first[self.rank : self.rank + 2])
        count = self.slots.per_rank[self.rank]
        slots = SlotColumns(np.array([0, count]), self.slots.part[own], self.slots.piece[own])
        return evolve(self, rank=0, slots=slots)

    @property
    def bucketing_of_piece(self) -> Ints:
        """The bucketing of each piece's slots: ``[P]``."""
        return np.array([kind.bucketing for kind in self.kinds], dtype=np.int64)[self.pieces.group]


class Paths(ABC):
    """What a part of the engine says of the ways its tables' results take."""

    @abstractmethod
    def of(self, table: int, sharding: ParameterSharding, dataflow: Dataflow) -> tuple[Hashable, bool]:
        """The way home of some blocks of a table, and whether bags without ids are left out on it."""

    def codecs_of(self, table: int) -> tuple[Codec | None, Codec | None]:
        """By what a table's results and gradients travel."""
        return NO_CODECS


def plan_routing(
    collection: Collection,
    members: Sequence[int],
    shardings: Mapping[str, ParameterSharding],
    *,
    rank: int,
    world_size: int,
    device_type: str,
    paths: Paths,
    alone: bool = False,
) -> RoutingPlan:
    """Lay out the routing of some tables of a collection.

    Args:
        collection: all tables.
        members: the indices of those that are routed.
        shardings: how each is sharded, by name.
        rank: this rank.
        world_size: the number of ranks.
        device_type: type of the device that holds the blocks.
        paths: how results travel; only tables of one way share a kernel group.
        alone: plan this rank's blocks only, as those of the one rank of a world: for copies, which ask nobody else.

    Raises:
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """
    builder = _Builder(collection, rank=rank, device_type=device_type, paths=paths)
    for index in members:
        sharding = shardings[collection.tables[index].name]
        blocks = sharding.layout.columns
        builder.add(
            index, sharding, blocks, np.flatnonzero(blocks.rank == rank) if alone else np.arange(len(blocks))
        )
    return builder.plan(world_size) if not alone else builder.plan(world_size).alone()


@frozen(eq=False)
class _KernelShape:
    """A range of columns of a table, as its kernel sees it.

    Args:
        request: what is asked of the kernel.
        first_piece: the first of its pieces, one for each output of the table.
        group: its kernel group.
    """

    request: KernelRequest
    first_piece: int
    group: int


class _Builder:
    """Gathers slots while tables are added in order."""

    def __init__(self, collection: Collection, *, rank: int, device_type: str, paths: Paths) -> None:
        self._collection, self._rank, self._device_type, self._paths = collection, rank, device_type, paths
        self._outputs = collection.outputs_by_table
        self._readings: dict[Reading, int] = {}
        self._kinds: dict[GroupKind, int] = {}
        self._pieces: list[tuple[int, ...]] = []
        self._slots: list[tuple[Any, Any, Any]] = []  # ranks, parts and pieces, int32
        self._blocks: list[tuple[int, BlockSpec]] = []  # groups and their blocks on this rank
        self._kernels: dict[str, ComputeKernel] = {}

    def add(self, index: int, sharding: ParameterSharding, blocks: BlockColumns, chosen: Ints) -> None:
        """Add the chosen blocks of a table, if they have rows: nothing is ever sent to others."""
        layout, outputs = sharding.layout, self._outputs[index]
        row_map = layout.row_map if layout.maps_rows else None
        readings = [
            self._readings.setdefault(
                Reading(self._collection.outputs[output].feature, row_map), len(self._readings)
            )
            for output in outputs
        ]
        kept = chosen[rows_of_parts(layout.row_map)[blocks.part[chosen]] > 0]
        kind_of_block, firsts = _kinds_of(blocks)
        shapes = {}
        for kind in np.unique(kind_of_block[kept]).tolist():
            first = firsts[kind]
            dataflow = blocks.dataflows[blocks.dataflow[first]] or layout.dataflow
            span = int(blocks.start[first]), int(blocks.stop[first])
            shapes[kind] = self._shape(index, sharding, dataflow, span, readings)
        self._add_slots(blocks, kept, kind_of_block, shapes, len(outputs))
        for place in kept[blocks.rank[kept] == self._rank].tolist():
            shape = shapes[int(kind_of_block[place])]
            spec = BlockSpec(
                self._collection.tables[index],
                layout.blocks[place],
                shape.request,
                len(outputs),
                layout.extras,
            )
            self._blocks.append((shape.group, spec))

    def _add_slots(
        self,
        blocks: BlockColumns,
        kept: Ints,
        kind_of_block: Ints,
        shapes: Mapping[int, _KernelShape],
        num_outputs: int,
    ) -> None:
        """A slot for each block and output, in the order of the blocks."""
        first_piece = np.zeros(max(shapes, default=0) + 1, dtype=np.int32)
        for kind, shape in shapes.items():
            first_piece[kind] = shape.first_piece
        pieces = first_piece[kind_of_block[kept]][:, None] + np.arange(num_outputs, dtype=np.int32)
        ranks, parts = (
            np.repeat(column[kept].astype(np.int32), num_outputs) for column in (blocks.rank, blocks.part)
        )
        self._slots.append((ranks, parts, pieces.reshape(-1)))

    def _shape(
        self,
        index: int,
        sharding: ParameterSharding,
        dataflow: Dataflow,
        span: tuple[int, int],
        readings: Sequence[int],
    ) -> _KernelShape:
        table = self._collection.tables[index]
        kernel = self._kernel(sharding.compute_kernel)
        request = KernelRequest.of(
            table, span[1] - span[0], device=self._device_type, on_this_machine=True, first_column=span[0]
        )
        request = kernel.with_extras(request, sharding.layout.extras)
        _check_supported(table, sharding, kernel, request)
        path, leaves_out = self._paths.of(index, sharding, dataflow)
        gradient_span = (0, table.embedding_dim) if kernel.needs_whole_rows(request) else span
        bucketing = Bucketing.CUT if sharding.layout.maps_rows else Bucketing.WHOLE
        if request.is_pooled and leaves_out and bucketing is Bucketing.CUT:
            bucketing = Bucketing.RAGGED
        codecs = self._paths.codecs_of(index)
        is_matrix = request.is_pooled and kernel.batch_major and bucketing is not Bucketing.RAGGED
        are_alike = not is_matrix or any(codec is not None and not codec.is_elementwise for codec in codecs)
        widths = (span[1] - span[0], gradient_span[1] - gradient_span[0]) if are_alike else None
        kind = GroupKind(
            bucketing, path, sharding.compute_kernel, kernel.group_key(request), is_matrix, widths, codecs
        )
        group = self._kinds.setdefault(kind, len(self._kinds))
        shape = _KernelShape(request, len(self._pieces), group)
        for output, reading in zip(self._outputs[index], readings, strict=True):
            self._pieces.append((output, *span, *gradient_span, reading, group))
        return shape

    def _kernel(self, name: str) -> ComputeKernel:
        if name not in self._kernels:
            self._kernels[name] = kernel_of(name)
        return self._kernels[name]

    def plan(self, world_size: int) -> RoutingPlan:
        """All that was added, in the order in which it is sent."""
        order = self._order_of_kinds()
        new_place = np.argsort(order)
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 7).T.copy()
        pieces[-1] = new_place[pieces[-1]]
        kinds = list(self._kinds)
        return RoutingPlan(
            collection=self._collection,
            rank=self._rank,
            readings=tuple(self._readings),
            pieces=Pieces(*pieces),
            slots=self._sorted(pieces[-1], world_size),
            kinds=tuple(kinds[kind] for kind in order),
            groups=tuple(self._groups(order)),
        )

    def _order_of_kinds(self) -> list[int]:
        """By bucketing, then by way home, then as they came."""
        kinds = list(self._kinds)
        paths = {path: place for place, path in enumerate(dict.fromkeys(kind.path for kind in kinds))}
        return sorted(range(len(kinds)), key=lambda kind: (kinds[kind].bucketing, paths[kinds[kind].path]))

    def _sorted(self, group_of_piece: Ints, world_size: int) -> SlotColumns:
        empty = np.zeros(0, dtype=np.int32)
        ranks, parts, pieces = (
            np.concatenate([empty, *columns]) for columns in zip((empty,) * 3, *self._slots, strict=True)
        )
        num_kinds = max(1, len(self._kinds))
        keys = ranks.astype(np.int64) * num_kinds + group_of_piece[pieces]
        order = order_of(torch.from_numpy(keys), world_size * num_kinds).numpy()
        first = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=world_size))])
        return SlotColumns(first, parts[order], pieces[order])

    def _groups(self, order: Sequence[int]) -> Iterator[KernelGroup]:
        by_kind: dict[int, list[BlockSpec]] = {}
        for kind, spec in self._blocks:
            by_kind.setdefault(kind, []).append(spec)
        kinds, start = list(self._kinds), 0
        for kind in order:
            if kind in by_kind:
                blocks = tuple(by_kind[kind])
                stop = start + sum(spec.num_slots for spec in blocks)
                yield KernelGroup(
                    kinds[kind], self._kernel(kinds[kind].kernel_name), blocks, range(start, stop)
                )
                start = stop


def _kinds_of(blocks: BlockColumns) -> tuple[Ints, Ints]:
    """Which blocks have one dataflow and one range of columns: a number for each block, and the first of each."""
    same = [blocks.dataflow, blocks.start, blocks.stop]
    if all((column == column[0]).all() for column in same):
        return np.zeros(len(blocks), dtype=np.int64), np.zeros(1, dtype=np.int64)
    _, first, kind = np.unique(np.stack(same), axis=1, return_index=True, return_inverse=True)
    by_place = np.argsort(first, kind="stable")
    return np.argsort(by_place)[kind.reshape(-1)], first[by_place]


def _check_supported(
    table: TableSpec, sharding: ParameterSharding, kernel: ComputeKernel, request: KernelRequest
) -> None:
    answer = kernel.refusal_of_ids(sharding.layout.row_map) or kernel.supports(request)
    if answer is not True:
        raise UnsupportedError(
            f"the plan gives table {table.describe()} ({sharding.sharding_type}) the kernel "
            f"{sharding.compute_kernel!r}, which cannot serve it on {request.device}: {answer}. "
            f"Name another in constraints[{table.name!r}].compute_kernels, or plan on this machine."
        )
