"""The plan document: a plan as JSON, versioned, checked on load, editable by hand.

``{"format": "shardwright-plan", "version": 1, "objective": {...}, "topology": {...}, "inputs": {...},
"plugins": [...], "modules": {path: {table: {"sharding_type", "compute_kernel", "num_embeddings",
"embedding_dim", "shards": [{"rank", "rows": [a, b], "columns": [a, b]}, ...]}}}}``. A table may also have
``qcomms_config`` (the codecs of results and gradients, where they have any), ``row_map`` (where rows are not parted in
neighbouring runs; then a shard's ``rows`` are ``{"part": i, "num_rows": n}``), ``dataflow``, ``variant`` and
``extras``; a shard may have a ``dataflow`` of its own. Keys of others, which begin with ``x-``, are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.errors import PlanError
from shardwright.planning.document_rows import derive_row_map
from shardwright.planning.layouts import Block, Exchange, Layout, PlacedBlocks, to_data
from shardwright.planning.plan import ParameterSharding, ShardingPlan
from shardwright.planning.row_maps import RowsRange
from shardwright.planning.text import json_text, plain_json

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
        f", {json.dumps(key)}: {plain_json(value)}" for key, value in known.items() if key not in _SHARD_KEYS
    )


def _can_be_derived(layout: Layout) -> bool:
    if layout.dataflow.is_replicated:
        return layout.row_map == RowsRange(layout.row_map.num_rows)
    bounds = [block.rows.bounds for block in _cut(layout)]
    if any(pair is None for pair in bounds):
        return False
    try:
        columns = [block.columns for block in _cut(layout)]
        row_map, _ = derive_row_map([b for b in bounds if b], columns, layout.row_map.num_rows)
    except PlanError:
        return False
    return row_map == layout.row_map
