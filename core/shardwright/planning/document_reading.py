"""Reading a plan document: everything is checked, and tables that are cut alike are read once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import attrs
from attrs import frozen

from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanError, ShardwrightError
from shardwright.planning.agreement import disagreement
from shardwright.planning.codecs import QCommsConfig
from shardwright.planning.document import FORMAT, VERSION
from shardwright.planning.document_rows import row_parts
from shardwright.planning.layouts import (
    Block,
    BlockRun,
    ColumnRange,
    Dataflow,
    Exchange,
    Layout,
    PlacedBlocks,
    from_data,
)
from shardwright.planning.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from shardwright.planning.row_maps import ROW_MAPS, RowMap, RowsRange
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology

if TYPE_CHECKING:
    from shardwright.registry import Registry


def read_plan(text: str) -> ShardingPlan:
    """The plan in a document.

    Raises:
        PlanError: the document is malformed, names what is not known, or its shards do not cover each row and
            column exactly once; the text says where.
    """
    document = _parse(text)
    if document.get("format") != FORMAT:
        raise PlanError(f'a plan document has "format": "{FORMAT}", this one has {document.get("format")!r}')
    if document.get("version") != VERSION:
        raise PlanError(
            f"the plan document has version {document.get('version')!r}; version {VERSION} can be read"
        )
    _check_claims(document)
    topology = _typed(document, "topology", dict, "the plan document")
    reader = _Reader(_ranks_of(topology))
    modules = _typed(document, "modules", dict, "the plan document")
    plan = {
        path: EmbeddingModuleShardingPlan(
            (name, reader.table(path, name, entry)) for name, entry in _items(tables, f"module {path!r}")
        )
        for path, tables in modules.items()
    }
    return ShardingPlan(plan=plan, document=document)


def _check_claims(document: Mapping[str, Any]) -> None:
    """Check the form of what a document says of its plan, as far as it says anything."""
    for key, kind in (("objective", dict), ("inputs", dict), ("plugins", list)):
        if key in document:
            _typed(document, key, kind, "the plan document")
    objective = document.get("objective", {})
    for key in ("value_ms", "lower_bound_ms", "gap"):
        number = objective.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise PlanError(f"the plan document: objective.{key} must be a number, got {number!r}")
    if "certificate" in objective:
        _typed(objective, "certificate", dict, "the plan document: objective")
    for index, plugin in enumerate(document.get("plugins", ())):
        if not isinstance(plugin, dict):
            raise PlanError(f"the plan document: plugins[{index}] must be an object, got {plugin!r}")


def _ranks_of(data: Mapping[str, Any]) -> Topology:
    """The ranks that a document's topology describes; its memory and links do not matter to its shards."""
    world_size = _positive(data, "world_size", "topology")
    device = _typed(data, "compute_device", str, "topology")
    local = _positive(data, "local_world_size", "topology") if "local_world_size" in data else None
    try:
        return Topology(world_size, device, local_world_size=local)
    except ShardwrightError as error:
        raise PlanError(f"topology: {error}") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        document = json.loads(
            text, object_pairs_hook=_without_repetition, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError as error:
        raise PlanError("the plan document is nested too deeply to be one") from error
    except json.JSONDecodeError as error:
        raise PlanError(
            f"the plan document is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(document, dict):
        raise PlanError(f"a plan document is a JSON object, got {type(document).__name__}")
    return document


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise PlanError(f"the plan document has the number {number}, which is not finite")
    return value


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    raise PlanError(f"the plan document has the key {repeated[0]!r} twice in one object")


@frozen(eq=False)
class _Cut:
    """A table as it was read and found right, for others that are cut alike.

    Args:
        sharding: with blocks of the ranks of the first.
        right_places: where the shards may be, as far as that matters.
    """

    sharding: ParameterSharding
    right_places: set[tuple[int, ...] | bool]

    def placed(self, ranks: tuple[int, ...]) -> ParameterSharding:
        """The same with other ranks."""
        layout = self.sharding.layout
        cut = layout.blocks.blocks if isinstance(layout.blocks, PlacedBlocks) else layout.blocks
        return attrs.evolve(self.sharding, layout=attrs.evolve(layout, blocks=PlacedBlocks(cut, ranks)))


def _cut_text(entry: Mapping[str, Any]) -> str:
    """All that an entry says of its table but ranks: equal only for equal JSON data."""
    shards = [
        {key: value for key, value in shard.items() if key != "rank"} if isinstance(shard, dict) else shard
        for shard in entry.get("shards", ())
    ]
    return json.dumps([{**entry, "shards": None}, shards])


def _ranks(entry: Mapping[str, Any], world_size: int) -> tuple[int, ...] | None:
    """The ranks of an entry's shards; ``None`` if one is no rank."""
    shards = entry.get("shards")
    if not isinstance(shards, list) or not shards or not all(isinstance(shard, dict) for shard in shards):
        return None
    if _has_runs(shards):
        return None
    ranks = tuple(shard.get("rank") for shard in shards)
    if all(_is_count(rank) and rank < world_size for rank in ranks):
        return ranks
    return None


def _has_runs(shards: Sequence[Any]) -> bool:
    """Whether an entry stands for shards of several ranks."""
    return any(isinstance(shard, dict) and "ranks" in shard for shard in shards)


class _Reader:
    """Reads the tables of a document for one topology."""

    def __init__(self, topology: Topology) -> None:
        from shardwright.plugins import host

        self._types: Registry[ShardingType] = host().sharding_types
        self._kernels = host().compute_kernels
        self._topology = topology
        self._world_size = topology.world_size
        self._device = topology.compute_device
        self._cuts: dict[str, _Cut] = {}
        self._of_runs: dict[str, ParameterSharding] = {}  # by all that is said of them

    def table(self, path: str, name: str, entry: Any) -> ParameterSharding:
        where = f"module {path!r}, table {name!r}"
        if not isinstance(entry, dict):
            raise PlanError(f"{where} must be an object, got {entry!r}")
        try:
            known = self._known_cut(entry)
            if known is not None:
                return known
            kind = self._types.entry(_typed(entry, "sharding_type", str, where))
            kernel = self._kernels.entry(_typed(entry, "compute_kernel", str, where)).name
            layout = self._layout(kind.item, entry, where)
            codecs = _codecs(entry, where)
            table = TableSpec(name, layout.row_map.num_rows, entry["embedding_dim"], module=path)
            layout.check(table, world_size=self._world_size)
            contradiction = disagreement(self._types.create(kind.name), table, layout, self._topology)
        except PlanError:
            raise
        except ShardwrightError as error:
            raise PlanError(f"{where}: {error}") from error
        if contradiction:
            raise PlanError(f"{where}: {contradiction}. Change the shards, or the sharding_type.")
        made = ParameterSharding(kind.name, kernel, layout, device=self._device, qcomms_config=codecs)
        return self._remembered(entry, made)

    def _remembered(self, entry: Mapping[str, Any], made: ParameterSharding) -> ParameterSharding:
        """What was read, kept for tables that are cut alike."""
        if _has_runs(entry["shards"]):
            return self._of_runs.setdefault(json.dumps(entry), made)
        ranks = tuple(made.ranks)
        cut = _Cut(made, {self._places(made.layout, ranks)})
        return self._cuts.setdefault(_cut_text(entry), cut).placed(ranks)

    def _known_cut(self, entry: Mapping[str, Any]) -> ParameterSharding | None:
        """A table that is cut as one before and whose ranks are such as were found right with it."""
        if isinstance(entry.get("shards"), list) and _has_runs(entry["shards"]):
            return self._of_runs.get(json.dumps(entry))
        ranks = _ranks(entry, self._world_size)
        known = None if ranks is None else self._cuts.get(_cut_text(entry))
        if ranks is None or known is None:
            return None
        places = self._places(known.sharding.layout, ranks)
        return known.placed(ranks) if places in known.right_places else None

    def _places(self, layout: Layout, ranks: tuple[int, ...]) -> tuple[int, ...] | bool:
        """All that matters of the ranks: of copies the ranks themselves, else whether they are of one host."""
        if any(dataflow.is_replicated for dataflow in layout.dataflows):
            return ranks
        return len({self._topology.host_of(rank) for rank in set(ranks)}) == 1

    def _layout(
        self, kind: type[ShardingType] | ShardingType, entry: Mapping[str, Any], where: str
    ) -> Layout:
        num_rows = _positive(entry, "num_embeddings", where)
        dim = _positive(entry, "embedding_dim", where)
        shards = _typed(entry, "shards", list, where)
        if not shards:
            raise PlanError(f"{where} has no shards; its {num_rows} rows x {dim} columns must be somewhere")
        places = [f"{where}, shard {index}" for index in range(len(shards))]
        dataflow = _dataflow(entry, kind, where) or Exchange()
        own = [
            _dataflow(shard, kind, place) if isinstance(shard, dict) else None
            for shard, place in zip(shards, places, strict=True)
        ]
        given: RowMap | None = RowsRange(num_rows) if dataflow.is_replicated else None
        if "row_map" in entry:
            own_maps = {row_map.name for row_map in kind.row_maps}
            maps = [*kind.row_maps, *(row_map for row_map in ROW_MAPS if row_map.name not in own_maps)]
            given = from_data(_typed(entry, "row_map", dict, where), maps)
        read = self._runs if _has_runs(shards) else self._blocks
        return Layout(
            read(shards, given, own, (num_rows, dim), places),
            dataflow=dataflow,
            variant=_typed(entry, "variant", str, where) if "variant" in entry else "",
            extras=_typed(entry, "extras", dict, where) if "extras" in entry else {},
        )

    def _blocks(
        self,
        shards: Sequence[Any],
        given: RowMap | None,
        own: Sequence[Dataflow | None],
        shape: tuple[int, int],
        places: Sequence[str],
    ) -> list[Block]:
        """A block for each shard, which each have an entry."""
        num_rows, dim = shape
        ranks = [self._rank(shard, place) for shard, place in zip(shards, places, strict=True)]
        columns = [_columns(shard, dim, place) for shard, place in zip(shards, places, strict=True)]
        rows = [_rows(shard, num_rows, place) for shard, place in zip(shards, places, strict=True)]
        parts = row_parts(given, rows, columns, num_rows, places)
        return [
            Block(part, span, rank=rank, dataflow=flow)
            for part, span, rank, flow in zip(parts, columns, ranks, own, strict=True)
        ]

    def _runs(
        self,
        shards: Sequence[Any],
        given: RowMap | None,
        own: Sequence[Dataflow | None],
        shape: tuple[int, int],
        places: Sequence[str],
    ) -> list[BlockRun]:
        """A run of blocks for each entry, of which some stand for shards of several ranks."""
        if given is None:
            raise PlanError(
                f"{places[0].rpartition(', ')[0]}: shards of several ranks need the table's row_map"
            )
        runs = []
        for shard, flow, place in zip(shards, own, places, strict=True):
            first, last = self._span(shard, place)
            part, is_copied = _parts(shard, given, last - first + 1, shape[0], place)
            runs.append(
                BlockRun(
                    given,
                    _columns(shard, shape[1], place),
                    last - first + 1,
                    part,
                    is_copied=is_copied,
                    rank=first,
                    dataflow=flow,
                )
            )
        return runs

    def _span(self, shard: Any, place: str) -> tuple[int, int]:
        """The first and the last rank of an entry."""
        if not isinstance(shard, dict) or "ranks" not in shard:
            rank = self._rank(shard, place)
            return rank, rank
        first, last = _pair(shard, "ranks", place)
        if not 0 <= first <= last < self._world_size:
            raise PlanError(
                f"{place}: ranks {first} to {last} are not among the {self._world_size} ranks of the topology"
            )
        return first, last

    def _rank(self, shard: Any, place: str) -> int:
        if not isinstance(shard, dict):
            raise PlanError(f"{place} must be an object with rank, rows and columns, got {shard!r}")
        rank = shard.get("rank")
        if not _is_count(rank) or rank >= self._world_size:
            raise PlanError(
                f"{place}: rank {rank!r} is not one of the {self._world_size} ranks of the topology"
            )
        return rank


def _dataflow(
    entry: Mapping[str, Any], kind: type[ShardingType] | ShardingType, where: str
) -> Dataflow | None:
    """The dataflow that a table or a shard names, of those that the sharding type has."""
    if "dataflow" not in entry:
        return None
    return from_data(_typed(entry, "dataflow", dict, where), kind.dataflows)


def _codecs(entry: Mapping[str, Any], where: str) -> QCommsConfig | None:
    if "qcomms_config" not in entry:
        return None
    return QCommsConfig.from_data(_typed(entry, "qcomms_config", dict, where)).resolved()


def _rows(shard: Mapping[str, Any], num_rows: int, place: str) -> tuple[int, int] | int:
    rows = shard.get("rows")
    if isinstance(rows, dict):
        part = rows.get("part")
        if not _is_count(part):
            raise PlanError(
                f'{place}: rows must be [start, stop] or {{"part": i, "num_rows": n}}, got {rows!r}'
            )
        return part
    start, stop = _pair(shard, "rows", place)
    if not 0 <= start <= stop <= num_rows:
        raise PlanError(f"{place}: rows [{start}, {stop}) are not within the table's {num_rows} rows")
    return start, stop


def _parts(
    shard: Mapping[str, Any], given: RowMap, count: int, num_rows: int, place: str
) -> tuple[int, bool]:
    """The row part of an entry's first shard, and whether all of its shards have that."""
    rows = shard.get("rows")
    if not isinstance(rows, dict) or "parts" not in rows:
        (part,) = row_parts(given, [_rows(shard, num_rows, place)], [ColumnRange(0, 1)], num_rows, [place])
        return part.index, count > 1
    first, last = _pair(rows, "parts", f"{place}: rows")
    if last - first + 1 != count or not 0 <= first <= last < given.num_parts:
        raise PlanError(
            f"{place}: parts {first} to {last} of the {given.num_parts} of the row_map are to be {count}, one for each "
            "of its ranks"
        )
    return first, False


def _columns(shard: Mapping[str, Any], dim: int, place: str) -> ColumnRange:
    start, stop = _pair(shard, "columns", place)
    if not 0 <= start < stop <= dim:
        raise PlanError(
            f"{place}: columns [{start}, {stop}) are empty or not within the table's {dim} columns"
        )
    return ColumnRange(start, stop)


def _pair(shard: Mapping[str, Any], key: str, place: str) -> tuple[int, int]:
    pair = shard.get(key)
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(item) is int for item in pair):
        raise PlanError(f"{place}: {key} must be two whole numbers [start, stop], got {pair!r}")
    return pair[0], pair[1]


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _positive(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data.get(key)
    if not _is_count(value) or value == 0:
        raise PlanError(f"{where}: {key} must be a positive whole number, got {value!r}")
    return value


def _typed(data: Mapping[str, Any], key: str, kind: type[Any], where: str) -> Any:
    value = data.get(key)
    if not isinstance(value, kind):
        names: dict[type[Any], str] = {dict: "an object", list: "a list", str: "a text"}
        got = "nothing" if key not in data else repr(value)
        raise PlanError(f"{where}: {key} must be {names[kind]}, got {got}")
    return value


def _items(data: Any, where: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object of tables, got {data!r}")
    return data.items()
