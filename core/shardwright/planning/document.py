"""The plan document: a plan as JSON, versioned, checked on load, editable by hand.

``{"format": "shardwright-plan", "version": 1, "objective": {...}, "topology": {...}, "inputs": {...},
"plugins": [...], "modules": {path: {table: {"sharding_type", "compute_kernel", "num_embeddings",
"embedding_dim", "shards": [{"rank", "rows": [a, b], "columns": [a, b]}, ...]}}}}``. A table may also have
``qcomms_config`` (the codecs of results and gradients, where they have any), ``row_map`` (where rows are not parted in
neighbouring runs; then a shard's ``rows`` are ``{"part": i, "num_rows": n}``), ``dataflow``, ``variant`` and
``extras``; a shard may have a ``dataflow`` of its own. Keys that are not known here are kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanError, ShardwrightError
from shardwright.planning.agreement import disagreement
from shardwright.planning.codecs import QCommsConfig
from shardwright.planning.layouts import (
    Block,
    ColumnRange,
    Dataflow,
    Exchange,
    Layout,
    PlacedBlocks,
    from_data,
    to_data,
)
from shardwright.planning.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from shardwright.planning.row_maps import RowMap, RowPart, RowsRange, RowsSplit
from shardwright.planning.tables import TableSpec
from shardwright.planning.text import json_text
from shardwright.planning.topology import Topology

if TYPE_CHECKING:
    from shardwright.registry import Registry

FORMAT = "shardwright-plan"
VERSION = 1

_TABLE_KEYS = frozenset(
    [
        *("sharding_type", "compute_kernel", "num_embeddings", "embedding_dim", "shards"),
        *("row_map", "dataflow", "variant", "extras", "qcomms_config"),
    ]
)
_SHARD_KEYS = frozenset(["rank", "rows", "columns", "dataflow"])


def write_plan(plan: ShardingPlan) -> str:
    """The JSON document of a plan, a line for each shard, so that documents can be compared line by line."""
    rest = dict(plan.document)
    known = rest.pop("modules", {})
    rest.setdefault("topology", _least_topology(plan))
    head = {"format": FORMAT, "version": VERSION}
    lines = [
        f" {json.dumps(key)}: {json_text(value, ' ')}" for key, value in {**head, **rest, **head}.items()
    ]
    shards = _ShardWriter()
    modules = []
    for path, tables in plan.plan.items():
        entries = [_table_line(name, entry, known.get(path, {}), shards) for name, entry in tables.items()]
        modules.append(f"  {json.dumps(path)}: {_block(entries, '  ')}")
    return _block([*lines, f' "modules": {_block(modules, " ")}'], "")


def _block(lines: Sequence[str], indent: str, brackets: str = "{}") -> str:
    """Lines between brackets, as :func:`json_text` sets them."""
    if not lines:
        return brackets
    return f"{brackets[0]}\n" + ",\n".join(lines) + f"\n{indent}{brackets[1]}"


def _least_topology(plan: ShardingPlan) -> dict[str, Any]:
    shardings = [sharding for tables in plan.plan.values() for sharding in tables.values()]
    ranks = [rank for sharding in shardings for rank in sharding.ranks]
    device = shardings[0].device if shardings else "cpu"
    return {"world_size": max(ranks, default=0) + 1, "compute_device": device}


def _table_line(
    name: str, sharding: ParameterSharding, known_tables: Mapping[str, Any], shards: _ShardWriter
) -> str:
    known = known_tables.get(name, {})
    layout = sharding.layout
    data: dict[str, Any] = {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "num_embeddings": layout.row_map.num_rows,
        "embedding_dim": shards.dim_of(layout),
    }
    if not shards.can_be_derived(layout):
        data["row_map"] = to_data(layout.row_map)
    if layout.dataflow != Exchange():
        data["dataflow"] = to_data(layout.dataflow)
    if layout.variant:
        data["variant"] = layout.variant
    if sharding.qcomms_config:
        data["qcomms_config"] = sharding.qcomms_config.to_data()
    if layout.extras:
        data["extras"] = dict(layout.extras)
    data.update((key, value) for key, value in known.items() if key not in _TABLE_KEYS)
    lines = [f"    {json.dumps(key)}: {json_text(value, '    ')}" for key, value in data.items()]
    lines.append(f'    "shards": {_block(shards.lines(layout, known.get("shards", ())), "    ", "[]")}')
    return f"   {json.dumps(name)}: {_block(lines, '   ')}"


class _ShardWriter:
    """Writes shards, and what layouts have in common once for all of them.

    The layouts of tables that are alike are made of the same blocks (:class:`PlacedBlocks` of one sequence), and of
    these many are on the same ranks.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[int, tuple[int | None, ...]], list[str]] = {}
        self._sizes: dict[int, list[str]] = {}
        self._dims: dict[int, int] = {}
        self._derived: dict[int, bool] = {}

    def lines(self, layout: Layout, known: Sequence[Mapping[str, Any]]) -> list[str]:
        """A line for each shard, with the keys that a loaded document had beside ours, if it has as many shards."""
        key = (id(_cut(layout)), tuple(layout.ranks))
        if key not in self._lines:
            sizes = self._sizes_of(layout)
            self._lines[key] = [
                f'     {{"rank": {rank}, {size}' for rank, size in zip(layout.ranks, sizes, strict=True)
            ]
        lines = self._lines[key]
        if len(known) != len(lines) or all(_SHARD_KEYS.issuperset(old) for old in known):
            return [f"{line}}}" for line in lines]
        return [f"{line}{_unknown(old)}}}" for line, old in zip(lines, known, strict=True)]

    def _sizes_of(self, layout: Layout) -> list[str]:
        key = id(_cut(layout))
        if key not in self._sizes:
            self._sizes[key] = [_size_text(block) for block in _cut(layout)]
        return self._sizes[key]

    def dim_of(self, layout: Layout) -> int:
        """The columns of the table."""
        key = id(_cut(layout))
        if key not in self._dims:
            self._dims[key] = max(block.columns.stop for block in _cut(layout))
        return self._dims[key]

    def can_be_derived(self, layout: Layout) -> bool:
        """Whether the row map follows from the shards' bounds."""
        key = id(_cut(layout))
        if key not in self._derived:
            self._derived[key] = _can_be_derived(layout)
        return self._derived[key]


def _cut(layout: Layout) -> Sequence[Block]:
    """The blocks of a layout before they were given ranks; the same object for layouts made of the same."""
    return layout.blocks.blocks if isinstance(layout.blocks, PlacedBlocks) else layout.blocks


def _size_text(block: Block) -> str:
    bounds = block.rows.bounds
    part = f'{{"part": {block.rows.index}, "num_rows": {block.num_rows}}}'
    rows = f"[{bounds[0]}, {bounds[1]}]" if bounds else part
    dataflow = f', "dataflow": {json.dumps(to_data(block.dataflow))}' if block.dataflow else ""
    return f'"rows": {rows}, "columns": [{block.columns.start}, {block.columns.stop}]{dataflow}'


def _unknown(known: Mapping[str, Any]) -> str:
    """The keys of a shard that are not ours, as the end of its line."""
    return "".join(
        f", {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in known.items()
        if key not in _SHARD_KEYS
    )


def _can_be_derived(layout: Layout) -> bool:
    if layout.dataflow.is_replicated:
        return layout.row_map == RowsRange(layout.row_map.num_rows)
    bounds = [block.rows.bounds for block in _cut(layout)]
    if any(pair is None for pair in bounds):
        return False
    try:
        columns = [block.columns for block in _cut(layout)]
        row_map, _ = _derive_row_map([b for b in bounds if b], columns, layout.row_map.num_rows)
    except PlanError:
        return False
    return row_map == layout.row_map


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
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise PlanError(f"the plan document has the key {repeated[0]!r} twice in one object")
    return dict(pairs)


class _Reader:
    """Reads the tables of a document for one topology."""

    def __init__(self, topology: Topology) -> None:
        from shardwright.plugins import host

        self._types: Registry[ShardingType] = host().sharding_types
        self._kernels = host().compute_kernels
        self._topology = topology
        self._world_size = topology.world_size
        self._device = topology.compute_device

    def table(self, path: str, name: str, entry: Any) -> ParameterSharding:
        where = f"module {path!r}, table {name!r}"
        if not isinstance(entry, dict):
            raise PlanError(f"{where} must be an object, got {entry!r}")
        try:
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
        return ParameterSharding(kind.name, kernel, layout, device=self._device, qcomms_config=codecs)

    def _layout(
        self, kind: type[ShardingType] | ShardingType, entry: Mapping[str, Any], where: str
    ) -> Layout:
        num_rows = _positive(entry, "num_embeddings", where)
        dim = _positive(entry, "embedding_dim", where)
        shards = _typed(entry, "shards", list, where)
        if not shards:
            raise PlanError(f"{where} has no shards; its {num_rows} rows x {dim} columns must be somewhere")
        places = [f"{where}, shard {index}" for index in range(len(shards))]
        ranks = [self._rank(shard, place) for shard, place in zip(shards, places, strict=True)]
        columns = [_columns(shard, dim, place) for shard, place in zip(shards, places, strict=True)]
        rows = [_rows(shard, num_rows, place) for shard, place in zip(shards, places, strict=True)]
        dataflow = _dataflow(entry, kind, where) or Exchange()
        own = [_dataflow(shard, kind, place) for shard, place in zip(shards, places, strict=True)]
        given: RowMap | None = RowsRange(num_rows) if dataflow.is_replicated else None
        if "row_map" in entry:
            given = from_data(_typed(entry, "row_map", dict, where), kind.row_maps)
        parts = _row_parts(given, rows, columns, num_rows, places)
        return Layout(
            [
                Block(part, span, rank=rank, dataflow=flow)
                for part, span, rank, flow in zip(parts, columns, ranks, own, strict=True)
            ],
            dataflow=dataflow,
            variant=_typed(entry, "variant", str, where) if "variant" in entry else "",
            extras=_typed(entry, "extras", dict, where) if "extras" in entry else {},
        )

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


def _row_parts(
    given: RowMap | None,
    rows: Sequence[tuple[int, int] | int],
    columns: Sequence[ColumnRange],
    num_rows: int,
    places: Sequence[str],
) -> list[RowPart]:
    """The part of the rows that each shard holds: by the row map given, or one derived from the bounds."""
    if given is None:
        bounds = [pair for pair in rows if isinstance(pair, tuple)]
        if len(bounds) < len(rows):
            index = next(index for index, pair in enumerate(rows) if not isinstance(pair, tuple))
            raise PlanError(f"{places[index]}: rows are given by part, which needs the table's row_map")
        row_map, parts = _derive_row_map(bounds, columns, num_rows, places)
        return [row_map[part] for part in parts]
    of_bounds: dict[tuple[int, int] | None, list[int]] = {}
    for part in given:
        of_bounds.setdefault(part.bounds, []).append(part.index)
    seen: Counter[Any] = Counter()
    found = []
    for pair, span, place in zip(rows, columns, places, strict=True):
        # Empty parts may have the same bounds: shards of the same columns are of different ones.
        fitting = of_bounds.get(pair, []) if isinstance(pair, tuple) else [pair]
        index = fitting[min(seen[pair, span], len(fitting) - 1)] if fitting else given.num_parts
        seen[pair, span] += 1
        if index >= given.num_parts:
            raise PlanError(f"{place}: the row_map {to_data(given)} has no part {pair}")
        found.append(given[index])
    return found


def _derive_row_map(
    bounds: Sequence[tuple[int, int]],
    columns: Sequence[ColumnRange],
    num_rows: int,
    places: Sequence[str] = (),
) -> tuple[RowMap, list[int]]:
    """The row map whose parts have these bounds, and the part of each: equal runs where they are equal.

    Empty parts are told apart by their columns: shards of the same columns are of different parts.

    Raises:
        PlanError: the bounds overlap, or leave rows out.
    """
    seen: Counter[tuple[tuple[int, int], ColumnRange]] = Counter()
    keys: list[tuple[int, int, int]] = []
    for (start, stop), span in zip(bounds, columns, strict=True):
        occurrence = seen[(start, stop), span]
        seen[(start, stop), span] += 1
        if occurrence and start != stop:
            place = places[len(keys)] if places else "a shard"
            raise PlanError(
                f"{place}: rows [{start}, {stop}) and columns [{span.start}, {span.stop}) are covered twice"
            )
        keys.append((start, stop, occurrence))
    distinct = sorted(set(keys))
    reached = 0
    for start, stop, _ in distinct:
        if start != reached:
            what = "not covered" if start > reached else "covered twice, or cut elsewhere in other columns"
            place = f"{places[0].rpartition(', ')[0]}: " if places else ""
            raise PlanError(f"{place}rows [{min(start, reached)}, {max(start, reached)}) are {what}")
        reached = stop
    if reached != num_rows:
        place = f"{places[0].rpartition(', ')[0]}: " if places else ""
        raise PlanError(f"{place}the shards cover {reached} of {num_rows} rows")
    even = RowsRange(num_rows, parts=len(distinct))
    if [part.bounds for part in even] == [(start, stop) for start, stop, _ in distinct]:
        row_map: RowMap = even
    else:
        row_map = RowsSplit((0, *(stop for _, stop, _ in distinct)))
    index = {key: part for part, key in enumerate(distinct)}
    return row_map, [index[key] for key in keys]


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
