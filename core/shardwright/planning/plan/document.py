"""The plan document: a plan as JSON, versioned, checked on load, editable by hand.

``{"format": "shardwright-plan", "version": 1, "objective": {...}, "topology": {...}, "inputs": {...},
"plugins": [...], "modules": {path: {table: {"sharding_type", "compute_kernel", "num_embeddings",
"embedding_dim", "shards": [{"rank", "rows": [a, b], "columns": [a, b]}, ...]}}}}``. A table may also have
``qcomms_config`` (the codecs of results and gradients, where they have any), ``row_map`` (where rows are not parted in
neighbouring runs; then a shard's ``rows`` are ``{"part": i, "num_rows": n}``), ``dataflow``, ``variant`` and
``extras``; a shard may have a ``dataflow`` of its own. Many shards on neighbouring ranks are one entry: ``{"ranks":
[first, last], "rows": {"parts": [first, last]}, "columns": [a, b]}`` where each rank has the next part of the
``row_map``, and ``rows`` as of one shard where all have a copy. Keys of others, which begin with
``x-``, are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.blocks import BlockColumns
from shardwright.planning.layouts.layout import Block, Exchange, Layout, to_data
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.planning.plan.rows import derive_row_map
from shardwright.planning.plan.sharding import EmbeddingModuleShardingPlan, ParameterSharding
from shardwright.planning.text import json_text, plain_json

FORMAT = "shardwright-plan"
VERSION = 1
_LONG_RUN = 32  # shards: from there on those that follow one another are one entry, less for a person to edit

_TABLE_KEYS = frozenset(
    [
        *("sharding_type", "compute_kernel", "num_embeddings", "embedding_dim", "shards"),
        *("row_map", "dataflow", "variant", "extras", "qcomms_config"),
    ]
)
_SHARD_KEYS = frozenset(["rank", "ranks", "rows", "columns", "dataflow"])

_Cut: TypeAlias = tuple[list[str], bool]
"""Texts of the rows and columns of a layout's shards, and whether the bounds of these tell the row map."""


def write_plan(plan: Mapping[str, EmbeddingModuleShardingPlan], document: Mapping[str, Any]) -> str:
    """The JSON document of a plan, a line for each shard, so that documents can be compared line by line.

    Args:
        plan: module path -> the plan of its tables.
        document: the rest of the document.
    """
    rest = dict(document)
    known = rest.pop("modules", {})
    rest.setdefault("topology", _least_topology(plan))
    head = {"format": FORMAT, "version": VERSION}
    lines = [
        f" {json.dumps(key)}: {json_text(value, ' ')}" for key, value in {**head, **rest, **head}.items()
    ]
    cuts: dict[int, _Cut] = {}
    modules = []
    for path, tables in plan.items():
        entries = [_table_line(name, entry, known.get(path, {}), cuts) for name, entry in tables.items()]
        modules.append(f"  {json.dumps(path)}: {_block(entries, '  ')}")
    return _block([*lines, f' "modules": {_block(modules, " ")}'], "")


def _block(lines: Sequence[str], indent: str, brackets: str = "{}") -> str:
    """Lines between brackets, as :func:`json_text` sets them."""
    if not lines:
        return brackets
    return f"{brackets[0]}\n" + ",\n".join(lines) + f"\n{indent}{brackets[1]}"


def _least_topology(plan: Mapping[str, EmbeddingModuleShardingPlan]) -> dict[str, Any]:
    shardings = [sharding for tables in plan.values() for sharding in tables.values()]
    last = max((int(sharding.layout.columns.rank.max()) for sharding in shardings), default=0)
    device = shardings[0].device if shardings else "cpu"
    if not isinstance(device, str):
        return {"world_size": len(device), "compute_device": list(device)}
    return {"world_size": last + 1, "compute_device": device}


def _table_line(
    name: str, sharding: ParameterSharding, known_tables: Mapping[str, Any], cuts: dict[int, _Cut]
) -> str:
    known = known_tables.get(name, {})
    layout = sharding.layout
    data: dict[str, Any] = {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "num_embeddings": layout.row_map.num_rows,
        "embedding_dim": int(layout.columns.stop.max()),
    }
    entries, is_derived = _entries_of(layout), False
    if entries is None:
        runs = layout.blocks.runs  # one object for tables that are alike
        if id(runs) not in cuts:
            cuts[id(runs)] = [_size_text(block) for block in layout.blocks], _can_be_derived(layout)
        sizes, is_derived = cuts[id(runs)]
        entries = [f'     {{"rank": {rank}, {size}' for rank, size in zip(layout.ranks, sizes, strict=True)]
    if not is_derived:
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
    lines.append(f'    "shards": {_block(_with_unknown(entries, known.get("shards", ())), "    ", "[]")}')
    return f"   {json.dumps(name)}: {_block(lines, '   ')}"


def _with_unknown(lines: Sequence[str], known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines with the keys that a loaded document had beside ours, if it has as many; and their last brackets."""
    if len(known) != len(lines) or all(_SHARD_KEYS.issuperset(old) for old in known):
        return [f"{line}}}" for line in lines]
    return [f"{line}{_unknown(old)}}}" for line, old in zip(lines, known, strict=True)]


def _entries_of(layout: Layout) -> list[str] | None:
    """A line for each run of shards on neighbouring ranks; ``None`` where there is no long one."""
    if len(layout.blocks) < _LONG_RUN:
        return None
    columns = layout.columns
    bounds = [0, *_begins_of_runs(columns), len(columns)]
    if max(stop - start for start, stop in pairwise(bounds)) < _LONG_RUN:
        return None
    return [_run_line(layout, columns, start, stop) for start, stop in pairwise(bounds)]


def _begins_of_runs(columns: BlockColumns) -> list[int]:
    """Find where runs of shards begin, except the first: runs of neighbouring parts, or of copies of one part."""
    alike = np.stack([columns.start, columns.stop, columns.dataflow])
    follows = (np.diff(columns.rank) == 1) & (np.diff(alike) == 0).all(0)
    step = np.diff(columns.part)
    kind = np.where(follows & np.isin(step, (0, 1)), step + 1, 0)  # 1: a copy, 2: the next part, 0: neither
    begins, first = [], 0
    for place in np.flatnonzero((kind == 0) | (np.diff(kind, prepend=0) != 0)).tolist():
        if kind[place] == 0 or place > first:  # the second shard of a run says of which kind it is
            begins.append(first := place + 1)
    return begins


def _run_line(layout: Layout, columns: BlockColumns, start: int, stop: int) -> str:
    block = layout.blocks[start]
    if stop - start == 1:
        return f'     {{"rank": {block.rank}, {_size_text(block)}'
    is_copied = columns.part[start] == columns.part[start + 1]
    rows = (
        _rows_text(block) if is_copied else f'{{"parts": [{columns.part[start]}, {columns.part[stop - 1]}]}}'
    )
    return f'     {{"ranks": [{block.rank}, {columns.rank[stop - 1]}], {_size_text(block, rows)}'


def _rows_text(block: Block) -> str:
    bounds = block.rows.bounds
    part = f'{{"part": {block.rows.index}, "num_rows": {block.num_rows}}}'
    return f"[{bounds[0]}, {bounds[1]}]" if bounds else part


def _size_text(block: Block, rows: str = "") -> str:
    rows = rows or _rows_text(block)
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
    bounds = [(block.rows.bounds, block.columns) for block in layout.blocks]
    given = [(pair, columns) for pair, columns in bounds if pair is not None]
    try:
        return len(given) == len(bounds) and derive_row_map(given, layout.row_map.num_rows) == layout.row_map
    except InvalidInputError:
        return False
