"""Blocks: a part of a table's rows times a range of its columns, one by one or many in few words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import eq
from typing import final, overload

import numpy as np
from attrs import frozen

from shardwright.arguments import NonNegativeInt, PositiveInt, brief, typed
from shardwright.errors import InvalidInputError
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.dataflows import Dataflow
from shardwright.planning.layouts.row_maps import RowMap, RowPart

UNPLACED = -1
"""The rank, in :class:`BlockColumns`, of a block that has none."""


@frozen(field_transformer=typed)
class ColumnRange:
    """The columns ``start <= c < stop`` of a table."""

    start: NonNegativeInt
    stop: int

    def __attrs_post_init__(self) -> None:
        if self.stop <= self.start:
            raise InvalidInputError(
                f"columns [{self.start}, {self.stop}) are empty; a block needs at least one column"
            )

    def __len__(self) -> int:
        return self.stop - self.start


@frozen(field_transformer=typed)
class Block:
    """A part of the rows times a range of columns.

    Args:
        rows: the part of a row map.
        columns: the range of columns.
        rank: the rank it must live on; ``None`` leaves the choice to the partitioner.
        host_group: a label. The blocks of a layout with one label go to ranks of one host, whichever; those of
            different labels may share a host or not. ``None``: any rank of any host.
        local_rank: rank inside that host, with a ``host_group`` only; ``None``: any of them.
        dataflow: path of ids and results of these rows between ranks; ``None``: the layout's.

    Raises:
        InvalidInputError: a number is negative, a block has both a rank and a ``host_group``, or a ``local_rank``
            without one.

    Example:
        >>> import shardwright as sw
        >>> first, second = sw.RowsRange(10, parts=2)
        >>> block = sw.Block(second, sw.ColumnRange(0, 8), rank=1)
        >>> block.rows.num_rows, block.rank
        (5, 1)
    """

    rows: RowPart
    columns: ColumnRange
    rank: NonNegativeInt | None = None
    host_group: NonNegativeInt | None = None
    local_rank: NonNegativeInt | None = None
    dataflow: Dataflow | None = None

    def __attrs_post_init__(self) -> None:
        _check_place(self)

    @property
    def num_rows(self) -> int:
        """Rows held; 0 where there are fewer rows than parts."""
        return self.rows.num_rows

    @property
    def num_columns(self) -> int:
        """Columns held."""
        return len(self.columns)


@frozen(field_transformer=typed)
class BlockRun:
    """Blocks of neighbouring row parts that have one range of columns: many blocks in few words.

    Block ``i`` has the row part ``first_part + i``, and the rank ``rank + i`` or the rank ``local_rank + i`` inside
    its host, where these are given. A run of copies has one part, and ``is_copied``.

    Args:
        row_map: the map of the rows.
        columns: the range of columns.
        count: number of blocks.
        first_part: the row part of the first.
        is_copied: all have the first one's row part.
        rank: the rank of the first, or ``None``; see :class:`Block`.
        host_group: host group of all blocks; see :class:`Block`.
        local_rank: the rank inside the host of the first, or ``None``.
        dataflow: dataflow of all blocks; see :class:`Block`.

    Raises:
        InvalidInputError: the row map has fewer parts; what a :class:`Block` raises.

    Example:
        >>> import shardwright as sw
        >>> rows = sw.RowsRange(10, parts=4)
        >>> layout = sw.Layout([sw.BlockRun(rows, sw.ColumnRange(0, 8), count=4, rank=0)])
    """

    row_map: RowMap
    columns: ColumnRange
    count: PositiveInt = 1
    first_part: NonNegativeInt = 0
    is_copied: bool = False
    rank: NonNegativeInt | None = None
    host_group: NonNegativeInt | None = None
    local_rank: NonNegativeInt | None = None
    dataflow: Dataflow | None = None

    def __attrs_post_init__(self) -> None:
        _check_place(self)
        needed = self.first_part + (1 if self.is_copied else self.count)
        if needed > self.row_map.num_parts:
            raise InvalidInputError(
                f"a run of blocks needs {needed} row parts, its row map has {self.row_map.num_parts}"
            )

    def block(self, index: int, rank: int | None = None) -> Block:
        """One of the blocks, on its own rank if it was given one."""
        rows = RowPart(self.row_map, self.first_part + (0 if self.is_copied else index))
        if rank is not None:
            return Block(rows, self.columns, rank, dataflow=self.dataflow)
        return Block(
            rows=rows,
            columns=self.columns,
            rank=None if self.rank is None else self.rank + index,
            host_group=self.host_group,
            local_rank=None if self.local_rank is None else self.local_rank + index,
            dataflow=self.dataflow,
        )

    def sizes(self) -> Iterator[tuple[int, int, int]]:
        """Runs of blocks with equally many rows: ``(index of the first, rows of each, how many)``."""
        if self.is_copied or self.count == 1:  # without asking about the parts before
            yield 0, self.row_map.num_rows_of(self.first_part), self.count
            return
        start, stop, part = self.first_part, self.first_part + self.count, 0
        for rows, count in self.row_map.part_sizes():
            low, high = max(start, part), min(stop, part + count)
            if low < high:
                yield low - start, rows, high - low
            part += count


def _check_place(item: Block | BlockRun) -> None:
    if item.rank is not None and item.host_group is not None:
        raise InvalidInputError(
            f"a block has rank {item.rank} and host_group {item.host_group}; with a rank its host is given, "
            "leave host_group out"
        )
    if item.local_rank is not None and item.host_group is None:
        raise InvalidInputError(
            f"a block has local_rank {item.local_rank} and no host_group; a rank inside a host needs one"
        )


@final
@frozen(eq=False, repr=False)
class Blocks(Sequence[Block]):
    """The blocks of runs, one run after the other: they are made when they are looked at, and equal any such sequence.

    Args:
        runs: the runs.
        ranks: the rank that each block was given, instead of what its run says; ``None``: none was.
    """

    runs: tuple[BlockRun, ...]
    ranks: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    def __iter__(self) -> Iterator[Block]:
        ranks = repeat(None) if self.ranks is None else iter(self.ranks)
        return (run.block(index, next(ranks)) for run in self.runs for index in range(run.count))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Blocks) and (self.runs, self.ranks) == (other.runs, other.ranks):
            return True  # without making a block; other runs may be the same blocks
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return repr(tuple(self))  # ranks compare what they shard by it, however it was made

    __hash__ = None  # type: ignore[assignment]  # as a list

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return tuple(self[place] for place in places)
        rank, place = None if self.ranks is None else self.ranks[places], places
        for run in self.runs:
            if place < run.count:
                break
            place -= run.count
        return run.block(place, rank)

    @property
    def ranked_runs(self) -> tuple[BlockRun, ...]:
        """Runs with all ranks in them: one for each block, where these were given ranks."""
        return self.runs if self.ranks is None else as_blocks(tuple(self)).runs

    def only(self, kept: Sequence[bool]) -> Blocks:
        """The blocks of some of the runs."""
        counts = [run.count for run in self.runs]
        ranks = self.ranks and tuple(compress(self.ranks, np.repeat(kept, counts)))
        return Blocks(tuple(compress(self.runs, kept)), ranks)


@frozen(eq=False)
class BlockColumns:
    """Blocks as columns of numbers, one element a block: what there may be millions of is not made into objects.

    Args:
        part: the row part of each, ``[N]``.
        start: its first column, ``[N]``.
        stop: the column after its last, ``[N]``.
        rank: its rank, or :data:`UNPLACED`, ``[N]``.
        dataflow: the place of its own dataflow in ``dataflows``, ``[N]``.
        dataflows: the dataflows that blocks name, and ``None`` for those that name none.
    """

    part: Ints
    start: Ints
    stop: Ints
    rank: Ints
    dataflow: Ints
    dataflows: tuple[Dataflow | None, ...]

    @classmethod
    def of(cls, blocks: Blocks) -> BlockColumns:
        """The columns of blocks; runs are not taken apart."""
        place: dict[Dataflow | None, int] = {}
        # Of each run: what its blocks have in common, and by how much part and rank grow from one block to the next.
        runs = [
            (
                run.first_part,
                0 if run.is_copied else 1,
                UNPLACED if run.rank is None else run.rank,
                0 if run.rank is None else 1,
                run.columns.start,
                run.columns.stop,
                place.setdefault(run.dataflow, len(place)),
            )
            for run in blocks.runs
        ]
        count = np.array([run.count for run in blocks.runs])
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        part, next_part, rank, next_rank, start, stop, dataflow = np.repeat(
            np.array(runs), count, axis=0
        ).T.copy()
        own = rank + next_rank * step if blocks.ranks is None else np.array(blocks.ranks, dtype=np.int64)
        return cls(part + next_part * step, start, stop, own, dataflow, tuple(place))

    def __len__(self) -> int:
        return len(self.part)


def as_blocks(values: Iterable[Block | BlockRun]) -> Blocks:
    """Blocks and runs of blocks as they stand, one after the other."""
    if isinstance(values, Blocks):
        return values
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"the blocks of a layout must be a list of Blocks, got {brief(values)}")
    runs = []
    for index, item in enumerate(values):
        if not isinstance(item, Block | BlockRun):
            raise InvalidInputError(f"blocks[{index}] of a layout must be a Block, got {brief(item)}")
        runs.append(item if isinstance(item, BlockRun) else _run_of(item))
    return Blocks(tuple(runs))


def _run_of(block: Block) -> BlockRun:
    return BlockRun(
        row_map=block.rows.row_map,
        columns=block.columns,
        first_part=block.rows.index,
        rank=block.rank,
        host_group=block.host_group,
        local_rank=block.local_rank,
        dataflow=block.dataflow,
    )
