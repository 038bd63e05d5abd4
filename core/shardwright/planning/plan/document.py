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
from typing import Any

import numpy as np

from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.blocks import BlockColumns
from shardwright.planning.layouts.layout import Exchange, Layout, to_data
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.planning.plan.rows import Bounds, derive_row_map
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
    modules = []
    for path, tables in plan.items():
        of_module = known.get(path, {})
        entries = [_table_line(name, entry, of_module.get(name, {})) for name, entry in tables.items()]
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


def _table_line(name: str, sharding: ParameterSharding, known: Mapping[str, Any]) -> str:
    layout, columns = sharding.layout, sharding.layout.columns
    shards, is_derived = _shards_of(layout, columns)
    data: dict[str, Any] = {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "num_embeddings": layout.row_map.num_rows,
        "embedding_dim": int(columns.stop.max()),
    }
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
    lines.append(f'    "shards": {_block(_with_unknown(shards, known.get("shards", ())), "    ", "[]")}')
    return f"   {json.dumps(name)}: {_block(lines, '   ')}"


def _with_unknown(lines: Sequence[str], known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines with the keys that a loaded document had beside ours, if it has as many; and their last brackets."""
    others = [
        "".join(f", {json.dumps(key)}: {plain_json(old[key])}" for key in old if key not in _SHARD_KEYS)
        for old in (known if len(known) == len(lines) else [{}] * len(lines))
    ]
    return [f"{line}{other}}}" for line, other in zip(lines, others, strict=True)]


def _shards_of(layout: Layout, columns: BlockColumns) -> tuple[list[str], bool]:
    """A line for each shard, or for each run of those on neighbouring ranks where one is long; without last brackets.

    Returns:
        The lines, and true if the bounds in them tell the row map.
    """
    row_map = layout.row_map
    flows = [f', "dataflow": {json.dumps(to_data(own))}' if own else "" for own in columns.dataflows]
    numbers = np.stack([columns.part, columns.rank, columns.start, columns.stop, columns.dataflow], axis=1)
    inner = _begins_of_runs(columns) if len(columns) >= _LONG_RUN else []
    begins = np.array([0, *inner, len(columns)])
    has_runs = np.diff(begins).max() >= _LONG_RUN
    if not has_runs:
        begins = np.arange(len(columns) + 1)
    first, last = numbers[begins[:-1]].tolist(), numbers[begins[1:] - 1].tolist()
    bounds = {part: row_map[part].bounds for part in {own[0] for own in first}}
    lines = []
    for (part, rank, start, stop, flow), (last_part, last_rank, *_) in zip(first, last, strict=True):
        ranks = f'"rank": {rank}' if last_rank == rank else f'"ranks": [{rank}, {last_rank}]'
        if last_part > part:
            rows = f'{{"parts": [{part}, {last_part}]}}'
        elif own := bounds[part]:
            rows = f"[{own[0]}, {own[1]}]"
        else:
            rows = f'{{"part": {part}, "num_rows": {row_map.num_rows_of(part)}}}'
        lines.append(f'     {{{ranks}, "rows": {rows}, "columns": [{start}, {stop}]{flows[flow]}')
    return lines, not has_runs and _is_derived(layout, [(bounds[own[0]], (own[2], own[3])) for own in first])


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


def _is_derived(layout: Layout, shards: Sequence[tuple[Bounds | None, Bounds]]) -> bool:
    """True if the row map is the one that a reader makes of the bounds of shards' rows and columns."""
    if layout.dataflow.is_replicated:
        return layout.row_map == RowsRange(layout.row_map.num_rows)
    known = [(rows, columns) for rows, columns in shards if rows is not None]
    try:
        return len(known) == len(shards) and derive_row_map(known, layout.row_map.num_rows) == layout.row_map
    except InvalidInputError:
        return False
