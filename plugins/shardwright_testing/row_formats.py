"""Conformance tests of row formats, which compute kernels bring: their laws."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from shardwright.contracts import RowFormat
from shardwright.contracts.row_format import FLOATS

WIDTHS = (1, 2, 3, 7, 8, 17, 64)
"""Columns of the tables that are packed."""
CUTS = ((3,), (1, 2), (2, 3, 2), (4, 4), (16, 1), (1, 15, 48))
"""Widths of blocks of columns side by side."""


class RowFormatTests:
    """The tests of a row format: give the fixture ``row_format``, an object. They run on the CPU."""

    def test_declarations_can_be_planned_with(self, row_format: RowFormat) -> None:
        """The name is a data type's of its own, and bytes grow with the columns."""
        name = row_format.name
        assert name.isidentifier(), f"{name!r} is no name"
        assert name == name.upper(), f"{name!r} is not in capitals"
        assert name not in FLOATS, f"{name} is the name of a float of torch"
        assert row_format.bits > 0, f"{name}: bits is {row_format.bits}"
        sizes = [row_format.row_bytes(columns) for columns in range(1, 300)]
        assert all(type(size) is int and size > 0 for size in sizes), (
            f"{name}: row_bytes() must be whole, above 0"
        )
        assert sizes == sorted(sizes), f"{name}: row_bytes() is less for more columns"

    @pytest.mark.parametrize("columns", WIDTHS)
    def test_packed_values_are_within_the_bound(self, row_format: RowFormat, columns: int) -> None:
        """Rows are bytes, and what they hold is near the values, which stay as they are."""
        values = drawn_values(6, columns)
        given = values.clone()
        stored = row_format.pack(values)
        shape, wanted = list(stored.shape), [6, row_format.row_bytes(columns)]
        assert (stored.dtype, shape) == (torch.uint8, wanted), (
            f"{row_format.name}: pack() of 6 x {columns} gives {stored.dtype} {shape}, not uint8 {wanted}"
        )
        assert torch.equal(values, given), f"{row_format.name}: pack() changed the values"
        held = row_format.unpack(stored, columns)
        assert (held.dtype, held.shape) == (torch.float32, values.shape), (
            f"{row_format.name}: unpack() gives {held.dtype} {list(held.shape)}"
        )
        slack = 4 * torch.finfo(torch.float32).eps * values.abs()
        excess = float(((held - values).abs() - row_format.error_bound(stored, columns) - slack).max())
        assert excess <= 0, f"{row_format.name}: a value is off by {excess} more than error_bound()"

    @pytest.mark.parametrize("columns", WIDTHS)
    def test_rows_are_packed_each_by_itself(self, row_format: RowFormat, columns: int) -> None:
        """Some rows in any order are packed as among all; no row is packed, too."""
        values = drawn_values(6, columns)
        stored = row_format.pack(values)
        for rows in (torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.int64)):
            own = row_format.pack(values[rows])
            assert torch.equal(own, stored[rows]), (
                f"{row_format.name}: rows {rows.tolist()} are packed otherwise than among all rows"
            )
            held = row_format.unpack(stored[rows], columns)
            assert torch.equal(held, row_format.unpack(stored, columns)[rows]), (
                f"{row_format.name}: rows {rows.tolist()} are unpacked otherwise than among all rows"
            )

    @pytest.mark.parametrize("widths", CUTS)
    def test_blocks_of_columns_hold_the_same_values_and_join_again(
        self, row_format: RowFormat, widths: tuple[int, ...]
    ) -> None:
        """Bit for bit, whatever the cut."""
        columns = sum(widths)
        stored = row_format.pack(drawn_values(5, columns))
        held = row_format.unpack(stored, columns)
        spans = list(pairwise([0, *accumulate(widths)]))
        blocks = [row_format.columns(stored, columns, start, stop) for start, stop in spans]
        for (start, stop), block in zip(spans, blocks, strict=True):
            own = row_format.unpack(block, stop - start)
            assert torch.equal(own, held[:, start:stop]), (
                f"{row_format.name}: columns {start} to {stop} of {columns} hold other values when they are cut out"
            )
            assert block.shape[1] == row_format.row_bytes(stop - start), (
                f"{row_format.name}: columns() of {stop - start} columns are {block.shape[1]} bytes"
            )
        assert torch.equal(row_format.join(blocks, widths), stored), (
            f"{row_format.name}: join() of {widths} columns is not what they were cut from"
        )


def drawn_values(rows: int, columns: int) -> Tensor:
    """Rows of drawn values, each of another magnitude; one of zeros, and one of equal values."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = torch.rand(rows, columns, generator=generator) - 0.5
    values *= torch.logspace(-3, 3, rows).unsqueeze(1)
    values[0], values[-1] = 0.0, 0.25
    return values
