"""The sharding of tables: for each its sharding type, kernel and shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from shardwright.arguments import typed
from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.codecs import QCommsConfig, as_qcomms

if TYPE_CHECKING:
    import torch


class ShardPlacement(str):
    """Place of a shard as text, ``"rank:1/cuda:1"``, with the methods of PyTorch's places of shards."""

    __slots__ = ()

    def rank(self) -> int:
        """The rank that holds the shard."""
        return int(self.partition("/")[0].removeprefix("rank:"))

    def device(self) -> torch.device:
        """The device on that rank."""
        import torch

        return torch.device(self.partition("/")[2])


@frozen
class ShardMetadata:
    """One shard: its offsets and sizes in the table ``[rows, columns]``, and its place (``"rank:0/cpu"``).

    For row maps that are no ranges, ``shard_offsets[0]`` is 0 and ``shard_sizes[0]`` counts the part's rows.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        >>> shard = plan.plan[""]["user"].sharding_spec.shards[0]
        >>> shard.shard_offsets
        [0, 0]
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: str = field(converter=ShardPlacement)


@frozen
class EnumerableShardingSpec:
    """The shards of a table, in TorchRec's form."""

    shards: list[ShardMetadata]


@frozen(hash=False, field_transformer=typed)
class ParameterSharding:
    """Sharding of one table.

    Args:
        sharding_type: name of the sharding type.
        compute_kernel: name of the compute kernel.
        layout: its blocks, each on a rank.
        device: type of the device of its shards; of each rank of the topology where these have several types.
        qcomms_config: the codecs that its results and gradients travel by; where it says nothing, those of the
            module's sharder.
        local_world_size: ranks of a host, whose devices are numbered from 0 on in ``sharding_spec``; all by default.

    Example:
        >>> import shardwright as sw
        >>> tables = [sw.TableSpec("user", 1_000_000, 64, ["user"]), sw.TableSpec("shop", 1000, 64, ["shop"])]
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables(tables)
        >>> sharding = plan.plan[""]["user"]
        >>> sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in sharding.sharding_spec.shards)
        64000000
    """

    sharding_type: str
    compute_kernel: str
    layout: Layout = field(repr=False)
    device: str | tuple[str, ...] = field(default="cpu", repr=False)
    qcomms_config: QCommsConfig | None = field(default=None, converter=as_qcomms)
    local_world_size: int | None = field(default=None, eq=False, repr=False)

    @layout.validator
    def _all_placed(self, attribute: Any, value: Layout) -> None:
        if not value.is_placed:
            raise InvalidInputError("each block of a plan's layout needs a rank")

    @property
    def ranks(self) -> list[int]:
        """The rank of each shard."""
        return [rank for rank in self.layout.ranks if rank is not None]

    def device_on(self, rank: int) -> str:
        """Type of the device of a shard on a rank."""
        return self.device if isinstance(self.device, str) else self.device[rank]

    @property
    def sharding_spec(self) -> EnumerableShardingSpec | None:
        """The shards in TorchRec's form; ``None`` where every rank has a copy of the whole table."""
        if self.layout.is_replicated:
            return None
        return EnumerableShardingSpec([_metadata(block, self) for block in self.layout.blocks])

    def described_shards(self) -> Iterator[tuple[list[int], list[int], str]]:
        """Offsets, sizes and placement of each shard, for texts; the copies of a shard are one."""
        for own in self.layout.with_copies():
            shard, ranks = _metadata(own[0], self), [block.rank for block in own if block.rank is not None]
            placement = (
                f"rank:{ranks_text(ranks)}/{' and '.join(dict.fromkeys(map(self.device_on, ranks)))}, a copy on each"
                if len(ranks) > 1
                else shard.placement
            )
            yield shard.shard_offsets, shard.shard_sizes, placement

    def digest(self) -> bytes:
        """A hash of all that it says: equal for equal plans."""
        told = repr((self.sharding_type, self.compute_kernel, self.device, self.qcomms_config))
        return told.encode() + self.layout.digest()

    def __repr__(self) -> str:
        codecs = f", qcomms_config={self.qcomms_config}" if self.qcomms_config else ""
        return (
            f"ParameterSharding(sharding_type={self.sharding_type!r}, "
            f"compute_kernel={self.compute_kernel!r}, ranks={self.ranks}, sharding_spec={self.sharding_spec}{codecs})"
        )


def _metadata(block: Block, sharding: ParameterSharding) -> ShardMetadata:
    assert block.rank is not None  # a plan's blocks have ranks
    bounds, device = block.rows.bounds, sharding.device_on(block.rank)
    index = block.rank % (sharding.local_world_size or block.rank + 1)
    suffix = f":{index}" if device != "cpu" else ""
    return ShardMetadata(
        shard_offsets=[bounds[0] if bounds else 0, block.columns.start],
        shard_sizes=[block.num_rows, block.num_columns],
        placement=f"rank:{block.rank}/{device}{suffix}",
    )


def device_of_shards(topology: Topology) -> str | tuple[str, ...]:
    """Type of the device of shards on a topology's ranks, as :class:`ParameterSharding` has it."""
    return topology.compute_devices if topology.is_mixed else topology.compute_device


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The plan of one module: table name -> :class:`ParameterSharding`."""

    def __str__(self) -> str:
        return module_text(self)


def module_text(plan: Mapping[str, ParameterSharding]) -> str:
    """A module's tables, and the shards of each, as plain text."""
    header: tuple[str, ...] = ("table", "sharding type", "compute kernel", "ranks")
    tables = [
        (name, sharding.sharding_type, sharding.compute_kernel, ranks_text(sharding.ranks))
        for name, sharding in plan.items()
    ]
    if any(sharding.qcomms_config for sharding in plan.values()):
        header = (*header, "codecs of results / gradients")
        codecs = [codecs_text(sharding.qcomms_config) for sharding in plan.values()]
        tables = [(*row, text) for row, text in zip(tables, codecs, strict=True)]  # type: ignore[misc]
    shards = [(name, *row) for name, sharding in plan.items() for row in sharding.described_shards()]
    return "\n".join(
        [
            aligned(header, tables),
            aligned(("table", "shard offsets", "shard sizes", "placement"), shards),
        ]
    )


def codecs_text(config: QCommsConfig | None) -> str:
    """``fp16 / int8``: the codecs of results and of gradients; ``-`` for one that travels as it is."""
    if config is None:
        return "-"
    return f"{config.forward_precision or '-'} / {config.backward_precision or '-'}"


def aligned(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain-text table: columns as wide as they need to be."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  " + "-+-".join("-" * width for width in widths), *lines[1:]])


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in their order, each run of neighbours as one: ``0-3``, ``0,2,2``, ``496-503,8-15``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
