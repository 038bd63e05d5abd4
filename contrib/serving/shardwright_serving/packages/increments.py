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

from shardwright import DataType, UnsupportedError
from shardwright_serving.packages.manifest import Manifest, Place
from shardwright_serving.packages.patches import Bytes, Ints, write_patch
from shardwright_serving.rows.quantized_rows import quantize_rows
from shardwright_serving.rows.torch_rows import torch_rows

__all__ = ["add_increment"]

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
        dtype = _DTYPES[str(batch.column("weight").type.value_type)]
        rows = torch_rows(
            quantize_rows(increments.values_of(batch, "weight", dtype), DataType(place.data_type))
        )
        yield _starts(place, increments.ids_of(batch), rows.shape[1]), rows.contiguous().numpy()


def _starts(place: Place, ids: Ints, row_bytes: int) -> Ints:
    return np.asarray(place.start + ids * row_bytes)
