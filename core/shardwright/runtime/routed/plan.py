"""The routing plan, made when a module is sharded: the slots of all ranks as arrays, and the local kernel groups.

A slot is one feature looked up in one block on one rank. A piece is the range of an output's columns that slots bring.

Legend: W ranks, S slots of all ranks, G kernel groups of all ranks, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import frozen

from shardwright.contracts.codec import Codec
from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.demands import demands_on, disobeyed
from shardwright.contracts.lookup import BlockSpec
from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.blocks import BlockColumns
from shardwright.planning.layouts.layout import Dataflow
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.step.collection import Collection
from shardwright.runtime.step.kernel_groups import Bucketing, GroupKind, KernelGroup, kernel_of, rows_of_parts
from shardwright.runtime.step.segments import order_of


@frozen
class Reading:
    """A feature and the row map that parts its ids; ``None`` if they are not parted."""

    feature: int
    row_map: RowMap | None


@frozen(eq=False)
class Pieces:
    """The pieces of outputs that slots bring, as arrays.

    Args:
        output: index of the output, ``[P]``.
        start: first column of the piece in the output, ``[P]``.
        stop: column after its last, ``[P]``.
        gradient_start: first column whose gradient the piece's slots get, ``[P]``.
        gradient_stop: column after the last whose gradient they get, ``[P]``.
        reading: index of the reading that its ids come from, ``[P]``.
        group: index of its kernel group's kind, ``[P]``.
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
        first: first slot of each rank, and the number of all slots, ``[W + 1]``.
        part: row part that each slot reads, ``[S]``.
        piece: index of the piece that each slot brings, ``[S]``.
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
        """Number of slots of each rank: ``[W]``."""
        return np.diff(self.first)

    def chosen(self, is_chosen: Any) -> SlotColumns:
        """Select some of the slots by a mask ``[S]``."""
        if is_chosen.all():
            return self
        before = np.concatenate([[0], np.cumsum(is_chosen)])
        return SlotColumns(before[self.first], self.part[is_chosen], self.piece[is_chosen])


@frozen(eq=False)
class RoutingPlan:
    """The routes of all ids of some tables of a collection, and of their results.

    Args:
        collection: collection of all tables.
        rank: this rank.
        readings: features and their row maps.
        pieces: pieces of outputs that slots bring.
        slots: slots of all ranks.
        kinds: kinds of the kernel groups of all ranks, ``G``, in the order of their slots on each rank.
        groups: kernel groups of this rank.
    """

    collection: Collection
    rank: int
    readings: tuple[Reading, ...]
    pieces: Pieces
    slots: SlotColumns
    kinds: tuple[GroupKind, ...]
    groups: tuple[KernelGroup, ...]

    @property
    def bucketing_of_piece(self) -> Ints:
        """Bucketing of each piece's slots: ``[P]``."""
        return np.array([kind.bucketing for kind in self.kinds], dtype=np.int64)[self.pieces.group]


PathOf: TypeAlias = Callable[[ParameterSharding, Dataflow], tuple[Hashable, bool]]
"""Gives the return path key of a table's blocks of one dataflow, and true if the path leaves out bags without ids."""

Codecs: TypeAlias = tuple[Codec | None, Codec | None]
"""Codec of a table's results, and codec of its gradients; ``None`` where values travel as they are."""

NO_CODECS: Codecs = (None, None)


def plan_routing(
    collection: Collection,
    members: Sequence[int],
    shardings: Mapping[str, ParameterSharding],
    *,
    rank: int,
    world_size: int,
    device_type: str,
    path_of: PathOf,
    codecs: Mapping[int, Codecs] = MappingProxyType({}),
) -> RoutingPlan:
    """Lay out the routing of some tables of a collection.

    Args:
        collection: collection of all tables.
        members: indices of the tables that are routed.
        shardings: each table's part of the plan, by table name.
        rank: this rank.
        world_size: the number of ranks.
        device_type: type of the device that holds the blocks.
        path_of: gives the return paths of the tables. Only tables of one path share a kernel group.
        codecs: codecs of the tables by index; none by default.

    Raises:
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """
    builder = _Builder(collection, rank=rank, device_type=device_type, path_of=path_of, codecs=codecs)
    for index in members:
        builder.add(index, shardings[collection.tables[index].name])
    return builder.plan(world_size)


class _Builder:
    """A builder of a routing plan; tables are added in order."""

    def __init__(
        self,
        collection: Collection,
        *,
        rank: int,
        device_type: str,
        path_of: PathOf,
        codecs: Mapping[int, Codecs],
    ) -> None:
        self._collection, self._rank, self._device_type = collection, rank, device_type
        self._path_of, self._codecs = path_of, codecs
        self._outputs = collection.outputs_by_table
        self._readings: dict[Reading, int] = {}
        self._kinds: dict[GroupKind, int] = {}
        self._pieces: list[tuple[int, ...]] = []
        self._slots: list[tuple[Any, Any, Any]] = []  # ranks, parts and pieces, int32
        self._blocks: list[tuple[int, BlockSpec]] = []  # groups and their blocks on this rank
        self._kernels: dict[str, ComputeKernel] = {}

    def add(self, index: int, sharding: ParameterSharding) -> None:
        """Add the blocks of a table, except blocks without rows, to which no id is ever sent."""
        layout, outputs = sharding.layout, self._outputs[index]
        blocks = layout.columns
        row_map = layout.row_map if layout.maps_rows else None
        readings = [
            self._readings.setdefault(
                Reading(self._collection.outputs[output].feature, row_map), len(self._readings)
            )
            for output in outputs
        ]
        kept = np.flatnonzero(rows_of_parts(layout.row_map)[blocks.part])
        kind_of_block, firsts = _kinds_of(blocks)
        shapes = {}
        for kind in np.unique(kind_of_block[kept]).tolist():
            first = firsts[kind]
            dataflow = blocks.dataflows[blocks.dataflow[first]] or layout.dataflow
            span = int(blocks.start[first]), int(blocks.stop[first])
            shapes[kind] = self._shape(index, sharding, dataflow, span, readings)
        first_pieces = {kind: first for kind, (_, first, _) in shapes.items()}
        self._add_slots(blocks, kept, kind_of_block, first_pieces, len(outputs))
        for place in kept[blocks.rank[kept] == self._rank].tolist():
            request, _, group = shapes[int(kind_of_block[place])]
            table = self._collection.tables[index]
            self._blocks.append((group, BlockSpec(table, layout.blocks[place], request, len(outputs))))

    def _add_slots(
        self,
        blocks: BlockColumns,
        kept: Ints,
        kind_of_block: Ints,
        first_pieces: Mapping[int, int],
        num_outputs: int,
    ) -> None:
        """Add a slot for each block and output, in the order of the blocks."""
        first_piece = np.zeros(max(first_pieces, default=0) + 1, dtype=np.int32)
        first_piece[list(first_pieces)] = list(first_pieces.values())
        # [blocks, outputs]: a block's pieces are numbered from the first piece of its shape.
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
    ) -> tuple[KernelRequest, int, int]:
        """Add a range of columns of a table; return the request to its kernel, its first piece and its group's kind."""
        table = self._collection.tables[index]
        kernel = self._kernel(sharding.compute_kernel)
        request = KernelRequest.of(
            table,
            span[1] - span[0],
            device=self._device_type,
            on_this_machine=True,
            first_column=span[0],
            extras=sharding.layout.extras,
        )
        _check_supported(table, sharding, kernel, request)
        path, leaves_out = self._path_of(sharding, dataflow)
        gradient_span = (0, table.embedding_dim) if kernel.needs_whole_rows(request) else span
        bucketing = Bucketing.CUT if sharding.layout.maps_rows else Bucketing.WHOLE
        if request.is_pooled and leaves_out and bucketing is Bucketing.CUT:
            bucketing = Bucketing.RAGGED
        codecs = self._codecs.get(index, NO_CODECS)
        is_matrix = request.is_pooled and kernel.batch_major and bucketing is not Bucketing.RAGGED
        are_alike = not is_matrix or any(codec is not None and not codec.is_elementwise for codec in codecs)
        widths = (span[1] - span[0], gradient_span[1] - gradient_span[0]) if are_alike else None
        key = (kernel.group_key(request), table.update)  # a group is updated at one time
        kind = GroupKind(bucketing, path, sharding.compute_kernel, key, is_matrix, widths, codecs)
        group = self._kinds.setdefault(kind, len(self._kinds))
        first_piece = len(self._pieces)
        for output, reading in zip(self._outputs[index], readings, strict=True):
            self._pieces.append((output, *span, *gradient_span, reading, group))
        return request, first_piece, group

    def _kernel(self, name: str) -> ComputeKernel:
        if name not in self._kernels:
            self._kernels[name] = kernel_of(name)
        return self._kernels[name]

    def plan(self, world_size: int) -> RoutingPlan:
        """Make the plan of all tables added, with slots in the order in which they are sent."""
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
        """Order of the kinds: by bucketing, then by return path, then as they were added."""
        kinds = list(self._kinds)
        paths = {path: place for place, path in enumerate(dict.fromkeys(kind.path for kind in kinds))}
        return sorted(range(len(kinds)), key=lambda kind: (kinds[kind].bucketing, paths[kinds[kind].path]))

    def _sorted(self, group_of_piece: Ints, world_size: int) -> SlotColumns:
        empty = np.zeros(0, dtype=np.int32)
        ranks, parts, pieces = (
            np.concatenate([empty, *columns]) for columns in zip((empty,) * 3, *self._slots, strict=True)
        )
        num_kinds = max(1, len(self._kinds))
        # By rank, then by kernel group, in one sort key; the sort is stable, so equal slots stay as they were added.
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
    """Number the distinct (dataflow, range of columns) of the blocks, in order of their first block.

    Returns:
        The number of each block, ``[blocks]``, and the first block of each number.
    """
    same = [blocks.dataflow, blocks.start, blocks.stop]
    if all((column == column[0]).all() for column in same):
        return np.zeros(len(blocks), dtype=np.int64), np.zeros(1, dtype=np.int64)
    _, first, kind = np.unique(np.stack(same), axis=1, return_index=True, return_inverse=True)
    by_place = np.argsort(first, kind="stable")  # np.unique numbers by value: number by first place instead
    return np.argsort(by_place)[kind.reshape(-1)], first[by_place]


def _check_supported(
    table: TableSpec, sharding: ParameterSharding, kernel: ComputeKernel, request: KernelRequest
) -> None:
    """Check that a kernel does what is asked of a table.

    Raises:
        UnsupportedError: it does not; about the table, with the name of what was asked.
    """
    demand = disobeyed(kernel, demands_on(table, sharding.layout.row_map))
    refusal = kernel.refusal_of_rows(request)
    answer = refusal or (demand.refusal(table) if demand else kernel.supports(request))
    if answer is not True:
        raise UnsupportedError(
            f"the plan gives table {table.describe()} ({sharding.sharding_type}) the kernel "
            f"{sharding.compute_kernel!r}, which cannot serve it on {request.device}: {answer}. "
            f"Name another in constraints[{table.name!r}].compute_kernels, or plan on this machine.",
            subject=table.path,
            asked=demand.name if demand and not refusal else "compute_kernel",
        )
