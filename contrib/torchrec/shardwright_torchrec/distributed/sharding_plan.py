"""Plans by hand: a sharding for each table, `table_wise(rank=0)`, `row_wise()`, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.distributed.comm import get_local_size
from shardwright_torchrec.parallel.kernel_names import NamedSharding, torchrec_name
from shardwright_torchrec.parallel.sharders import (
    REPLICATED,
    get_default_sharders,
    kernels_with_gradients,
)
from shardwright_torchrec.plans import layout_of_columns, layout_of_rows
from shardwright_torchrec.written import WrittenSharding

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_module_to_default_sharders",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "row_wise",
    "sharder_of",
    "table_row_wise",
    "table_wise",
]

_LayoutOf = Callable[[sw.TableSpec, sw.Topology], sw.Layout]
ParameterShardingGenerator = Callable[[sw.TableSpec, sw.Topology, sw.ModuleSharder], sw.ParameterSharding]
"""Makes a table's part of a plan: `(table, topology, sharder) -> ParameterSharding`."""


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """The whole table on a rank."""
    return _sharded(
        "table_wise",
        _offered("table_wise", lambda layout: [rank] * len(layout.blocks)),
        compute_kernel,
        device and [device],
        first_index=rank,
    )


def row_wise(
    sizes_placement: tuple[list[int], str | list[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
) -> ParameterShardingGenerator:
    """The rows cut over all ranks, into equal parts or those of given sizes.

    Args:
        sizes_placement: rows of each part, on rank 0, 1, ..., and the type of device of all or of each. Rows beyond the
            table's are left out.
        compute_kernel: name of the compute kernel; the planner's by default.
        num_buckets: must be `None`.

    Raises:
        UnsupportedError: parts of whole buckets are asked for.
        InvalidInputError: not every part has a device.
    """
    if num_buckets is not None:
        raise sw.UnsupportedError(
            "row_wise(num_buckets=...) is not supported: rows are cut anywhere, not between buckets of them"
        )
    if sizes_placement is None:
        return _sharded("row_wise", _offered("row_wise", _own_ranks), compute_kernel)
    sizes, placed = sizes_placement
    devices = [placed] * len(sizes) if isinstance(placed, str) else list(placed)
    if len(devices) != len(sizes) or not sizes or min(sizes) < 0:
        raise sw.InvalidInputError(
            f"row_wise(sizes_placement=...): {list(sizes)} rows on {devices}: each part has a size and a device"
        )
    return _sharded("row_wise", _rows_of(sizes), compute_kernel, devices)


def _rows_of(sizes: Sequence[int]) -> _LayoutOf:
    """Layouts of runs of so many rows, on rank 0, 1, ..."""

    def layout_of(table: sw.TableSpec, topology: sw.Topology) -> sw.Layout:
        if sum(sizes) < table.num_embeddings:
            raise sw.PlanError(
                f"row_wise(sizes_placement=...): table {table.describe()} has {table.num_embeddings} rows, and the "
                f"parts {list(sizes)} have room for {sum(sizes)}"
            )
        return layout_of_rows(table, sizes, range(len(sizes)))

    return layout_of


def column_wise(
    ranks: list[int] | None = None,
    size_per_rank: list[int] | None = None,
    compute_kernel: str | None = None,
    device_types: list[str] | None = None,
) -> ParameterShardingGenerator:
    """The columns cut into parts, equal ones on the ranks given or of sizes for rank 0, 1, ...

    Raises:
        InvalidInputError: not exactly one of ranks and sizes is given.
    """
    if (ranks is None) == (size_per_rank is None):
        raise sw.InvalidInputError("column_wise() takes one of ranks=[...] and size_per_rank=[...]")
    cut = _equal_columns(ranks) if size_per_rank is None else _columns_of(size_per_rank)
    return _sharded("column_wise", cut, compute_kernel, device_types)


def _equal_columns(ranks: Sequence[int] | None) -> _LayoutOf:
    """Layouts of equal blocks of columns on ranks."""
    own = list(ranks or ())
    offered = _offered("column_wise", lambda layout: own, num_blocks=len(own))

    def layout_of(table: sw.TableSpec, topology: sw.Topology) -> sw.Layout:
        if table.embedding_dim % max(len(own), 1):
            raise sw.PlanError(
                f"column_wise(ranks={own}) of table {table.describe()}: column dim of {table.embedding_dim} cannot be "
                f"evenly divided across {own}; column_wise(size_per_rank=[...]) cuts it into parts of any sizes"
            )
        return offered(table, topology)

    return layout_of


def _columns_of(widths: Sequence[int]) -> _LayoutOf:
    """Layouts of blocks of so many columns, on rank 0, 1, ..."""

    def layout_of(table: sw.TableSpec, topology: sw.Topology) -> sw.Layout:
        if sum(widths) != table.embedding_dim or min(widths) < 1 or len(widths) > topology.world_size:
            raise sw.PlanError(
                f"column_wise(size_per_rank={list(widths)}): table {table.describe()} has {table.embedding_dim} "
                f"columns, and there are {topology.world_size} ranks"
            )
        return layout_of_columns(table, widths, range(len(widths)))

    return layout_of


def data_parallel() -> ParameterShardingGenerator:
    """A copy on each rank."""
    return _sharded(REPLICATED, _offered(REPLICATED, _own_ranks))


def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """The rows cut over the ranks of a host."""
    return _sharded(
        "table_row_wise", _offered("table_row_wise", lambda layout: _ranks_of_hosts(layout, [host_index]))
    )


def grid_shard(host_indexes: list[int]) -> ParameterShardingGenerator:
    """The columns cut over hosts, the rows over the ranks of each."""
    return _sharded(
        "grid_shard",
        _offered(
            "grid_shard", lambda layout: _ranks_of_hosts(layout, host_indexes), num_hosts=len(host_indexes)
        ),
    )


def _own_ranks(layout: sw.Layout) -> list[int]:
    return [number if block.rank is None else block.rank for number, block in enumerate(layout.blocks)]


def _ranks_of_hosts(layout: sw.Layout, hosts: Sequence[int]) -> list[int]:
    """Ranks of the blocks of each group of a host, in their order."""
    groups: dict[Any, list[int]] = {}
    for number, block in enumerate(layout.blocks):
        groups.setdefault(block.host_group, []).append(number)
    ranks = [0] * len(layout.blocks)
    for index, members in zip(hosts, groups.values(), strict=True):
        for place, number in enumerate(members):
            ranks[number] = index * len(members) + place
    return ranks


def _offered(
    kind: str,
    place: Callable[[sw.Layout], list[int]],
    *,
    num_blocks: int | None = None,
    num_hosts: int | None = None,
) -> _LayoutOf:
    """Layouts that a sharding type offers, of so many blocks or groups of a host, each block on a rank."""

    def layout_of(table: sw.TableSpec, topology: sw.Topology) -> sw.Layout:
        layout = _layout(kind, table, topology, num_blocks, num_hosts)
        return layout.placed(place(layout))

    return layout_of


def _sharded(
    kind: str,
    layout_of: _LayoutOf,
    kernel: str | None = None,
    devices: Sequence[str] | None = None,
    first_index: int = 0,
) -> ParameterShardingGenerator:
    """A generator of layouts. Shards on another type of device than the ranks' are written as TorchRec has them.

    Args:
        kind: name of the sharding type.
        layout_of: layout of a table.
        kernel: name of the compute kernel; the planner's by default.
        devices: type of device of each shard.
        first_index: number of the first shard's device that is no CPU.
    """

    def generate(
        table: sw.TableSpec, topology: sw.Topology, sharder: sw.ModuleSharder
    ) -> sw.ParameterSharding:
        layout = layout_of(table, topology)
        name = kernel or _kernel(kind, table, topology, sharder)
        own = host().compute_kernels.canonical(name)
        if set(devices or ()) - {topology.compute_device}:
            return _written(kind, own if kernel else torchrec_name(own), layout, devices or (), first_index)
        if max(layout.ranks) >= topology.world_size:
            raise sw.PlanError(
                f"{kind} of table {table.describe()} has a shard on rank {max(layout.ranks)}; there are "
                f"{topology.world_size} ranks"
            )
        sharding = sw.ParameterSharding(
            kind, own, layout, topology.compute_device, local_world_size=topology.local_world_size
        )
        return sharding if kernel else NamedSharding.of(sharding)

    return generate


def _written(
    kind: str, kernel: str, layout: sw.Layout, devices: Sequence[str], first_index: int
) -> WrittenSharding:
    """The sharding whose shards are on types of devices, counted as TorchRec does: those of CPUs are rank 0's."""
    if len(devices) != len(layout.blocks):
        raise sw.InvalidInputError(
            f"{len(devices)} types of devices for {len(layout.blocks)} shards of {kind}"
        )
    plain = sw.ParameterSharding(kind, kernel, layout).sharding_spec
    assert plain is not None  # no copies
    shards, index = [], first_index
    for number, (shard, device) in enumerate(zip(plain.shards, devices, strict=True)):
        rank = number if kind == "row_wise" else index
        place = f"rank:{rank}/{device}:{index}" if device != "cpu" else "rank:0/cpu"
        shards.append(sw.ShardMetadata(shard.shard_offsets, shard.shard_sizes, place))
        index += device != "cpu"
    return WrittenSharding(kind, kernel, [rank or 0 for rank in layout.ranks], shards)


def _layout(
    kind: str, table: sw.TableSpec, topology: sw.Topology, num_blocks: int | None, num_hosts: int | None
) -> sw.Layout:
    parts = num_blocks or num_hosts
    narrow = sw.ParameterConstraints(
        sharding_types=[kind], min_partition=table.embedding_dim // parts if parts else None
    )
    offered = list(host().sharding_types.create(kind).layouts(table, topology, narrow))
    for layout in offered:
        groups = {block.host_group for block in layout.blocks}
        if num_blocks in (None, len(layout.blocks)) and num_hosts in (None, len(groups)):
            return layout
    raise sw.PlanError(
        f"{kind} of table {table.describe()} on {topology.world_size} ranks, {topology.local_world_size} a host: "
        f"there is no layout of {num_blocks or num_hosts or 'any'} parts; there are those of "
        f"{sorted({len(layout.blocks) for layout in offered})} blocks"
    )


def _kernel(kind: str, table: sw.TableSpec, topology: sw.Topology, sharder: sw.ModuleSharder) -> str:
    """The kernel that a planner takes for a table of that type alone.

    One that shows gradients where nobody gave an optimizer: the script's own updates the table then.
    """
    is_left = table.optimizer is not None and table.optimizer.is_assumed
    own = kernels_with_gradients() if is_left else None
    constraints = {table.name: sw.ParameterConstraints(sharding_types=[kind], compute_kernels=own)}
    planner = sw.EmbeddingShardingPlanner(topology, constraints=constraints, storage_reservation=0.0)
    allowed = sharder.allowed(table, topology.compute_device)
    if allowed is not None and (kernels := dict(allowed).get(kind)):
        return kernels[0]
    return planner.plan_tables([table]).plan[table.module][table.name].compute_kernel


def get_sharding_constructor_from_type(sharding_type: Any) -> Callable[..., ParameterShardingGenerator]:
    """The function of this module for a sharding type."""
    name = str(getattr(sharding_type, "value", sharding_type))
    found: Mapping[str, Callable[..., ParameterShardingGenerator]] = {
        "column_wise": column_wise,
        "grid_shard": grid_shard,
        "row_wise": row_wise,
        "table_row_wise": table_row_wise,
        "table_wise": table_wise,
        REPLICATED: data_parallel,
    }
    if name not in found:
        raise sw.UnknownNameError(
            f"no function for sharding type {name!r}. Known: {', '.join(sorted(found))}."
        )
    return found[name]


def get_module_to_default_sharders() -> dict[type[nn.Module], sw.ModuleSharder]:
    """Class of a collection -> its sharder."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def sharder_of(module: nn.Module, sharder: sw.ModuleSharder | None) -> sw.ModuleSharder:
    """The sharder that was given, or TorchRec's for the collection.

    Raises:
        UnsupportedError: there is none for it.
    """
    if sharder is not None:
        return sharder
    found = get_module_to_default_sharders()
    for kind in type(module).__mro__:
        if kind in found:
            return found[kind]
    raise sw.UnsupportedError(f"no sharder for {type(module).__name__}: give one")


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: sw.ModuleSharder | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """One sharding for all tables of a collection."""
    tables = sharder_of(module, sharder).tables(module)
    return {table.name: parameter_sharding_generator for table in tables}


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: sw.ModuleSharder | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> sw.EmbeddingModuleShardingPlan:
    """The plan of a collection by hand.

    Args:
        module: the collection.
        per_param_sharding: table -> its sharding, `{"user": table_wise(rank=0)}`.
        sharder: the collection's sharder; TorchRec's by default.
        local_size: ranks of a host; by the launcher's environment by default.
        world_size: number of ranks; the process group's by default.
        device_type: type of the devices; `"cuda"` where there is one by default.

    Raises:
        PlanError: a table has no such layout, or is left out.
    """
    import torch

    sharder = sharder_of(module, sharder)
    world_size = dist.get_world_size() if world_size is None else world_size
    topology = sw.Topology(
        world_size,
        device_type or ("cuda" if torch.cuda.is_available() else "cpu"),
        local_world_size=get_local_size(world_size) if local_size is None else local_size,
    )
    tables = {table.name: table for table in sharder.tables(module)}
    if set(tables) != set(per_param_sharding):
        differ = sorted(set(tables) ^ set(per_param_sharding))
        raise sw.PlanError(f"the tables are {sorted(tables)}; these are in one of the two alone: {differ}")
    return sw.EmbeddingModuleShardingPlan(
        {name: per_param_sharding[name](table, topology, sharder) for name, table in tables.items()}
    )


def calculate_shard_sizes_and_offsets(
    tensor: Any,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes and offsets, rows and columns, of the shards of a table.

    Args:
        tensor: weights of the table ``[R, D]``; they may be on `meta`.
        world_size: number of ranks.
        local_world_size: ranks of a host.
        sharding_type: name of the sharding type.
        col_wise_shard_dim: columns of a shard, for types that cut them; the table's own by default.
        device_memory_sizes: must be `None`.
        num_buckets: must be `None`.

    Raises:
        UnsupportedError: shards of unequal devices or of buckets are asked for.
        PlanError: the type cannot cut the table so.
    """
    if device_memory_sizes is not None or num_buckets is not None:
        raise sw.UnsupportedError(
            "device_memory_sizes and num_buckets: rows are cut into equal parts, one a rank"
        )
    rows, columns = tensor.shape
    if sharding_type == REPLICATED:
        return [[rows, columns]] * world_size, [[0, 0]] * world_size
    topology = sw.Topology(world_size, "cpu", local_world_size=local_world_size)
    table = sw.TableSpec(name="table", num_embeddings=rows, embedding_dim=columns, feature_names=["feature"])
    width = min(col_wise_shard_dim or columns, columns)
    narrow = sw.ParameterConstraints(sharding_types=[sharding_type], min_partition=width)
    for layout in host().sharding_types.create(sharding_type).layouts(table, topology, narrow):
        sizes = [[block.num_rows, block.num_columns] for block in layout.blocks]
        if max(own for _, own in sizes) == width:
            return sizes, [_offset(block) for block in layout.blocks]
    raise sw.PlanError(
        f"{sharding_type} does not cut a table of {rows} x {columns} over {world_size} ranks, {local_world_size} a "
        f"host, into shards of {width} columns"
    )


def _offset(block: sw.Block) -> list[int]:
    """First row and column of a block; the table's end for one without rows."""
    return [block.rows.bounds[0] if block.rows.bounds else 0, block.columns.start]
