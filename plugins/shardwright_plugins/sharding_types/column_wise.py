"""column_wise: the columns cut into blocks of their own ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import ClassVar

from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.layouts import Block, Layout
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology

# TorchRec's tutorials cut at 32 columns (MIN_CW_DIM until 0.8; 128 since): the narrowest block whose rows
# still fill a warp of FBGEMM's kernel.
MIN_COLUMNS = 32

# FBGEMM reads rows in vectors of 4 elements.
_VECTOR = 4


class ColumnWise(ShardingType):
    """The columns in blocks, each on any rank; every rank that holds one gets all ids of the table.

    There is a variant for each number of equal blocks that are at least ``min_partition`` columns wide (32 by
    default) and whole vectors of 4. Where no equal cut exists, blocks differ by one vector. A table too
    narrow to be cut is offered as one block (as TorchRec does) only if this type is asked for by name: it
    would be another table_wise.
    """

    name: ClassVar[str] = "column_wise"
    abbreviation: ClassVar[str] = "CW"
    answers_by_shape: ClassVar[bool] = True

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """One layout for each number of blocks."""
        cuts = column_cuts(table.embedding_dim, constraints.min_partition or MIN_COLUMNS)
        if not cuts and self.name in (constraints.sharding_types or ()):
            cuts = [[0, table.embedding_dim]]
        for bounds in cuts:
            yield Layout(
                [Block(table.all_rows, table.columns(start, stop)) for start, stop in pairwise(bounds)],
                variant=f"{len(bounds) - 1} blocks",
            )


def column_cuts(dim: int, min_columns: int) -> list[list[int]]:
    """The bounds of the blocks of every cut of ``dim`` columns into two or more, fewest blocks first.

    Args:
        dim: columns of the table.
        min_columns: the fewest columns of a block.

    Returns:
        Rising bounds from 0 to ``dim``, for each cut; none where ``dim`` is too small for two blocks.
    """
    most = dim // min_columns
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
