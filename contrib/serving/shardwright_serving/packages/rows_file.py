"""The rows of all tables of a package, one table after the other in one file, in the layouts of torch's own operators.

Programs map the file and take it as one input, so that it is stored once, whatever forms there are, and processes
share its pages.

Legend: R rows of a table, D columns, F features, B samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import frozen
from torch import Tensor

from shardwright import CheckpointError, DataType, InvalidInputError
from shardwright_serving.rows.quantized_rows import QuantizedRows, quantize_rows
from shardwright_serving.rows.torch_rows import torch_row_bytes, torch_rows

Progress: TypeAlias = Callable[[int, int], None]
"""Function called with the bytes written so far, and with those of all rows."""

ALIGNMENT = 64
"""Bytes to whose multiples a table's first row is moved: a cache line, and the width of the widest vector register."""

BLOCK_BYTES = 1 << 26
"""Bytes of float32 rows that are quantized at once: 64 MiB, large beside a read, small beside a model."""

Blocks: TypeAlias = Iterable[Tensor | QuantizedRows]
"""The rows of a table in order, some at a time: floats ``[rows, D]``, or rows that are quantized already."""


@frozen
class TableRows:
    """A table in the file.

    Args:
        name: name of the table.
        data_type: precision of its rows.
        num_embeddings: ``R``.
        embedding_dim: ``D``.
        start: first of its bytes in the file.
    """

    name: str
    data_type: DataType
    num_embeddings: int
    embedding_dim: int
    start: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return torch_row_bytes(self.data_type, self.embedding_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_embeddings * self.row_bytes

    @property
    def rows_at_once(self) -> int:
        """Number of rows of a block."""
        return max(1, BLOCK_BYTES // (4 * self.embedding_dim))

    def of(self, file: Tensor) -> Tensor:
        """Select the table's rows in the mapped file: ``[R, bytes]`` uint8."""
        rows = file.narrow(0, self.start, self.num_bytes)
        return rows.view(self.num_embeddings, self.row_bytes)


def laid_out(tables: Sequence[TableRows]) -> list[TableRows]:
    """Place tables in a file.

    Args:
        tables: tables in the order of the file.
    """
    placed, end = [], 0
    for table in tables:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        own = TableRows(table.name, table.data_type, table.num_embeddings, table.embedding_dim, start)
        placed.append(own)
        end = start + own.num_bytes
    return placed


def write_rows(
    path: Path,
    tables: Sequence[TableRows],
    blocks_of: Callable[[int], Blocks],
    progress: Progress | None = None,
) -> str:
    """Write the file, block by block.

    Args:
        path: the file.
        tables: tables with their places.
        blocks_of: function from the position of a table to its rows.
        progress: function called after each block.

    Returns:
        Checksum of the rows, hexadecimal.

    Raises:
        CheckpointError: a table's blocks have another number of rows.
    """
    checksum, total = hashlib.sha256(), sum(table.num_bytes for table in tables)
    done = 0
    with path.open("wb") as file:
        for position, table in enumerate(tables):
            file.seek(table.start)  # what is skipped is zeros
            for data in _packed_blocks(table, blocks_of(position)):
                file.write(data)
                checksum.update(data)
                done += len(data)
                if progress is not None:
                    progress(done, total)
    return checksum.hexdigest()


def _packed_blocks(table: TableRows, blocks: Blocks) -> Iterator[memoryview]:
    """The bytes of a table's rows, as the file has them."""
    count = 0
    for block in blocks:
        rows = block if isinstance(block, QuantizedRows) else _quantized(table, block, count)
        packed = torch_rows(rows).cpu().contiguous()
        count += len(packed)
        yield memoryview(packed.view(-1).numpy())  # type: ignore[arg-type]
    if count != table.num_embeddings:
        raise CheckpointError(f"table {table.name!r} has {table.num_embeddings} rows; {count} were found")


def _quantized(table: TableRows, block: Tensor, first: int) -> QuantizedRows:
    try:
        return quantize_rows(block, table.data_type)
    except InvalidInputError as error:
        raise InvalidInputError(f"table {table.name!r}, counted from row {first} on: {error}") from None
