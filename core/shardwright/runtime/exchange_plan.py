"""What an exchange of pooled results decides when the module is sharded: the same on every rank, from the plan alone.

Legend: a *stream* is the ids of one feature that fall into one row part. A *slot* is one feature looked up in one
block; it reads one stream. A *group* is the slots of the blocks that one kernel looks up together on one rank.
Slots are sent in the order (rank, group, block, feature).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

from attrs import field, frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.errors import PlanError, UnsupportedError
from shardwright.planning.layouts import RowMap
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import PoolingType, TableSpec, embedding_names
from shardwright.plugins import host
from shardwright.runtime.lookup import BlockSpec


@frozen
class Output:
    """One feature of one table in the pooled output: columns ``start <= c < stop``."""

    name: str
    table: int
    feature: int
    start: int
    stop: int


@frozen
class Stream:
    """The ids of ``feature`` in row part ``part``; ``row_map`` is ``None`` where the part is the whole table."""

    feature: int
    row_map: RowMap | None
    part: int


@frozen
class Slot:
    """One feature in one block: the stream it reads and the output columns it adds to or takes gradients of."""

    stream: int
    columns: tuple[int, int]
    gradient_columns: tuple[int, int]

    @property
    def dim(self) -> int:
        """Columns of its result."""
        return self.columns[1] - self.columns[0]

    @property
    def gradient_dim(self) -> int:
        """Columns of the gradient it gets."""
        return self.gradient_columns[1] - self.gradient_columns[0]


@frozen(eq=False)
class Group:
    """The blocks that one kernel looks up together on one rank."""

    kernel_name: str
    kernel: ComputeKernel = field(repr=False)
    blocks: tuple[BlockSpec, ...]
    slots: tuple[Slot, ...]

    @property
    def width(self) -> int:
        """Result elements of one sample."""
        return sum(slot.dim for slot in self.slots)

    @property
    def gradient_width(self) -> int:
        """Gradient elements of one sample."""
        return sum(slot.gradient_dim for slot in self.slots)


@frozen(eq=False)
class ExchangePlan:
    """All of it: features and outputs of the module, streams, and the groups of each rank."""

    tables: tuple[TableSpec, ...]
    features: tuple[str, ...]
    outputs: tuple[Output, ...]
    streams: tuple[Stream, ...]
    groups: tuple[tuple[Group, ...], ...]

    @property
    def width(self) -> int:
        """Columns of the pooled output."""
        return self.outputs[-1].stop if self.outputs else 0

    @property
    def max_groups(self) -> int:
        """The most groups any rank has."""
        return max(len(groups) for groups in self.groups)

    def slots_of(self, rank: int) -> list[Slot]:
        """The slots of ``rank`` in send order."""
        return [slot for group in self.groups[rank] for slot in group.slots]


def plan_exchange(
    tables: Sequence[TableSpec],
    shardings: Mapping[str, ParameterSharding],
    *,
    world_size: int,
    device_type: str,
) -> ExchangePlan:
    """Lay the exchange of ``tables`` out.

    Args:
        tables: pooled tables of one module, in its order.
        shardings: how each is sharded, by name.
        world_size: ``W``.
        device_type: type of the device that holds the blocks.

    Raises:
        PlanError: the plan names a rank that does not exist or does not cover a table.
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """
    features = tuple(dict.fromkeys(name for table in tables for name in table.feature_names))
    outputs = _outputs(tables, features)
    builder = _Builder(tables, features, outputs, device_type)
    for index, table in enumerate(tables):
        builder.add(index, table, shardings[table.name], world_size)
    groups = tuple(builder.groups_of(rank) for rank in range(world_size))
    return ExchangePlan(tuple(tables), features, outputs, tuple(builder.streams), groups)


def _outputs(tables: Sequence[TableSpec], features: Sequence[str]) -> tuple[Output, ...]:
    position = {name: index for index, name in enumerate(features)}
    names = embedding_names({table.name: table.feature_names for table in tables})
    pairs = [
        (names[table.name][i], index, position[feature], table.embedding_dim)
        for index, table in enumerate(tables)
        for i, feature in enumerate(table.feature_names)
    ]
    stops = list(accumulate(dim for *_, dim in pairs))
    return tuple(
        Output(name, table, feature, stop - dim, stop)
        for (name, table, feature, dim), stop in zip(pairs, stops, strict=True)
    )


class _Builder:
    """Gathers streams and the blocks of each rank's groups while tables are added in order."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        outputs: Sequence[Output],
        device_type: str,
    ) -> None:
        self.streams: dict[Stream, int] = {}
        self._features, self._device_type = features, device_type
        self._outputs: dict[int, list[Output]] = {index: [] for index in range(len(tables))}
        for output in outputs:
            self._outputs[output.table].append(output)
        self._members: dict[tuple[int, Hashable], list[tuple[str, ComputeKernel, BlockSpec, list[Slot]]]] = {}

    def add(self, index: int, table: TableSpec, sharding: ParameterSharding, world_size: int) -> None:
        try:
            sharding.layout.check(table, world_size=world_size)
        except ValueError as error:
            raise PlanError(
                f"the plan of table {table.path!r} ({sharding.sharding_type}): {error}"
            ) from error
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
            _check_supported(table, sharding, kernel, request)
            # A single part may still hold the rows in another order.
            whole_table = block.rows.bounds == (0, table.num_embeddings)
            row_map = None if whole_table else block.rows.row_map
            whole = kernel.needs_whole_rows(request)
            slots = [
                Slot(
                    stream=self._stream(Stream(output.feature, row_map, block.rows.index)),
                    columns=(output.start + block.columns.start, output.start + block.columns.stop),
                    gradient_columns=(output.start, output.stop)
                    if whole
                    else (output.start + block.columns.start, output.start + block.columns.stop),
                )
                for output in self._outputs[index]
            ]
            spec = BlockSpec(table, block, request, len(slots), sharding.layout.extras)
            assert block.rank is not None  # the validator of ParameterSharding
            key = (block.rank, (sharding.compute_kernel, kernel.group_key(request)))
            self._members.setdefault(key, []).append((sharding.compute_kernel, kernel, spec, slots))

    def _stream(self, stream: Stream) -> int:
        """The index of ``stream``; all parts of a cut feature stand together, in part order."""
        if stream not in self.streams:
            parts = range(stream.row_map.num_parts) if stream.row_map else [stream.part]
            for part in parts:
                self.streams[Stream(stream.feature, stream.row_map, part)] = len(self.streams)
        return self.streams[stream]

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        return tuple(
            Group(
                kernel_name=members[0][0],
                kernel=members[0][1],
                blocks=tuple(spec for _, _, spec, _ in members),
                slots=tuple(slot for *_, slots in members for slot in slots),
            )
            for (owner, _), members in self._members.items()
            if owner == rank
        )


def kernel_of(name: str) -> ComputeKernel:
    """The registered compute kernel called ``name``, as an object."""
    return host().compute_kernels.create(name)


def _check_supported(
    table: TableSpec, sharding: ParameterSharding, kernel: ComputeKernel, request: KernelRequest
) -> None:
    answer = kernel.supports(request)
    if answer is not True:
        raise UnsupportedError(
            f"the plan gives table {table.describe()} ({sharding.sharding_type}) the kernel "
            f"{sharding.compute_kernel!r}, which cannot serve it on {request.device}: {answer}. "
            f"Name another in constraints[{table.name!r}].compute_kernels, or plan on this machine."
        )


def mean_outputs(plan: ExchangePlan) -> list[Output]:
    """The outputs that are divided by their bag's length."""
    return [output for output in plan.outputs if plan.tables[output.table].pooling is PoolingType.MEAN]
