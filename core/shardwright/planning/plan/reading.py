"""Reading a plan document: everything is checked, and tables that are cut alike are read once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import InvalidInputError, PlanError, ShardwrightError
from shardwright.planning.documents import PLAN
from shardwright.planning.layouts.layout import BlockRun, ColumnRange, Dataflow, Exchange, Layout, from_data
from shardwright.planning.layouts.row_maps import ROW_MAPS, RowMap, RowsRange
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.inputs import InputTables
from shardwright.planning.plan.rows import Bounds, derive_row_map, parts_of
from shardwright.planning.plan.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    device_of_shards,
)
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost


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
    PLAN.check(document)
    InputTables.of(document)  # refuses inputs that no planner wrote, before anything asks for them
    reader = _Reader(_ranks_of(document), plugin_host, document.get("plugins", ()))
    plan = {
        path: EmbeddingModuleShardingPlan(
            (name, reader.table(path, name, entry)) for name, entry in tables.items()
        )
        for path, tables in document["modules"].items()
    }
    return plan, document


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


class _Shards(NamedTuple):
    """An entry for a shard, or for shards on neighbouring ranks.

    Args:
        ranks: rank of each.
        rows: bounds of the rows that each has, or the parts of the row map, one for all of them or one each.
        columns: the first column of each, and the one after its last.
        dataflow: the dataflow that is named.
    """

    ranks: range
    rows: Bounds | range
    columns: Bounds
    dataflow: Dataflow | None


class _Reader:
    """Reads the tables of a document, whose form is known to be right, for one topology."""

    def __init__(
        self, topology: Topology, plugin_host: PluginHost, made_with: Sequence[Mapping[str, Any]]
    ) -> None:
        self._plugins, self._topology = plugin_host, topology
        self._cuts: dict[str, ParameterSharding] = {}
        self._origins = {
            (
                own.get("kind"),
                own.get("name"),
            ): f" The plan was made with that of {own['distribution']} {own['version']}."
            for own in made_with
            if own.get("distribution") and "version" in own
        }

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
            brought = self._origins.get((f"{error.subject}s".replace(" ", "_"), str(error.asked)), "")
            raise PlanError(f"{where}: {error}{brought}") from error
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
        kind = self._plugins.sharding_types.entry(entry["sharding_type"])
        kernel = self._plugins.compute_kernels.entry(entry["compute_kernel"]).name
        layout = self._layout(kind.item, entry, where)
        codecs = QCommsConfig(**entry["qcomms_config"]).resolved() if "qcomms_config" in entry else None
        table = TableSpec(name, layout.row_map.num_rows, int(entry["embedding_dim"]), module=path)
        layout.check(table, world_size=self._topology.world_size)
        device, local = device_of_shards(self._topology), self._topology.local_world_size
        return ParameterSharding(kind.name, kernel, layout, device, codecs, local)

    def _known(self, cut: str, entry: Mapping[str, Any]) -> ParameterSharding | None:
        """Copy the sharding of a table that is cut as one before, with ranks that need no check but their range."""
        known = self._cuts.get(cut)
        if known is None or _has_runs(entry["shards"]):
            return known
        ranks = tuple(shard.get("rank") for shard in entry["shards"])
        if not all(type(rank) is int and rank < self._topology.world_size for rank in ranks):
            return None
        layout = known.layout
        if any(dataflow.is_replicated for dataflow in layout.dataflows) and ranks != tuple(layout.ranks):
            return None  # every rank must have one copy
        return attrs.evolve(known, layout=layout.placed(ranks))

    def _layout(
        self, kind: type[ShardingType] | ShardingType, entry: Mapping[str, Any], where: str
    ) -> Layout:
        dataflow = _dataflow(entry, kind) or Exchange()
        shards = []
        for index, shard in enumerate(entry["shards"]):
            try:
                rows, columns = _rows(shard, entry["num_embeddings"]), _columns(shard, entry["embedding_dim"])
                shards.append(_Shards(self._ranks(shard), rows, columns, _dataflow(shard, kind)))
            except InvalidInputError as error:
                raise PlanError(f"{where}, shard {index}: {error}") from error
        row_map = _row_map(entry, kind, dataflow, shards)
        return Layout(
            _runs(row_map, shards),
            dataflow=dataflow,
            variant=entry.get("variant", ""),
            extras=entry.get("extras", {}),
        )

    def _ranks(self, shard: Mapping[str, Any]) -> range:
        """The ranks of an entry, which are neighbours."""
        if "rank" not in shard and "ranks" not in shard:
            raise InvalidInputError("'rank' is missing (or 'ranks', of shards on neighbouring ranks)")
        # 1.0 is an integer in JSON schemas.
        first, last = map(int, shard.get("ranks") or (shard["rank"],) * 2)
        if first <= last < self._topology.world_size:
            return range(first, last + 1)
        if "ranks" not in shard:
            raise InvalidInputError(
                f"rank {first} is not one of the {self._topology.world_size} ranks of the topology"
            )
        raise InvalidInputError(
            f"ranks {first} to {last} are not among the {self._topology.world_size} ranks of the topology"
        )


def _row_map(
    entry: Mapping[str, Any],
    kind: type[ShardingType] | ShardingType,
    dataflow: Dataflow,
    shards: Sequence[_Shards],
) -> RowMap:
    """The row map that an entry has, or that the bounds of its shards tell."""
    num_rows, num_shards = int(entry["num_embeddings"]), sum(len(shard.ranks) for shard in shards)
    if "row_map" in entry:
        row_map = from_data(entry["row_map"], _maps_of(kind))
    elif dataflow.is_replicated:
        row_map = RowsRange(num_rows)
    else:
        bounded = [(shard.rows, shard.columns) for shard in shards if isinstance(shard.rows, tuple)]
        if len(bounded) < len(shards):
            index = [isinstance(shard.rows, range) for shard in shards].index(True)
            raise InvalidInputError(f"shard {index}: rows are given by part, which needs the table's row_map")
        row_map = derive_row_map(bounded, num_rows)
    for index, (ranks, parts, *_) in enumerate(shards):
        if isinstance(parts, range) and (len(parts) not in (1, len(ranks)) or parts.stop > row_map.num_parts):
            raise InvalidInputError(
                f"shard {index}: parts {parts.start} to {parts.stop - 1} of the {row_map.num_parts} of the row_map are "
                f"to be {len(ranks)}, one for each of its ranks"
            )
    if row_map.num_parts > num_shards:
        raise InvalidInputError(
            f"the row_map has {row_map.num_parts} parts, and there are {num_shards} shards for them"
        )
    return row_map


def _runs(row_map: RowMap, shards: Sequence[_Shards]) -> Iterator[BlockRun]:
    bounded = [(shard.rows, shard.columns) for shard in shards if isinstance(shard.rows, tuple)]
    of_bounds = iter(parts_of(row_map, bounded) if bounded else ())
    for ranks, rows, columns, dataflow in shards:
        parts = rows if isinstance(rows, range) else range(first := next(of_bounds), first + 1)
        is_copied = len(ranks) > len(parts)
        span = ColumnRange(*columns)
        yield BlockRun(row_map, span, len(ranks), parts.start, is_copied, ranks.start, dataflow=dataflow)


def _maps_of(kind: type[ShardingType] | ShardingType) -> list[type[RowMap]]:
    """The row maps that a document may name: the type's, and core's that have other names."""
    own = {row_map.name for row_map in kind.row_maps}
    return [*kind.row_maps, *(row_map for row_map in ROW_MAPS if row_map.name not in own)]


def _dataflow(entry: Mapping[str, Any], kind: type[ShardingType] | ShardingType) -> Dataflow | None:
    """The dataflow that a table or a shard names, of those that the sharding type has."""
    return from_data(entry["dataflow"], kind.dataflows) if "dataflow" in entry else None


def _rows(shard: Mapping[str, Any], num_rows: int) -> Bounds | range:
    """Bounds of the rows of each shard of an entry, or the parts of its shards, one for all or one each."""
    rows = shard["rows"]
    if isinstance(rows, dict):
        if not rows.keys() & {"part", "parts"}:
            raise InvalidInputError(
                f'rows must be [start, stop] or {{"part": i, "num_rows": n}}, got {rows!r}'
            )
        first, last = map(int, rows.get("parts") or (rows["part"],) * 2)
        return range(first, last + 1)
    start, stop = map(int, rows)
    if not start <= stop <= num_rows:
        raise InvalidInputError(f"rows [{start}, {stop}) are not within the table's {num_rows} rows")
    return start, stop


def _columns(shard: Mapping[str, Any], dim: int) -> Bounds:
    start, stop = map(int, shard["columns"])
    if not start < stop <= dim:
        raise InvalidInputError(
            f"columns [{start}, {stop}) are empty or not within the table's {dim} columns"
        )
    return start, stop
