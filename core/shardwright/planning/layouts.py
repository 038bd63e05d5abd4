"""Layouts: how a table is cut into blocks, and where each row of it lives.

A row map parts rows, ``ids -> (part, local row)``; a block is a part of the rows times a range of columns, on a
rank or free to go to any; a layout is the blocks of a table with the dataflow that serves them. All the engine
does follows from these. Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, final, overload

import attrs
from attrs import field, frozen

from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.row_maps import RowMap, RowPart, not_negative

if TYPE_CHECKING:
    from shardwright.planning.tables import TableSpec
    from shardwright.runtime.part import Part
    from shardwright.runtime.return_paths import ReturnPath


@frozen
class ColumnRange:
    """The columns ``start <= c < stop`` of a table."""

    start: int = field(validator=not_negative)
    stop: int = field()

    @stop.validator
    def _not_empty(self, attribute: Any, value: int) -> None:
        if value <= self.start:
            raise InvalidInputError(
                f"columns [{self.start}, {value}) are empty; a block needs at least one column"
            )

    def __len__(self) -> int:
        return self.stop - self.start


class Dataflow(ABC):
    """How ids reach the blocks of a layout and how partial results come home.

    A descriptor: a frozen attrs class of plain data, hashable, that imports its runtime only when asked. Most
    dataflows are :class:`Routed`; others bring a :class:`shardwright.runtime.part.Part` of their own.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    """Whether every rank has a copy of the whole table and looks up its own batch there."""
    sums_inside_host: ClassVar[bool] = False
    """Whether partial sums are added inside a host before they cross to others."""

    @abstractmethod
    def part(self) -> type[Part]:
        """What runs all tables of a module that ask for such a dataflow (imports torch)."""


class Routed(Dataflow):
    """Ids are sent to the ranks that own their rows; what differs is the way results take home."""

    def part(self) -> type[Part]:  # noqa: D102
        from shardwright.runtime.routed import RoutedTables

        return RoutedTables

    @abstractmethod
    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:
        """The way results take home, and gradients back; tables with one way share its collectives.

        Args:
            is_pooled: one result per bag, a partial sum where rows are cut; else one per id.
        """


@frozen
class Exchange(Routed):
    """Pooled partial sums are sent straight to the rank that asked, and added there."""

    name: ClassVar[str] = "exchange"

    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:  # noqa: D102
        from shardwright.runtime.return_paths import DirectReturn

        return DirectReturn


@frozen
class Hierarchical(Routed):
    """Partial sums are added inside the host that holds a table's row parts, then cross to other hosts.

    The row parts of a column block must be on ranks of one host. Sequence results, which are not added, go straight.
    """

    name: ClassVar[str] = "hierarchical"
    sums_inside_host: ClassVar[bool] = True

    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:  # noqa: D102
        from shardwright.runtime.host_return import HostReturn
        from shardwright.runtime.return_paths import DirectReturn

        return HostReturn if is_pooled else DirectReturn


@frozen
class Replicate(Dataflow):
    """Every rank has a copy and looks up its own batch; updates are synchronised in the backward pass.

    A layout lists the copies: one block of all rows and columns for each rank.
    """

    name: ClassVar[str] = "replicate"
    is_replicated: ClassVar[bool] = True

    def part(self) -> type[Part]:  # noqa: D102
        from shardwright.runtime.replicated import ReplicatedTables

        return ReplicatedTables


@frozen
class Block:
    """A part of the rows times a range of columns.

    Args:
        rows: the part of a row map.
        columns: the range of columns.
        rank: the rank it must live on; ``None`` leaves the choice to the partitioner.
        host_group: a label. The blocks of a layout with one label go to ranks of one host, whichever; those of
            different labels may share a host or not. ``None``: any rank of any host.
        local_rank: with a ``host_group``, the rank inside that host that it must have; ``None``: any of them.
        dataflow: how ids and results of these rows travel; ``None``: as the layout says.

    Raises:
        InvalidInputError: a number is negative, a block has both a rank and a ``host_group``, or a ``local_rank``
            without one.
    """

    rows: RowPart
    columns: ColumnRange
    rank: int | None = field(default=None, validator=attrs.validators.optional(not_negative))
    host_group: int | None = field(default=None, validator=attrs.validators.optional(not_negative))
    local_rank: int | None = field(default=None, validator=attrs.validators.optional(not_negative))
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


@frozen
class BlockRun:
    """Blocks of neighbouring row parts that have one range of columns: many blocks in few words.

    Block ``i`` has the row part ``first_part + i``, and the rank ``rank + i`` or the rank ``local_rank + i`` inside
    its host, where these are given. A run of copies has one part, and ``is_copied``.

    Args:
        row_map: the map of the rows.
        columns: the range of columns.
        count: how many blocks.
        first_part: the row part of the first.
        is_copied: all have the first one's row part.
        rank: the rank of the first, or ``None``; see :class:`Block`.
        host_group: of all of them; see :class:`Block`.
        local_rank: the rank inside the host of the first, or ``None``.
        dataflow: of all of them; see :class:`Block`.

    Raises:
        InvalidInputError: the row map has fewer parts; what a :class:`Block` raises.
    """

    row_map: RowMap
    columns: ColumnRange
    count: int = field(default=1, validator=attrs.validators.ge(1))
    first_part: int = field(default=0, validator=not_negative)
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
        """Its blocks as runs of equally many rows: ``(index of the first, rows of each, how many)``."""
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


def _plain(instance: Any, attribute: Any, value: Mapping[str, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise InvalidInputError(f"extras must be JSON data with string keys, got the key {key!r}")


def _as_blocks(values: Iterable[Block | BlockRun]) -> Sequence[Block]:
    """Blocks as they are; runs of them as lazy blocks."""
    if isinstance(values, _LazyBlocks):
        return values
    given = tuple(values)
    if given and all(isinstance(item, BlockRun) for item in given):
        return BlockRuns(cast("tuple[BlockRun, ...]", given))
    return cast("tuple[Block, ...]", given)


@frozen(hash=False)
class Layout:
    """The blocks of a table and the dataflow that serves them.

    Args:
        blocks: all of one row map; together they cover every row and column exactly once. Where the dataflow is
            replicated, each is all columns of a row part, and every rank has one. Either blocks or, where there may
            be hundreds, :class:`BlockRun` objects, of which blocks are made when they are looked at.
        dataflow: how ids and results travel, for all blocks that say nothing else.
        variant: tells layouts of one sharding type for one table apart (``"4 columns blocks"``); part of an
            option's identity.
        extras: JSON data of the plugin, kept in the plan and handed back at run time.
    """

    blocks: Sequence[Block] = field(converter=_as_blocks)
    dataflow: Dataflow = field(factory=Exchange)
    variant: str = ""
    extras: Mapping[str, Any] = field(factory=dict, validator=_plain)

    @blocks.validator
    def _some(self, attribute: Any, value: Sequence[Block]) -> None:
        if not value:
            raise InvalidInputError("a layout needs at least one block")
        if isinstance(value, PlacedBlocks):
            return
        maps = (
            [run.row_map for run in value.runs]
            if isinstance(value, BlockRuns)
            else [block.rows.row_map for block in value]
        )
        if any(row_map != maps[0] for row_map in maps):
            raise InvalidInputError("the blocks of a layout must be parts of one row map")

    @property
    def row_map(self) -> RowMap:
        """The row map of all its blocks."""
        cut = self.blocks.blocks if isinstance(self.blocks, PlacedBlocks) else self.blocks
        return cut.runs[0].row_map if isinstance(cut, BlockRuns) else cut[0].rows.row_map

    @property
    def dataflows(self) -> tuple[Dataflow, ...]:
        """The dataflows of its blocks, each once, in the order of the blocks."""
        cut = self.blocks.blocks if isinstance(self.blocks, PlacedBlocks) else self.blocks
        items = cut.runs if isinstance(cut, BlockRuns) else cut
        return tuple(dict.fromkeys(item.dataflow or self.dataflow for item in items))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has a copy of each block."""
        return all(dataflow.is_replicated for dataflow in self.dataflows)

    def dataflow_of(self, block: Block) -> Dataflow:
        """How ids and results of a block travel."""
        return block.dataflow or self.dataflow

    def served_by(self, dataflows: Iterable[Dataflow]) -> Layout:
        """The blocks of some dataflows alone; they no longer cover the table if there are others.

        Raises:
            InvalidInputError: no block has one of these.
        """
        chosen = set(dataflows)
        if chosen.issuperset(self.dataflows):
            return self
        kept = [index for index, block in enumerate(self.blocks) if self.dataflow_of(block) in chosen]
        if not isinstance(self.blocks, PlacedBlocks):
            return attrs.evolve(self, blocks=[self.blocks[index] for index in kept])
        cut, ranks = self.blocks.blocks, self.blocks.ranks
        return attrs.evolve(self, blocks=PlacedBlocks([cut[i] for i in kept], [ranks[i] for i in kept]))

    def distinct_blocks(self) -> Iterator[Block]:
        """Its blocks, of copies only the first: together they hold each row and column once."""
        if self.dataflows == (self.dataflow,) and not self.is_replicated:
            yield from self.blocks
            return
        copied: set[tuple[int, ColumnRange]] = set()
        for block in self.blocks:
            place = (block.rows.index, block.columns)
            if place in copied:
                continue
            if self.dataflow_of(block).is_replicated:
                copied.add(place)
            yield block

    @property
    def cuts_rows(self) -> bool:
        """Whether a row part is less than the whole table, so that results are partial sums."""
        return self.row_map.num_parts > 1

    @property
    def maps_rows(self) -> bool:
        """Whether a row's place in its part differs from its place in the table, so that ids must be mapped."""
        first = self.blocks[0].rows
        return first.index > 0 or first.bounds != (0, self.row_map.num_rows)

    @property
    def is_placed(self) -> bool:
        """Whether each block has a rank."""
        return isinstance(self.blocks, PlacedBlocks) or all(block.rank is not None for block in self.blocks)

    @property
    def ranks(self) -> Sequence[int | None]:
        """The rank of each block."""
        if isinstance(self.blocks, PlacedBlocks):
            return self.blocks.ranks
        return [block.rank for block in self.blocks]

    def placed(self, ranks: Iterable[int]) -> Layout:
        """The same layout with block ``i`` on ``ranks[i]``, where it then must live."""
        chosen = tuple(ranks)
        if len(chosen) != len(self.blocks):
            raise InvalidInputError(f"{len(chosen)} ranks were given for {len(self.blocks)} blocks")
        return attrs.evolve(self, blocks=PlacedBlocks(self.blocks, chosen))

    def check(self, table: TableSpec, *, world_size: int | None = None) -> None:
        """Check that each row and column of ``table`` is covered exactly once, or once on every rank, and ranks exist.

        Raises:
            InvalidInputError: naming the table and the rows and columns, or the ranks, that are missing or covered
                twice.
        """
        where = f"table {table.describe()}"
        if self.row_map.num_rows != table.num_embeddings:
            raise InvalidInputError(f"{where}: the row map covers {self.row_map.num_rows} rows")
        covered = sum(self.row_map.num_rows_of(part) for part in range(self.row_map.num_parts))
        if covered != table.num_embeddings:
            raise InvalidInputError(f"{where}: the parts of the row map hold {covered} rows together")
        if self._covers_once(table, world_size):
            return
        for rank in self.ranks:
            if world_size is not None and rank is not None and rank >= world_size:
                raise InvalidInputError(f"{where}: a block is placed on rank {rank} of {world_size} ranks")
        for dataflow in self.dataflows:
            if dataflow.is_replicated:
                self._check_copies(where, table, dataflow, world_size)
        spans: dict[int, list[ColumnRange]] = {part: [] for part in range(self.row_map.num_parts)}
        for block in self.distinct_blocks():
            spans[block.rows.index].append(block.columns)
        for part, columns in spans.items():
            _check_columns(f"{where}, row part {part}", columns, table.embedding_dim)

    def _covers_once(self, table: TableSpec, world_size: int | None) -> bool:
        """Whether the few runs of the blocks show by their bounds alone what :meth:`check` looks for."""
        if not isinstance(self.blocks, BlockRuns) or len(self.blocks.runs) != 1:
            return False
        (run,) = self.blocks.runs
        last = (run.rank or 0) + run.count - 1
        if (run.columns.start, run.columns.stop) != (0, table.embedding_dim) or last >= (
            world_size or last + 1
        ):
            return False
        if self.is_replicated:
            return run.rank == 0 and run.is_copied and self.row_map.num_parts == 1 and last + 1 == world_size
        return not run.is_copied and run.count == self.row_map.num_parts

    def _check_copies(self, where: str, table: TableSpec, dataflow: Dataflow, world_size: int | None) -> None:
        """Check that every rank has one copy of each row part of a dataflow, with all columns."""
        ranks_of: dict[int, list[int | None]] = {}
        for block in self.blocks:
            if self.dataflow_of(block) != dataflow:
                continue
            if block.num_columns != table.embedding_dim:
                raise InvalidInputError(
                    f"{where}: the copy on rank {block.rank} has {block.num_rows} rows and {block.num_columns} "
                    f"columns; dataflow {dataflow.name!r} needs all {table.embedding_dim} columns on every rank"
                )
            ranks_of.setdefault(block.rows.index, []).append(block.rank)
        for part, ranks in ranks_of.items():
            what = f"copies of row part {part}" if self.cuts_rows else "copies"
            copies = Counter(ranks)
            count = len(ranks) if world_size is None else world_size
            for rank in range(count):
                if copies[rank] != 1:
                    raise InvalidInputError(
                        f"{where}: rank {rank} has {copies[rank]} {what}; dataflow {dataflow.name!r} needs one on "
                        f"each of {count} ranks"
                    )


def _check_columns(where: str, columns: list[ColumnRange], dim: int) -> None:
    reached = 0
    for span in sorted(columns, key=lambda span: span.start):
        if span.start != reached:
            what = "not covered" if span.start > reached else "covered twice"
            low, high = sorted((span.start, reached))
            raise InvalidInputError(f"{where}: columns [{low}, {high}) are {what}")
        reached = span.stop
    if reached != dim:
        raise InvalidInputError(f"{where}: blocks reach column {reached} of {dim}")


_Named = TypeVar("_Named", RowMap, Dataflow)

DATAFLOWS: tuple[type[Dataflow], ...] = (Exchange, Hierarchical, Replicate)


def to_data(value: RowMap | Dataflow) -> dict[str, Any]:
    """A row map or dataflow as JSON data: its name and its fields."""
    fields = attrs.asdict(value)  # type: ignore[arg-type]  # every subclass is an attrs class
    return {"name": value.name, **{key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}}


def from_data(data: Mapping[str, Any], known: Iterable[type[_Named]]) -> _Named:
    """The row map or dataflow that :func:`to_data` described.

    Raises:
        InvalidInputError: no known class has that name, or the fields are wrong.
    """
    classes = {cls.name: cls for cls in known}
    name = data.get("name")
    if name not in classes:
        raise InvalidInputError(
            f"unknown name {name!r}. Known: {', '.join(sorted(classes)) or 'none'}.{nearest(str(name), classes)}"
        )
    try:
        return classes[name](**{key: value for key, value in data.items() if key != "name"})
    except TypeError as error:
        raise InvalidInputError(f"{name!r}: {error}") from error
