"""TorchRec's sharding plans in and out.

As TorchRec's objects, or as the plain data that its release 1.8 serialises them to, which is JSON:
`{"plan": {module: {table: {"sharding_type", "compute_kernel", "ranks", "shards": [{"shard_offsets", "shard_sizes",
"placement"}]}}}}`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

import shardwright as sw
from shardwright_torchrec.written import WrittenSharding

__all__ = ["read_plan", "to_torchrec", "write_plan"]

_REPLICATED = "data_parallel"
_TYPES = frozenset(
    {
        "column_wise",
        "grid_shard",
        "row_wise",
        "table_column_wise",
        "table_row_wise",
        "table_wise",
        _REPLICATED,
    }
)
_ANY_COLUMNS = frozenset({"column_wise", "table_column_wise"})
"""Sharding types of which a plan may have column blocks of any widths; the planner's are equal."""
_KERNELS = frozenset({"dense", "fused", "fused_uvm", "fused_uvm_caching"})
_CPU_FUSED = "fused"
"""What TorchRec calls every kernel with the optimizer in its backward pass, where it has no name for it."""
_DOCUMENT = sw.DocumentKind("TorchRec plan", error=sw.PlanError)
_PLACEMENT = re.compile(r"rank:(\d+)/(\w+)(:\d+)?")


@attrs.frozen
class _Shard:
    """One shard: its first row and column, its size, its rank and type of device."""

    offsets: tuple[int, int]
    sizes: tuple[int, int]
    rank: int
    device: str

    @property
    def place(self) -> tuple[int, int, int, int]:
        return (*self.offsets, *self.sizes)


def read_plan(plan: Any, tables: Iterable[sw.TableSpec], topology: sw.Topology) -> sw.ShardingPlan:
    """A plan of TorchRec's, as shardwright's.

    Args:
        plan: a `torchrec.distributed.types.ShardingPlan`, its serialised data, or that as JSON.
        tables: the tables of the model, whose sizes a plan does not always tell.
        topology: the ranks that the plan is for.

    Raises:
        PlanError: The plan names a table that is not there, or lacks one; shards do not cover a table, or lie on a rank
            that is not there.
        UnknownNameError: A sharding type or kernel that no plugin offers.
    """
    specs = {(table.module, table.name): table for table in tables}
    try:
        return _read_modules(_modules(plan), specs, topology)
    except sw.ShardwrightError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise sw.PlanError(f"this is no plan of TorchRec's ({type(error).__name__}: {error})") from error


def _read_modules(
    modules: Mapping[str, Mapping[str, Mapping[str, Any]]],
    specs: Mapping[tuple[str, str], sw.TableSpec],
    topology: sw.Topology,
) -> sw.ShardingPlan:
    found = {(module, name): data for module, own in modules.items() for name, data in own.items()}
    for key in sorted(specs.keys() ^ found.keys()):
        where = "is in the plan, and not among the tables" if key in found else "is not in the plan"
        raise sw.PlanError(f"table {key[1]!r} of module {key[0]!r} {where}")
    read: dict[str, sw.EmbeddingModuleShardingPlan] = {}
    for (module, name), data in found.items():
        own = read.setdefault(module, sw.EmbeddingModuleShardingPlan())
        own[name] = _read_table(data, specs[module, name], topology)
    return sw.ShardingPlan(plan=read)


def _modules(plan: Any) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The plain data of a plan, whatever it is."""
    if isinstance(plan, str):
        plan = _DOCUMENT.parse(plan)
    if isinstance(plan, dict):
        return plan.get("plan", plan)
    return {
        module: {name: _plain(sharding) for name, sharding in own.items()}
        for module, own in plan.plan.items()
    }


def _plain(sharding: Any) -> dict[str, Any]:
    """The plain data of a `ParameterSharding`."""
    data = {name: getattr(sharding, name) for name in ("sharding_type", "compute_kernel", "ranks")}
    if (spec := sharding.sharding_spec) is not None:
        data["shards"] = _plain_shards(spec.shards)
    return data


def _plain_shards(shards: Iterable[Any]) -> list[dict[str, Any]]:
    """The plain data of `ShardMetadata`."""
    return [
        {
            "shard_offsets": list(shard.shard_offsets),
            "shard_sizes": list(shard.shard_sizes),
            "placement": str(shard.placement),
        }
        for shard in shards
    ]


def read_sharding(
    sharding_type: str,
    compute_kernel: str,
    ranks: Sequence[int] | None,
    shards: Sequence[Any],
    topology_of: Callable[[int, str], sw.Topology],
) -> sw.ParameterSharding:
    """A table's sharding by its shards alone, which tell its size.

    Args:
        sharding_type: name of the sharding type.
        compute_kernel: name of the compute kernel.
        ranks: the rank of each shard; those of the placements by default.
        shards: `ShardMetadata` objects, at least one.
        topology_of: function of the least number of ranks and the type of their devices.

    Raises:
        PlanError: The type does not cut a table so, or ranks contradict placements.
    """
    data = {"sharding_type": sharding_type, "compute_kernel": compute_kernel, "shards": _plain_shards(shards)}
    unsized = sw.TableSpec("table", 1, 1)
    read = [_read_shard(shard, unsized) for shard in data["shards"]]
    placed = [shard.rank for shard in read]
    if ranks is not None and _are_elsewhere(read, ranks, "cpu"):
        return _written(data, ranks)
    if not read or (ranks is not None and list(ranks) != placed):
        raise sw.PlanError(
            f"ranks={ranks} contradict the placements of the shards, which are on ranks {placed}"
        )
    rows, columns = (max(shard.offsets[side] + shard.sizes[side] for shard in read) for side in (0, 1))
    topology = topology_of(max(placed) + 1, read[0].device)
    return _read_table(data, sw.TableSpec("table", rows, columns), topology)


def _read_table(data: Mapping[str, Any], table: sw.TableSpec, topology: sw.Topology) -> sw.ParameterSharding:
    host = sw.host.host()
    kind = host.sharding_types.canonical(data["sharding_type"])
    kernel = host.compute_kernels.canonical(data["compute_kernel"])
    shards = [_read_shard(shard, table) for shard in data.get("shards") or ()]
    ranks = data.get("ranks")
    if ranks and _are_elsewhere(shards, ranks, topology.compute_device):
        return _written(data, ranks)
    layout = _layout_of(kind, shards, table, topology)
    device = shards[0].device if shards else topology.compute_device
    sharding = sw.ParameterSharding(
        kind, kernel, layout, device=device, local_world_size=topology.local_world_size
    )
    _check(sharding, table, topology)
    return sharding


def _are_elsewhere(shards: Sequence[_Shard], ranks: Sequence[int], device: str) -> bool:
    """True if some shards are on the hosts of ranks with other devices, which TorchRec calls `"rank:0/cpu"`."""
    found = {shard.device for shard in shards}
    is_beside = "cpu" in found and len(found) > 1
    return is_beside or (found == {"cpu"} != {device} and list(ranks) != [shard.rank for shard in shards])


def _written(data: Mapping[str, Any], ranks: Sequence[int]) -> WrittenSharding:
    """A table's sharding to read alone."""
    host = sw.host.host()
    return WrittenSharding(
        host.sharding_types.canonical(data["sharding_type"]),
        host.compute_kernels.canonical(data["compute_kernel"]),
        ranks,
        [sw.ShardMetadata(**shard) for shard in data["shards"]],
    )


def _read_shard(data: Mapping[str, Any], table: sw.TableSpec) -> _Shard:
    found = _PLACEMENT.fullmatch(str(data.get("placement")))
    offsets, sizes = data.get("shard_offsets", ()), data.get("shard_sizes", ())
    if found is None or len(offsets) != 2 or len(sizes) != 2:
        raise sw.PlanError(
            f"table {table.path!r}: a shard has shard_offsets and shard_sizes of two numbers each and a placement like "
            f"'rank:0/cuda:0'; got {dict(data)!r}"
        )
    return _Shard((offsets[0], offsets[1]), (sizes[0], sizes[1]), int(found[1]), found[2])


def _layout_of(kind: str, shards: Sequence[_Shard], table: sw.TableSpec, topology: sw.Topology) -> sw.Layout:
    """The layout of the sharding type that cuts the table as the shards do, with their ranks."""
    narrowest = min((shard.sizes[1] for shard in shards if shard.sizes[1]), default=None)
    rule = sw.ParameterConstraints(sharding_types=[kind], min_partition=narrowest)
    offered = list(sw.host.host().sharding_types.create(kind).layouts(table, topology, rule))
    for layout in offered:
        if layout.is_replicated and not shards:
            return layout.placed(range(topology.world_size))
        ranks = _ranks_of(layout, shards)
        if ranks is not None:
            return layout.placed(ranks)
    own = _columns_of(kind, shards, table, topology) or _rows_of(kind, shards, table)
    if own is not None:
        return own
    told = [
        f"rows {offsets[0]}+{sizes[0]} x columns {offsets[1]}+{sizes[1]}" for offsets, sizes in _cuts(shards)
    ]
    raise sw.PlanError(
        f"table {table.path!r} ({table.num_embeddings} x {table.embedding_dim}): {kind!r} on "
        f"{topology.world_size} ranks, {topology.local_world_size} a host, has no layout with the plan's shards "
        f"({'; '.join(told) or 'none'}). Give the topology and the tables that it was made for, or plan anew."
    )


def _columns_of(
    kind: str, shards: Sequence[_Shard], table: sw.TableSpec, topology: sw.Topology
) -> sw.Layout | None:
    """The layout of shards that are whole columns, of any widths; none for types that do not cut a table so."""
    ordered = sorted(shards, key=lambda shard: shard.offsets[1])
    hosts = {shard.rank // topology.local_world_size for shard in ordered}
    if kind not in _ANY_COLUMNS or (kind == "table_column_wise" and len(hosts) != 1):
        return None
    layout = layout_of_columns(
        table, [shard.sizes[1] for shard in ordered], [shard.rank for shard in ordered]
    )
    is_covered = sum(shard.sizes[1] for shard in ordered) == table.embedding_dim
    cuts = [shard.place for shard in ordered]
    return layout if is_covered and cuts == [_place(block) for block in layout.blocks] else None


def _rows_of(kind: str, shards: Sequence[_Shard], table: sw.TableSpec) -> sw.Layout | None:
    """The layout of shards that are whole rows, runs of any sizes; none for types that do not cut a table so."""
    if kind != "row_wise" or not shards:
        return None
    ordered = sorted(shards, key=lambda shard: (shard.offsets[0], shard.sizes[0]))
    starts = list(itertools.accumulate((shard.sizes[0] for shard in ordered), initial=0))
    if starts[-1] != table.num_embeddings:
        return None
    layout = layout_of_rows(table, [shard.sizes[0] for shard in ordered], [shard.rank for shard in ordered])
    cuts = [shard.place for shard in ordered]
    return layout if cuts == [_place(block) for block in layout.blocks] else None


def layout_of_rows(table: sw.TableSpec, sizes: Sequence[int], ranks: Sequence[int]) -> sw.Layout:
    """The layout that cuts a table into runs of so many rows, each on its rank; those beyond the table are left out."""
    ends = [min(end, table.num_embeddings) for end in itertools.accumulate(sizes)]
    rows = sw.RowsSplit([0, *ends])
    return sw.Layout(
        [sw.Block(sw.RowPart(rows, part), table.all_columns, rank=rank) for part, rank in enumerate(ranks)]
    )


def layout_of_columns(table: sw.TableSpec, widths: Sequence[int], ranks: Sequence[int]) -> sw.Layout:
    """The layout that cuts a table into so many columns from the left, each part on its rank."""
    blocks, start = [], 0
    for width, rank in zip(widths, ranks, strict=True):
        blocks.append(sw.Block(table.all_rows, sw.ColumnRange(start, start + width), rank=rank))
        start += width
    return sw.Layout(blocks)


def _cuts(shards: Iterable[_Shard]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    return ((shard.offsets, shard.sizes) for shard in shards)


def _ranks_of(layout: sw.Layout, shards: Sequence[_Shard]) -> list[int] | None:
    """The rank of the shard that each block is; none if they are not the same cuts."""
    left: dict[tuple[int, int, int, int], list[int]] = {}
    for shard in shards:
        left.setdefault(shard.place, []).append(shard.rank)
    ranks = []
    for block in layout.blocks:
        same = left.get(_place(block)) if block.rows.bounds else None
        if not same:
            return None
        ranks.append(same.pop(0))
    return None if any(left.values()) else ranks


def _place(block: sw.Block) -> tuple[int, int, int, int]:
    assert block.rows.bounds is not None  # the caller looked
    return (block.rows.bounds[0], block.columns.start, block.num_rows, block.num_columns)


def _check(sharding: sw.ParameterSharding, table: sw.TableSpec, topology: sw.Topology) -> None:
    wrong = [rank for rank in sharding.ranks if rank >= topology.world_size]
    if wrong:
        raise sw.PlanError(
            f"table {table.path!r} has a shard on rank {wrong[0]}; there are {topology.world_size} ranks"
        )
    try:
        sharding.layout.check(table, world_size=topology.world_size)
    except sw.InvalidInputError as error:
        raise sw.PlanError(f"table {table.path!r}: {error}") from error


def write_plan(plan: sw.ShardingPlan) -> dict[str, Any]:
    """A plan in the plain data that TorchRec serialises its plans to.

    Kernels with the optimizer in their backward pass that TorchRec has no name for become its `fused`.

    Raises:
        UnsupportedError: A table has a sharding type, or rows dealt out, that TorchRec does not know.
    """
    modules = {
        module: {name: _write_table(name, sharding) for name, sharding in own.items()}
        for module, own in plan.plan.items()
    }
    return {"plan": modules}


def _write_table(name: str, sharding: sw.ParameterSharding) -> dict[str, Any]:
    if not isinstance(sharding, WrittenSharding):
        _check_known(name, sharding)
    data = {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": _kernel_of(sharding.compute_kernel),
        "ranks": list(sharding.ranks),
    }
    if (spec := sharding.sharding_spec) is not None:
        data["shards"] = [attrs.asdict(shard) for shard in spec.shards]
    return data


def _check_known(name: str, sharding: sw.ParameterSharding) -> None:
    if sharding.sharding_type not in _TYPES:
        raise sw.UnsupportedError(
            f"table {name!r} has the sharding type {sharding.sharding_type!r}, which TorchRec does not know. "
            f"It knows {', '.join(sorted(_TYPES))}."
        )
    if any(block.rows.bounds is None for block in sharding.layout.blocks):
        raise sw.UnsupportedError(
            f"table {name!r} has rows that are dealt out; TorchRec's shards are runs of rows"
        )


def _kernel_of(name: str) -> str:
    if name in _KERNELS:
        return name
    kernels = sw.host.host().compute_kernels
    return _CPU_FUSED if kernels[name].fuses_optimizer else "dense"


def to_torchrec(plan: sw.ShardingPlan) -> Any:
    """A plan as TorchRec's objects.

    Raises:
        UnsupportedError: As `write_plan`; or TorchRec is not installed.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    from shardwright_torchrec.installed import torchrec_module

    types = torchrec_module("torchrec.distributed.types")
    modules = {}
    for module, tables in write_plan(plan)["plan"].items():
        own = modules[module] = types.EmbeddingModuleShardingPlan()
        for name, data in tables.items():
            shards = [ShardMetadata(**shard) for shard in data.get("shards", ())]
            spec = EnumerableShardingSpec(shards) if shards else None
            own[name] = types.ParameterSharding(
                data["sharding_type"], data["compute_kernel"], data["ranks"], spec
            )
    return types.ShardingPlan(plan=modules)
