"""Quantization of the collections in a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor, nn

from shardwright import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
    InvalidInputError,
    TableCollection,
    UnknownNameError,
)
from shardwright_serving.rows.quantized_rows import check_served, quantize_rows
from shardwright_serving.tables.collections import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from shardwright_serving.tables.known_ids import KnownIds, ids_of, with_zero_row
from shardwright_serving.tables.quantized_collection import QuantizedCollection


def quantize_embeddings(
    model: nn.Module,
    dtype: DataType | str = DataType.INT8,
    *,
    per_table: Mapping[str, DataType | str] | None = None,
    output_dtype: DataType | str | torch.dtype = DataType.FP32,
    inplace: bool = False,
    ids: Mapping[str, Tensor | Sequence[int]] | None = None,
) -> nn.Module:
    """Put quantized collections in the place of the collections of tables in a model.

    Args:
        model: a model, or a collection.
        dtype: precision of the tables: INT8, INT4, INT2, FP8 or FP16.
        per_table: name of a table -> another precision.
        output_dtype: type of the outputs: FP32, FP16 or BF16.
        inplace: change this model; else a copy, of which tables are never copied as float.
        ids: name of a table -> the ids that keep their rows, ``[K]`` integers, each once: others give zeros, and take
            no memory.

    Returns:
        The model; the quantized collection, if ``model`` is a collection.

    Raises:
        InvalidInputError: a value is beyond what the precision holds, tables are on ``meta``, there are none, or an
            id is no row of its table or is there twice.
        UnknownNameError: ``per_table`` names a table that is in no collection.
        UnsupportedError: tables cannot be quantized to a type that was asked for.

    Example:
        >>> import torch, shardwright as sw, shardwright_serving
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=100, embedding_dim=4, name="item", feature_names=["item"]
        ... )
        >>> model = torch.nn.Sequential(sw.EmbeddingBagCollection([table]))
        >>> shardwright_serving.quantize_embeddings(model, "INT4")[0].quantized_rows("item").values.max() <= 15
        tensor(True)
    """
    # With all paths of a collection that a model uses twice; it is quantized once.
    found = {
        path: one
        for path, one in model.named_modules(remove_duplicate=False)
        if isinstance(one, EmbeddingBagCollection | EmbeddingCollection)
    }
    if not found:
        raise InvalidInputError(
            f"this {type(model).__name__} has no collection of tables to quantize: give a model with an "
            "EmbeddingBagCollection or EmbeddingCollection; of a sharded model, its unshard()"
        )
    names = [table.name for one in found.values() for table in one.tables]
    for argument, given in (("per_table", per_table or {}), ("ids", ids or {})):
        for name in given:
            if name not in names:
                raise UnknownNameError(
                    f"{argument} names {name!r}, a table of no collection; there are {', '.join(names)}"
                )
    made = {
        one: _quantized(one, dtype, per_table, output_dtype, ids or {})
        for one in dict.fromkeys(found.values())
    }
    if "" in found:
        return made[found[""]]
    # A copy takes the quantized collections for its own, so that float tables are not copied first.
    memo = {} if inplace else {id(one): own for one, own in made.items()}
    result = model if inplace else copy.deepcopy(model, memo)
    for path, one in found.items():
        result.set_submodule(path, made[one])
    return result


def _quantized(
    collection: TableCollection,
    dtype: DataType | str,
    per_table: Mapping[str, DataType | str] | None,
    output_dtype: DataType | str | torch.dtype,
    ids: Mapping[str, Tensor | Sequence[int]],
) -> nn.Module:
    """A quantized collection, whose tables in ``ids`` have rows of these ids alone."""
    whole = quantize_collection(collection, dtype, per_table=per_table, output_dtype=output_dtype)
    kept = {table.name: ids_of(table.name, ids) for table in whole.tables if table.name in ids}
    if not kept:
        return whole
    for table in whole.tables:
        own = kept.get(table.name)
        if own is not None and len(own) and not 0 <= int(own.min()) <= int(own.max()) < table.num_embeddings:
            raise InvalidInputError(
                f"ids of table {table.name!r} are from {int(own.min())} to {int(own.max())}; its rows are 0 to "
                f"{table.num_embeddings - 1}"
            )
    tables = [
        evolve(table, num_embeddings=len(kept[table.name]) + 1) if table.name in kept else table
        for table in whole.tables
    ]
    made = whole.of_tables(tables, "meta")
    for table in tables:
        rows = whole.quantized_rows(table.name)
        made.set_rows(table.name, with_zero_row(rows.rows(kept[table.name])) if table.name in kept else rows)
    return KnownIds(made, kept).to(whole.device)


def quantize_collection(
    collection: TableCollection,
    dtype: DataType | str = DataType.INT8,
    *,
    per_table: Mapping[str, DataType | str] | None = None,
    output_dtype: DataType | str | torch.dtype = DataType.FP32,
) -> QuantizedCollection:
    """Quantize one collection; see `quantize_embeddings`."""
    made = _quantized_like(collection, dtype, per_table or {}, output_dtype)
    if collection.device.type == "meta":
        raise InvalidInputError("tables on the device 'meta' have no weights to quantize")
    for table in made.tables:
        try:
            rows = quantize_rows(collection.table_weight(table.name), table.data_type)
        except InvalidInputError as error:
            raise InvalidInputError(f"table {table.name!r}: {error}") from None
        made.set_rows(table.name, rows)
    return made.to(collection.device).train(collection.training)


def _quantized_like(
    collection: TableCollection,
    dtype: DataType | str,
    per_table: Mapping[str, DataType | str],
    output_dtype: DataType | str | torch.dtype,
) -> QuantizedCollection:
    """A quantized collection of the same tables, on ``meta``."""
    tables = []
    for config in collection.tables:
        asked = per_table.get(config.name, dtype)
        changed = evolve(config, data_type=asked)
        check_served(changed.data_type)
        tables.append(changed)
    if isinstance(collection, EmbeddingBagCollection):
        return QuantEmbeddingBagCollection(
            tables,  # type: ignore[arg-type]  # bag configurations stay such
            collection.is_weighted(),
            "meta",
            output_dtype=output_dtype,
        )
    assert isinstance(collection, EmbeddingCollection)
    return QuantEmbeddingCollection(tables, "meta", collection.need_indices(), output_dtype=output_dtype)
