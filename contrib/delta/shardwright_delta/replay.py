"""Increments that are applied to a model, whatever plan and ranks it has.

Legend: N rows of a batch, M rows of a block that have keys afterwards, C columns of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_delta.batches import ids_of, origin_of, values_of
from shardwright_delta.blocks import HeldBlock, held_blocks, sharded_tables
from shardwright_delta.digests import Ints


@torch.no_grad()
def replay(model: nn.Module, batches: Iterable[pa.RecordBatch]) -> None:
    """Take over an increment; every rank gives it all ranks' batches, and takes what belongs to its blocks.

    Increments follow one another from the base on: a checkpoint of the model at the first mark.

    Args:
        model: the model, sharded under any plan over any number of ranks, with the increment's tables and optimizers.
        batches: record batches of all ranks of one increment.

    Raises:
        InvalidInputError: a table is not the model's, or has other rows, columns or states. Nothing is changed where it
            has other rows.
    """
    tables = {table.state.table.path: table for table in sharded_tables(model)}
    by_table: dict[str, list[pa.RecordBatch]] = {path: [] for path in tables}
    for batch in batches:
        path = origin_of(batch).table
        if path not in by_table:
            raise sw.InvalidInputError(f"the increment has table {path!r}, the model {', '.join(by_table)}")
        if not tables[path].row_state:
            _check_rows(tables[path].state.table, ids_of(batch))
        by_table[path].append(batch)
    for held in held_blocks(model):
        own = by_table[held.path]
        (_replay_keys if held.is_keyed else _replay_rows)(held, own)
        steps = [step for batch in own if (step := origin_of(batch).step) is not None]
        if steps:
            held.lookup.load_step(max(steps))


def _check_rows(table: sw.TableSpec, ids: Ints) -> None:
    wrong = ids[(ids < 0) | (ids >= table.num_embeddings)]
    if len(wrong):
        raise sw.InvalidInputError(
            f"the increment has row {wrong[0]} of table {table.describe()}: it is one of a table of other rows",
            subject=table.path,
            asked=int(wrong[0]),
        )


def _replay_rows(held: HeldBlock, batches: Sequence[pa.RecordBatch]) -> None:
    """Overwrite the rows and columns of a block that batches have."""
    rows, span = held.block.rows, held.block.columns
    for batch in batches:
        start, stop = origin_of(batch).columns
        first, last = max(start, span.start), min(stop, span.stop)
        mine = np.flatnonzero(held.holds(ids_of(batch))) if first < last else ()
        if not len(mine):
            continue
        places = torch.from_numpy(np.asarray(rows.row_map.local_row_of(ids_of(batch)[mine])))
        for name, target in held.values().items():
            value = _value(held, batch, name, target)[mine].to(target.device)
            if value.shape[1] == stop - start and target.shape[1] == len(span):
                target[places, first - span.start : last - span.start] = value[
                    :, first - start : last - start
                ]
            else:  # one value a row
                target[places] = value


def _replay_keys(held: HeldBlock, batches: Sequence[pa.RecordBatch]) -> None:
    """Make an index anew, of the keys that stay and those that batches have, and bring their rows along."""
    mine = [np.flatnonzero(held.holds(ids_of(batch))) for batch in batches]
    if not sum(map(len, mine)):
        return
    rows, keys = held.rows_and_ids()
    assert isinstance(rows, Tensor)
    replaced = np.concatenate([ids_of(batch)[own] for batch, own in zip(batches, mine, strict=True)])
    kept = rows[torch.from_numpy(~np.isin(keys, replaced))]
    targets, born = held.values(), [number for number, batch in enumerate(batches) if batch.num_columns > 1]
    merged = {
        name: torch.cat(
            [
                target[kept].cpu(),
                *(_value(held, batches[number], name, target)[mine[number]] for number in born),
            ]
        )
        for name, target in targets.items()
    }
    source = held.index.load({name: merged[name] for name in held.table.row_state})
    held.table.forget_loaded_rows()
    taken = (source >= 0).nonzero().flatten()
    for name in targets.keys() - set(held.table.row_state):
        targets[name][taken] = merged[name][source[taken]].to(targets[name].device)


def _value(held: HeldBlock, batch: pa.RecordBatch, name: str, target: Tensor) -> Tensor:
    if name not in batch.schema.names:
        raise sw.InvalidInputError(
            f"the increment of table {held.path!r} has {batch.schema.names[1:]}, and the model {name!r}: replay it on "
            "a model with the same optimizer"
        )
    return values_of(batch, name, target.dtype)
