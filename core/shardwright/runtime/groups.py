"""Kernel groups: the local blocks that one kernel looks up together, and what each of its slots brings.

A *slot* is one feature looked up in one block. Groups follow from the plan alone, so that every rank knows those of
every other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.errors import PlanError, UnsupportedError
from shardwright.planning.layouts import Block
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import TableSpec
from shardwright.plugins import host
from shardwright.runtime.collection import Collection
from shardwright.runtime.lookup import BlockSpec, Lookup

Span = tuple[int, int]


@frozen
class Arrival:
    """A piece of an output that comes home: columns of an output, for all bags or for some of its ids.

    Args:
        output: the output's index.
        columns: ``(start, stop)`` in the output's table.
        stream: whose ids it is for, where results are one per id.
    """

    output: int
    columns: Span
    stream: int = 0

    @property
    def dim(self) -> int:
        """How many columns."""
        return self.columns[1] - self.columns[0]


@frozen
class Slot:
    """One feature in one block: the stream it reads, what it brings, and the columns it takes gradients of."""

    stream: int
    output: int
    columns: Span
    gradient_columns: Span

    @property
    def dim(self) -> int:
        """Columns of its result."""
        return self.columns[1] - self.columns[0]

    @property
    def gradient_dim(self) -> int:
        """Columns of the gradient it gets."""
        return self.gradient_columns[1] - self.gradient_columns[0]

    @cached_property
    def arrival(self) -> Arrival:
        """What it brings."""
        return Arrival(self.output, self.columns, self.stream)

    @cached_property
    def gradient(self) -> Arrival:
        """What it needs of the gradient."""
        return Arrival(self.output, self.gradient_columns, self.stream)


@frozen(eq=False)
class Group:
    """The blocks that one kernel looks up together on one rank.

    ``way`` says how their results travel; groups of one way stand together.
    """

    kernel_name: str
    kernel: ComputeKernel = field(repr=False)
    way: Hashable
    blocks: tuple[BlockSpec, ...]
    slots: tuple[Slot, ...]

    @cached_property
    def batch_major(self) -> bool:
        """Whether a pooled result is ``[B, sum of D]`` for each source, not slot after slot."""
        return self.kernel.batch_major and self.blocks[0].request.is_pooled

    @cached_property
    def dims(self) -> list[int]:
        """Columns of each slot's result."""
        return [slot.dim for slot in self.slots]

    @cached_property
    def gradient_dims(self) -> list[int]:
        """Columns of each slot's gradient."""
        return [slot.gradient_dim for slot in self.slots]

    @cached_property
    def width(self) -> int:
        """Result elements of one sample."""
        return sum(self.dims)

    @cached_property
    def gradient_width(self) -> int:
        """Gradient elements of one sample."""
        return sum(self.gradient_dims)

    def num_elements(self, counts: Sequence[int], *, gradient: bool = False) -> int:
        """Elements of its result (or gradient) for slots of so many bags."""
        dims = self.gradient_dims if gradient else self.dims
        return sum(count * dim for count, dim in zip(counts, dims, strict=True))


@frozen(eq=False)
class _Member:
    """A block with its slots, on its way into a group."""

    rank: int
    key: Hashable
    kernel_name: str
    kernel: ComputeKernel
    way: Hashable
    block: BlockSpec
    slots: list[Slot]


class GroupBuilder:
    """Gathers blocks while tables are added in order.

    Args:
        collection: the module's tables and outputs.
        device_type: type of the device that holds the blocks.
        world_size: how many ranks there are.
    """

    def __init__(self, collection: Collection, *, device_type: str, world_size: int) -> None:
        self._collection, self._device_type, self._world_size = collection, device_type, world_size
        self._members: list[_Member] = []

    def add(
        self, index: int, sharding: ParameterSharding, stream_of: Mapping[tuple[int, int], int], way: Hashable
    ) -> None:
        """Add the blocks of a table.

        Args:
            index: the table's.
            sharding: how it is sharded.
            stream_of: the stream of each (feature, row part).
            way: how its results travel.

        Raises:
            UnsupportedError: the kernel cannot do what the plan asks, with its reason.
        """
        table = self._collection.tables[index]
        kernel = kernel_of(sharding.compute_kernel)
        for block in sharding.layout.blocks:
            if block.num_rows == 0:  # fewer rows than parts: nothing is ever sent there
                continue
            request = KernelRequest.of(
                table,
                block.num_columns,
                device=self._device_type,
                here=True,
                first_column=block.columns.start,
            )
            request = kernel.with_extras(request, sharding.layout.extras)
            _check_supported(table, sharding, kernel, request)
            slots = self._slots(index, block, stream_of, whole=kernel.needs_whole_rows(request))
            assert block.rank is not None  # the validator of ParameterSharding
            self._members.append(
                _Member(
                    rank=block.rank,
                    key=(sharding.compute_kernel, kernel.group_key(request)),
                    kernel_name=sharding.compute_kernel,
                    kernel=kernel,
                    way=way,
                    block=BlockSpec(table, block, request, len(slots), sharding.layout.extras),
                    slots=slots,
                )
            )

    def _slots(
        self, index: int, block: Block, stream_of: Mapping[tuple[int, int], int], *, whole: bool
    ) -> list[Slot]:
        outputs = self._collection.outputs
        own = (block.columns.start, block.columns.stop)
        return [
            Slot(
                stream=stream_of[outputs[output].feature, block.rows.index],
                output=output,
                columns=own,
                gradient_columns=(0, outputs[output].dim) if whole else own,
            )
            for output in self._collection.outputs_of(index)
        ]

    def groups(self) -> list[list[Group]]:
        """The groups of each rank, in one order on all ranks: by first appearance, those of a way together."""
        ways = list(dict.fromkeys(member.way for member in self._members))
        buckets: dict[Hashable, list[list[_Member]]] = {}
        for way in ways:
            for member in self._members:
                if member.way == way:
                    bucket = buckets.setdefault((way, member.key), [[] for _ in range(self._world_size)])
                    bucket[member.rank].append(member)
        return [
            [_group(bucket[rank]) for bucket in buckets.values() if bucket[rank]]
            for rank in range(self._world_size)
        ]


def _group(members: Sequence[_Member]) -> Group:
    first = members[0]
    return Group(
        kernel_name=first.kernel_name,
        kernel=first.kernel,
        way=first.way,
        blocks=tuple(member.block for member in members),
        slots=tuple(slot for member in members for slot in member.slots),
    )


def check_layout(table: TableSpec, sharding: ParameterSharding, world_size: int) -> None:
    """Check that a plan's layout covers the table, on ranks that exist.

    Raises:
        PlanError: naming table and sharding type.
    """
    try:
        sharding.layout.check(table, world_size=world_size)
    except ValueError as error:
        raise PlanError(f"the plan of table {table.path!r} ({sharding.sharding_type}): {error}") from error


def build_lookups(groups: Sequence[Group], device: Any) -> list[Lookup]:
    """What each group's kernel builds on a device.

    Raises:
        UnsupportedError: a kernel built something else.
    """
    lookups: list[Lookup] = []
    for group in groups:
        lookup: object = group.kernel.build(group.blocks, device=device)
        if not isinstance(lookup, Lookup):
            tables = ", ".join(repr(spec.table.name) for spec in group.blocks)
            raise UnsupportedError(
                f"compute kernel {group.kernel.name!r} broke its contract: build() for the tables {tables} returned a "
                f"{type(lookup).__name__}; it must return a shardwright.Lookup"
            )
        lookups.append(lookup)
    return lookups


def kernel_of(name: str) -> ComputeKernel:
    """The registered compute kernel called ``name``, as an object."""
    return host().compute_kernels.create(name)


def is_updated_in_backward(table: TableSpec, sharding: ParameterSharding) -> bool:
    """Whether the kernel of a table runs its optimizer in the backward pass; else its gradients are visible."""
    return table.optimizer is not None and kernel_of(sharding.compute_kernel).fuses_optimizer


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
