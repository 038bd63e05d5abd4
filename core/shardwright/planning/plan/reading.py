"""Reading a plan document: everything is checked, and tables that are cut alike are read once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanError, ShardwrightError
from shardwright.planning.documents import PLAN
from shardwright.planning.layouts.layout import (
    Block,
    BlockRun,
    ColumnRange,
    Dataflow,
    Exchange,
    Layout,
    PlacedBlocks,
    from_data,
    to_data,
)
from shardwright.planning.layouts.row_maps import ROW_MAPS, RowMap, RowsRange
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.document import FORMAT, VERSION
from shardwright.planning.plan.inputs import InputTables
from shardwright.planning.plan.rows import row_parts
from shardwright.planning.plan.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    device_of_shards,
)
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost
    from shardwright.host.registry import Registry


def read_plan(
    text: str, plugin_host: PluginHost
) -> tuple[dict[str, EmbeddingModuleShardingPlan], Mapping[str, Any]]:
    """The plan in a document: module path -> the plan of its tables; and the document.

    Args:
        text: text of the document.
        plugin_host: source of the sharding types and kernels that the document names.

    Raises:
        PlanError: the document is malformed, names what is not known, or its shards do not cover each row and
            column exactly once; the text says where.
    """
    document = PLAN.parse(text)
    if isinstance(document, dict):
        _check_format(document)
    PLAN.check(document)
    InputTables.of(document)  # refuses inputs that no planner wrote, before anything asks for them
    reader = _Reader(_ranks_of(document), plugin_host)
    plan = {
        path: EmbeddingModuleShardingPlan(
            (name, reader.table(path, name, entry)) for name, entry in tables.items()
        )
        for path, tables in document["modules"].items()
    }
    return plan, document


def _check_format(document: Mapping[str, Any]) -> None:
    """Check what a document says it is, so that a document of another kind is not told that it is a bad plan."""
    if document.get("format") != FORMAT:
        raise PlanError(
            f'a plan document has "format": "{FORMAT}", this one has {document.get("format")!r:.60}'
        )
    if document.get("version") != VERSION:
        raise PlanError(
            f"the plan document has version {document.get('version')!r:.60}; version {VERSION} can be read"
        )


def _ranks_of(document: Mapping[str, Any]) -> Topology:
    try:
        return Topology.from_data(document["topology"])
    except ShardwrightError as error:
        raise PlanError(f"topology: {error}") from error


def _cut_text(entry: Mapping[str, Any]) -> str:
    """All that an entry says of its table but ranks: equal only for equal JSON data."""
    if _has_runs(entry["shards"]):
        return json.dumps(entry)
    shards = [{key: value for key, value in shard.items() if key != "rank"} for shard in entry["shards"]]
    return json.dumps([{**entry, "shards": None}, shards])


def _has_runs(shards: Sequence[Mapping[str, Any]]) -> bool:
    """True if an entry stands for shards of several ranks."""
    return any("ranks" in shard for shard in shards)


class _Reader:
    """Reads the tables of a document, whose form is known to be right, for one topology."""

    def __init__(self, topology: Topology, plugin_host: PluginHost) -> None:
        self._types: Registry[ShardingType] = plugin_host.sharding_types
        self._kernels = plugin_host.compute_kernels
        self._topology = topology
        self._world_size = topology.world_size
        self._device = device_of_shards(topology)
        self._cuts: dict[str, ParameterSharding] = {}

    def table(self, path: str, name: str, entry: Mapping[str, Any]) -> ParameterSharding:
        where = f"module {path!r}, table {name!r}"
        try:
            cut = _cut_text(entry)
            made = self._known(cut, entry)
            if made is None:
                made = self._cuts[cut] = self._new(path, name, entry, where)
        except PlanError:
            raise
        except ShardwrightError as error:
            raise PlanError(f"{where}: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            # Row maps, dataflows and sharding types are code of plugins: whatever it does with what stands here.
            raise PlanError(
                f"{where}: its sharding type {entry['sharding_type']!r} cannot be read with these values "
                f"({type(error).__name__}: {error})"
            ) from error
        return made

    def _new(self, path: str, name: str, entry: Mapping[str, Any], where: str) -> ParameterSharding:
        kind = self._types.entry(entry["sharding_type"])
        kernel = self._kernels.entry(entry["compute_kernel"]).name
        layout = self._layout(kind.item, entry, where)
        codecs = QCommsConfig(**entry["qcomms_config"]).resolved() if "qcomms_config" in entry else None
        table = TableSpec(name, layout.row_map.num_rows, int(entry["embedding_dim"]), module=path)
        layout.check(table, world_size=self._world_size)
        local = self._topology.local_world_size
        return ParameterSharding(kind.name, kernel, layout, self._device, codecs, local)

    def _known(self, cut: str, entry: Mapping[str, Any]) -> ParameterSharding | None:
        """Copy the sharding of a table that is cut as one before, with ranks that need no check but their range."""
        known = self._cuts.get(cut)
        if known is None or _has_runs(entry["shards"]):
            return known
        ranks = tuple(shard.get("rank") for shard in entry["shards"])
        if not all(type(rank) is int and rank < self._world_size for rank in ranks):
            return None
        layout = known.layout
        if any(dataflow.is_replicated for dataflow in layout.dataflows) and ranks != tuple(layout.ranks):
            return None  # every rank must have one copy
        blocks = layout.blocks.blocks if isinstance(layout.blocks, PlacedBlocks) else layout.blocks
        return attrs.evolve(known, layout=attrs.evolve(layout, blocks=PlacedBlocks(blocks, ranks)))

    def _layout(
        self, kind: type[ShardingType] | ShardingType, entry: Mapping[str, Any], where: str
    ) -> Layout:
        num_rows, dim, shards = int(entry["num_embeddings"]), int(entry["embedding_dim"]), entry["shards"]
        places = [f"{where}, shard {index}" for index in range(len(shards))]
        dataflow = _dataflow(entry, kind) or Exchange()
        own = [_dataflow(shard, kind) for shard in shards]
        given: RowMap | None = RowsRange(num_rows) if dataflow.is_replicated else None
        if "row_map" in entry:
            given = from_data(entry["row_map"], _maps_of(kind))
        read = self._runs if _has_runs(shards) else self._blocks
        return Layout(
            read(shards, given, own, (num_rows, dim), places),
            dataflow=dataflow,
            variant=entry.get("variant", ""),
            extras=entry.get("extras", {}),
        )

    def _blocks(
        self,
        shards: Sequence[Mapping[str, Any]],
        given: RowMap | None,
        own: Sequence[Dataflow | None],
        shape: tuple[int, int],
        places: Sequence[str],
    ) -> Sequence[Block | BlockRun]:
        """A block for each shard, which each have an entry."""
        num_rows, dim = shape
        ranks = [self._rank(shard, place) for shard, place in zip(shards, places, strict=True)]
        columns = [_columns(shard, dim, place) for shard, place in zip(shards, places, strict=True)]
        rows = [_rows(shard, num_rows, place) for shard, place in zip(shards, places, strict=True)]
        parts = row_parts(given, rows, columns, num_rows, places)
        return [
            Block(part, span, rank=rank, dataflow=dataflow)
            for part, span, rank, dataflow in zip(parts, columns, ranks, own, strict=True)
        ]

    def _runs(
        self,
        shards: Sequence[Mapping[str, Any]],
        given: RowMap | None,
        own: Sequence[Dataflow | None],
        shape: tuple[int, int],
        places: Sequence[str],
    ) -> Sequence[Block | BlockRun]:
        """A run of blocks for each entry, of which some stand for shards of several ranks."""
        if given is None:
            raise PlanError(
                f"{places[0].rpartition(', ')[0]}: shards of several ranks need the table's row_map"
            )
        runs = []
        for shard, dataflow, place in zip(shards, own, places, strict=True):
            first, last = self._span(shard, place)
            count = last - first + 1
            part, is_copied = _parts(shard, given, count, shape[0], place)
            columns = _columns(shard, shape[1], place)
            runs.append(
                BlockRun(given, columns, count, part, is_copied=is_copied, rank=first, dataflow=dataflow)
            )
        return runs

    def _span(self, shard: Mapping[str, Any], place: str) -> tuple[int, int]:
        """The first and the last rank of an entry."""
        if "ranks" not in shard:
            rank = self._rank(shard, place)
            return rank, rank
        first, last = map(int, shard["ranks"])
        if not first <= last < self._world_size:
            raise PlanError(
                f"{place}: ranks {first} to {last} are not among the {self._world_size} ranks of the topology"
            )
        return first, last

    def _rank(self, shard: Mapping[str, Any], place: str) -> int:
        if "rank" not in shard:
            raise PlanError(f"{place}: 'rank' is missing (or 'ranks', of shards on neighbouring ranks)")
        rank = int(shard["rank"])  # 1.0 is an integer in JSON schemas
        if rank >= self._world_size:
            raise PlanError(
                f"{place}: rank {rank!r} is not one of the {self._world_size} ranks of the topology"
            )
        return rank


def _maps_of(kind: type[ShardingType] | ShardingType) -> list[type[RowMap]]:
    """The row maps that a document may name: the type's, and core's that have other names."""
    own = {row_map.name for row_map in kind.row_maps}
    return [*kind.row_maps, *(row_map for row_map in ROW_MAPS if row_map.name not in own)]


def _dataflow(entry: Mapping[str, Any], kind: type[ShardingType] | ShardingType) -> Dataflow | None:
    """The dataflow that a table or a shard names, of those that the sharding type has."""
    return from_data(entry["dataflow"], kind.dataflows) if "dataflow" in entry else None


def _rows(shard: Mapping[str, Any], num_rows: int, place: str) -> tuple[int, int] | int:
    rows = shard["rows"]
    if isinstance(rows, dict):
        if "part" not in rows:
            raise PlanError(
                f'{place}: rows must be [start, stop] or {{"part": i, "num_rows": n}}, got {rows!r}'
            )
        return int(rows["part"])
    start, stop = map(int, rows)
    if not start <= stop <= num_rows:
        raise PlanError(f"{place}: rows [{start}, {stop}) are not within the table's {num_rows} rows")
    return start, stop


def _parts(
    shard: Mapping[str, Any], given: RowMap, count: int, num_rows: int, place: str
) -> tuple[int, bool]:
    """The row part of an entry's first shard, and whether all of its shards have that."""
    rows = shard["rows"]
    if not isinstance(rows, dict) or "parts" not in rows:
        found = _rows(shard, num_rows, place)
        fitting = (
            [found] if isinstance(found, int) else [part.index for part in given if part.bounds == found]
        )
        if not fitting or fitting[0] >= given.num_parts:
            raise PlanError(f"{place}: the row_map {to_data(given)} has no part {found}")
        return fitting[0], count > 1
    first, last = map(int, rows["parts"])
    if last - first + 1 != count or not first <= last < given.num_parts:
        raise PlanError(
            f"{place}: parts {first} to {last} of the {given.num_parts} of the row_map are to be {count}, one for each "
            "of its ranks"
        )
    return first, False


def _columns(shard: Mapping[str, Any], dim: int, place: str) -> ColumnRange:
    start, stop = map(int, shard["columns"])
    if not start < stop <= dim:
        raise PlanError(
            f"{place}: columns [{start}, {stop}) are empty or not within the table's {dim} columns"
        )
    return ColumnRange(start, stop)
