"""Increments of training, laid beside a package for those who serve it.

Legend: N rows of a record batch, D columns of a table.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright import DataType, InvalidInputError, UnsupportedError
from shardwright_serving.packages.manifest import Manifest
from shardwright_serving.packages.patches import Bytes, Ints, write_patch
from shardwright_serving.rows.quantized_rows import quantize_rows
from shardwright_serving.rows.torch_rows import torch_rows

_DTYPES = {"float": torch.float32, "halffloat": torch.float16, "int16": torch.bfloat16}
"""Type of an increment's numbers in Arrow's words -> that of the model's weights."""


def add_increment(package: str | os.PathLike[str], batches: Iterable[Any]) -> Path:
    """Lay the rows of an increment beside a package, for those who serve it now and those who load it later.

    Rows are quantized as those of the package, so that they are, bit for bit, those of a package that is exported now.
    Weights outside of tables stay those of the package.

    Args:
        package: folder of the package, written when the increment's base was saved, or with all increments since.
        batches: record batches of all ranks of one increment of ``shardwright_delta``, of rows with all their columns.

    Returns:
        The file that was written.

    Raises:
        PackageError: there is no package.
        UnsupportedError: a table is none of the package's, its rows are found by keys, or its columns are cut.
        InvalidInputError: a table has rows that the package's has not, or numbers of another type than weights.
    """
    folder = Path(package).resolve()
    manifest = Manifest.read(folder)
    return write_patch(folder, _rows_of(manifest, list(batches)))


def _rows_of(manifest: Manifest, batches: Iterable[Any]) -> Iterator[tuple[Ints, Bytes]]:
    """Places and bytes of the rows of each batch."""
    increments: Any = importlib.import_module("shardwright_delta.batches")  # brings pyarrow
    for batch in batches:
        origin = increments.origin_of(batch)
        place = manifest.places.get(origin.table)
        if place is None:
            raise UnsupportedError(
                f"the increment has rows of table {origin.table!r}; packages take those of their tables whose ids are "
                f"rows, {', '.join(manifest.places) or 'of which this one has none'}"
            )
        if origin.columns != (0, place.columns):
            raise UnsupportedError(
                f"the increment has columns {list(origin.columns)} of the {place.columns} of table {origin.table!r}; "
                "packages take whole rows: replay it on a model whose plan cuts no columns, and take its changes"
            )
        ids = increments.ids_of(batch)
        wrong = ids[(ids < 0) | (ids >= place.rows)]
        if len(wrong):  # what lies there in the file is another table
            raise InvalidInputError(
                f"the increment has row {wrong[0]} of table {origin.table!r}, which has {place.rows} rows in the "
                "package",
                subject=origin.table,
                asked=int(wrong[0]),
            )
        values = increments.values_of(batch, "weight", _dtype_of(batch, origin.table))
        rows = torch_rows(quantize_rows(values, DataType(place.data_type)))
        yield np.asarray(place.start + ids * rows.shape[1]), rows.contiguous().numpy()


def _dtype_of(batch: Any, table: str) -> torch.dtype:
    name = str(batch.column("weight").type.value_type)
    if name not in _DTYPES:
        raise InvalidInputError(
            f"the increment has weights of table {table!r} as {name}; weights are {', '.join(_DTYPES)}",
            subject=table,
            asked=name,
        )
    return _DTYPES[name]
