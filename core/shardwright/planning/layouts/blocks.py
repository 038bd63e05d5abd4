"""Blocks: a part of a table's rows times a range of its columns, one by one or many in few words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, cast, final, overload

import attrs
import numpy as np
import numpy.typing as npt
from attrs import frozen

from shardwright.arguments import NonNegativeInt, PositiveInt, brief, typed
from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.dataflows import Dataflow
from shardwright.planning.layouts.row_maps import RowMap, RowPart

Ints: TypeAlias = npt.NDArray[np.int64]

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
        if self.rank is not None and self.host_group is not None:
            raise InvalidInputError(
                f"a block has rank {self.rank} and host_group {self.host_group}; with a rank its host is given, "
                "leave host_group out"
            )
        if self.local_rank is not None and self.host_group is None:
            raise InvalidInputError(
                f"a block has local_rank {self.local_rank} and no host_group; a rank inside a host needs one"
            )

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
    rank: int | None = None
    host_group: int | None = None
    local_rank: int | None = None
    dataflow: Dataflow | None = None

    def __attrs_post_init__(self) -> None:
        needed = self.first_part + (1 if self.is_copied else self.count)
        if needed > self.row_map.num_parts:
            raise InvalidInputError(
                f"a run of blocks needs {needed} row parts, its row map has {self.row_map.num_parts}"
            )
        self.block(0)

    def block(self, index: int) -> Block:
        """One of the blocks."""
        part = self.first_part + (0 if self.is_copied else index)
        return Block(
            rows=RowPart(self.row_map, part),
            columns=self.columns,
            rank=None if self.rank is None else self.rank + index,
            host_group=self.host_group,
            local_rank=None if self.local_rank is None else self.local_rank + index,
            dataflow=self.dataflow,
        )

    def sizes(self) -> Iterator[tuple[int, int, int]]:
        """Runs of blocks with equally many rows: ``(index of the first, rows of each, how many)``."""
        if self.is_copied:
            yield 0, self.row_map.num_rows_of(self.first_part), self.count
            return
        start, stop, part = self.first_part, self.first_part + self.count, 0
        for rows, count in self.row_map.part_sizes():
            low, high = max(start, part), min(stop, part + count)
            if low < high:
                yield low - start, rows, high - low
            part += count


class _LazyBlocks(Sequence[Block]):
    """Blocks that are made when they are looked at, and equal any sequence of the same blocks."""

    def __eq__(self, other: object) -> bool:
        if isinstance(self, BlockRuns) and isinstance(other, BlockRuns) and self.runs == other.runs:
            return True  # without making a block; other runs may be the same blocks
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))  # ranks compare what they shard by it, however it was made

    __hash__ = None  # type: ignore[assignment]  # as a list

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        if isinstance(index, slice):
            return tuple(self._block(position) for position in range(len(self))[index])
        return self._block(range(len(self))[index])

    @abstractmethod
    def _block(self, index: int) -> Block:
        """The block at a position from 0."""


@final
@frozen(eq=False, repr=False)
class BlockRuns(_LazyBlocks):
    """The blocks of runs, one run after the other."""

    runs: tuple[BlockRun, ...]

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    def __iter__(self) -> Iterator[Block]:
        return (run.block(index) for run in self.runs for index in range(run.count))

    def _block(self, index: int) -> Block:
        for run in self.runs:
            if index < run.count:
                return run.block(index)
            index -= run.count
        raise IndexError(index)


@final
@frozen(eq=False, repr=False)
class PlacedBlocks(_LazyBlocks):
    """Blocks with the rank that each was given."""

    blocks: Sequence[Block]
    ranks: Sequence[int]

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Block]:
        return (
            Block(block.rows, block.columns, rank, dataflow=block.dataflow)
            for block, rank in zip(self.blocks, self.ranks, strict=True)
        )

    def _block(self, index: int) -> Block:
        block = self.blocks[index]
        return Block(block.rows, block.columns, self.ranks[index], dataflow=block.dataflow)


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
    def of(cls, blocks: Sequence[Block]) -> BlockColumns:
        """The columns of any sequence of blocks; runs are not taken apart."""
        if isinstance(blocks, PlacedBlocks):
            return attrs.evolve(cls.of(blocks.blocks), rank=np.asarray(blocks.ranks, dtype=np.int64))
        if isinstance(blocks, BlockRuns):
            return cls._joined([cls._of_run(run) for run in blocks.runs])
        return cls._of_objects(blocks)

    @classmethod
    def _of_run(cls, run: BlockRun) -> BlockColumns:
        count = run.count
        steps, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
        return cls(
            part=run.first_part + (zeros if run.is_copied else steps),
            start=zeros + run.columns.start,
            stop=zeros + run.columns.stop,
            rank=zeros + UNPLACED if run.rank is None else run.rank + steps,
            dataflow=zeros,
            dataflows=(run.dataflow,),
        )

    @classmethod
    def _of_objects(cls, blocks: Sequence[Block]) -> BlockColumns:
        place: dict[Dataflow | None, int] = {}
        rows = [
            (
                block.rows.index,
                block.columns.start,
                block.columns.stop,
                UNPLACED if block.rank is None else block.rank,
                place.setdefault(block.dataflow, len(place)),
            )
            for block in blocks
        ]
        part, start, stop, rank, dataflow = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
        return cls(part, start, stop, rank, dataflow, tuple(place))

    @classmethod
    def _joined(cls, pieces: Sequence[BlockColumns]) -> BlockColumns:
        if len(pieces) == 1:
            return pieces[0]
        place: dict[Dataflow | None, int] = {}
        own = [
            np.array([place.setdefault(dataflow, len(place)) for dataflow in piece.dataflows])
            for piece in pieces
        ]
        return cls(
            part=np.concatenate([piece.part for piece in pieces]),
            start=np.concatenate([piece.start for piece in pieces]),
            stop=np.concatenate([piece.stop for piece in pieces]),
            rank=np.concatenate([piece.rank for piece in pieces]),
            dataflow=np.concatenate([new[piece.dataflow] for new, piece in zip(own, pieces, strict=True)]),
            dataflows=tuple(place),
        )

    def __len__(self) -> int:
        return len(self.part)


def as_blocks(values: Iterable[Block | BlockRun]) -> Sequence[Block]:
    """Blocks as they are; runs of them as lazy blocks."""
    if isinstance(values, _LazyBlocks):
        return values
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"the blocks of a layout must be a list of Blocks, got {brief(values)}")
    given = tuple(values)
    for index, block in enumerate(given):
        if not isinstance(block, Block | BlockRun):
            raise InvalidInputError(f"blocks[{index}] of a layout must be a Block, got {brief(block)}")
    if given and all(isinstance(item, BlockRun) for item in given):
        return BlockRuns(cast("tuple[BlockRun, ...]", given))
    return cast("tuple[Block, ...]", given)
