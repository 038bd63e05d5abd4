"""Cuts of a table's columns, for every type that cuts them."""

from __future__ import annotations

from itertools import pairwise

from shardwright.planning.layouts.layout import ColumnRange
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec

# TorchRec's tutorials cut at 32 columns (MIN_CW_DIM until 0.8; 128 since): the narrowest block whose rows
# still fill a warp of FBGEMM's kernel.
MIN_COLUMNS = 32

# FBGEMM reads rows in vectors of 4 elements.
_VECTOR = 4

# Blocks of more cuts than these are on no machine, and would take longer to list than to plan.
_MOST_BLOCKS = 1024


def column_blocks(
    table: TableSpec, constraints: ParameterConstraints, *, type_name: str
) -> list[list[ColumnRange]]:
    """The columns of the blocks of every cut, fewest blocks first.

    Blocks are at least ``min_partition`` columns wide (32 by default). A table too narrow to be cut is offered as one
    block (as TorchRec does) only if the type is asked for by name: it would be another type that cuts no columns.
    """
    cuts = column_cuts(table.embedding_dim, constraints.min_partition or MIN_COLUMNS)
    if not cuts and type_name in (constraints.sharding_types or ()):
        cuts = [[0, table.embedding_dim]]
    return [[table.columns(start, stop) for start, stop in pairwise(bounds)] for bounds in cuts]


def column_cuts(dim: int, min_columns: int) -> list[list[int]]:
    """The bounds of the blocks of every cut of ``dim`` columns into two or more, fewest blocks first.

    Args:
        dim: columns of the table.
        min_columns: the fewest columns of a block.

    Returns:
        Rising bounds from 0 to ``dim``, for each cut; none where ``dim`` is too small for two blocks.
    """
    most = min(dim // min_columns, _MOST_BLOCKS)
    equal = [count for count in range(2, most + 1) if dim % (count * _VECTOR) == 0]
    if equal:
        return [list(range(0, dim + 1, dim // count)) for count in equal]
    for count in range(most, 1, -1):
        bounds = _uneven_bounds(dim, count)
        if min(stop - start for start, stop in pairwise(bounds)) >= min_columns:
            return [bounds]
    return []


def _uneven_bounds(dim: int, count: int) -> list[int]:
    """Bounds of ``count`` blocks of whole vectors, as equal as can be; the last also takes what is over."""
    vectors = dim // _VECTOR
    return [vectors * block // count * _VECTOR for block in range(count)] + [dim]
