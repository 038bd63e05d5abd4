"""Rows as Arrow record batches: the ids, and a column of fixed-size lists for each value.

Legend: N rows, C columns of a value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch
from attrs import asdict, field, frozen
from torch import Tensor

import shardwright as sw
from shardwright_delta.digests import Ints

ID = "id"
"""The column of rows' ids: keys, or rows of the table."""
_ORIGIN = b"shardwright.delta"


@frozen
class Origin:
    """The place that rows come from: the metadata of a batch.

    Args:
        table: path of the table in the model.
        columns: first column of the table that the weights have, and the column after the last.
        step: number of updates done, where the optimizer counts them.
    """

    table: str
    columns: tuple[int, int] = field(converter=tuple)
    step: float | None = None


def batch_of(origin: Origin, ids: Ints, values: Mapping[str, Tensor]) -> pa.RecordBatch:
    """Make a record batch.

    Args:
        origin: the place that the rows come from.
        ids: ``[N]``.
        values: ``[N, C]`` each, in host memory, by name; none for keys that were evicted. What Arrow has no type for
            (bfloat16) is written as integers of as many bits.
    """
    columns = {ID: pa.array(ids), **{name: _column(value) for name, value in values.items()}}
    data = json.dumps(asdict(origin))
    schema = pa.schema([(name, column.type) for name, column in columns.items()], metadata={_ORIGIN: data})
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _column(value: Tensor) -> pa.Array:
    flat = value.contiguous().view(-1)
    if flat.dtype is torch.bfloat16:
        flat = flat.view(torch.int16)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.numpy()), value.shape[1])


def origin_of(batch: pa.RecordBatch) -> Origin:
    """Read where the rows of a batch come from.

    Raises:
        InvalidInputError: it is no record batch, or has lost the metadata that say so.
    """
    if _ORIGIN not in (getattr(getattr(batch, "schema", None), "metadata", None) or {}):
        raise sw.InvalidInputError(
            f"an increment has record batches with {_ORIGIN.decode()!r} in the metadata of their schema, as "
            f"Changes.take() and read_increment() give them; got {type(batch).__name__} without"
        )
    return Origin(**json.loads(batch.schema.metadata[_ORIGIN]))


def ids_of(batch: pa.RecordBatch) -> Ints:
    """Read the ids of a batch: ``[N]``."""
    return np.asarray(batch.column(ID), dtype=np.int64)


def values_of(batch: pa.RecordBatch, name: str, dtype: torch.dtype) -> Tensor:
    """Read the values of a name: ``[N, C]``, a copy.

    Args:
        batch: the batch.
        name: name of the values.
        dtype: their dtype.
    """
    column = batch.column(name)
    flat = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
    return flat.view(dtype).view(len(batch), column.type.list_size)
