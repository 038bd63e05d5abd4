"""Layouts: how a table is cut into blocks, and where each row of it lives.

A row map parts rows, ``ids -> (part, local row)``; a block is a part of the rows times a range of columns, on a
rank or free to go to any; a layout is the blocks of a table with the dataflow that serves them. All the engine
does follows from these. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
from attrs import field, frozen

from shardwright.arguments import typed
from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.arrays import Ints, distinct
from shardwright.planning.layouts.blocks import (
    UNPLACED,
    Block,
    BlockColumns,
    BlockRun,
    Blocks,
    ColumnRange,
    as_blocks,
)
from shardwright.planning.layouts.dataflows import (
    DATAFLOWS,
    Dataflow,
    Exchange,
    Routed,
)
from shardwright.planning.layouts.row_maps import ROW_MAPS, RowMap

if TYPE_CHECKING:
    from shardwright.planning.tables.spec import TableSpec

__all__ = [
    "DATAFLOWS",
    "Block",
    "BlockRun",
    "Blocks",
    "ColumnRange",
    "Dataflow",
    "Exchange",
    "Layout",
    "Routed",
    "from_data",
    "to_data",
]


@frozen(hash=False, field_transformer=typed)
class Layout:
    """The blocks of a table and the dataflow that serves them.

    Args:
        blocks: all of one row map; together they cover every row and column exactly once. Where the dataflow is
            replicated, each is all columns of a row part, and every rank has one. Either blocks or, where there may
            be hundreds, :class:`BlockRun` objects, of which blocks are made when they are looked at.
        dataflow: path of ids and results, for all blocks without one of their own.
        variant: tells layouts of one sharding type for one table apart (``"4 columns blocks"``); part of an
            option's identity.
        extras: JSON data of the plugin, kept in the plan and handed back at run time.

    Example:
        >>> import shardwright as sw
        >>> rows = sw.RowsRange(10, parts=2)
        >>> layout = sw.Layout(sw.Block(part, sw.ColumnRange(0, 8), rank) for rank, part in enumerate(rows))
        >>> layout.dataflow.name
        'exchange'
    """

    blocks: Blocks = field(converter=as_blocks)
    dataflow: Dataflow = field(factory=Exchange)
    variant: str = ""
    extras: Mapping[str, Any] = field(factory=dict)

    @blocks.validator
    def _some(self, attribute: Any, value: Blocks) -> None:
        if not value:
            raise InvalidInputError("a layout needs at least one block")
        first, *rest = (run.row_map for run in value.runs)
        # Mostly it is one object; comparing maps of many bounds with themselves would take the square of their number.
        if any(row_map is not first and row_map != first for row_map in rest):
            raise InvalidInputError("the blocks of a layout must be parts of one row map")

    @property
    def columns(self) -> BlockColumns:
        """Blocks as columns of numbers, made again in each call."""
        return BlockColumns.of(self.blocks)

    @property
    def row_map(self) -> RowMap:
        """The row map of all its blocks."""
        return self.blocks.runs[0].row_map

    @property
    def dataflows(self) -> tuple[Dataflow, ...]:
        """The dataflows of its blocks, each once, in the order of the blocks."""
        return tuple(dict.fromkeys(run.dataflow or self.dataflow for run in self.blocks.runs))

    @property
    def is_replicated(self) -> bool:
        """True if every rank has a copy of each block."""
        return all(dataflow.is_replicated for dataflow in self.dataflows)

    @property
    def sums_inside_host(self) -> bool:
        """True if partial sums are added inside a host before they cross to others."""
        return any(dataflow.sums_inside_host for dataflow in self.dataflows)

    def dataflow_of(self, block: Block) -> Dataflow:
        """Return the path of a block's ids and results."""
        return block.dataflow or self.dataflow

    def served_by(self, dataflows: Iterable[Dataflow]) -> Layout:
        """The blocks of some dataflows alone; they no longer cover the table if there are others.

        Raises:
            InvalidInputError: no block has one of these.
        """
        chosen = set(dataflows)
        if chosen.issuperset(self.dataflows):
            return self
        is_kept = [(run.dataflow or self.dataflow) in chosen for run in self.blocks.runs]
        return attrs.evolve(self, blocks=self.blocks.only(is_kept))

    def with_copies(self) -> Iterable[Sequence[Block]]:
        """Blocks that together hold each row and column once, in order, each followed by its copies on other ranks."""
        found: dict[Any, list[Block]] = {}
        for index, block in enumerate(self.blocks):
            place = (block.rows.index, block.columns) if self.dataflow_of(block).is_replicated else index
            found.setdefault(place, []).append(block)
        return found.values()

    def distinct_blocks(self) -> Iterator[Block]:
        """Blocks, of copies only the first: together they hold each row and column once."""
        return (first for first, *_ in self.with_copies())

    @property
    def cuts_rows(self) -> bool:
        """True if a row part is less than the whole table, so that results are partial sums."""
        return self.row_map.num_parts > 1

    @property
    def maps_rows(self) -> bool:
        """True if a row's place in its part differs from its place in the table: ids must be mapped."""
        first = self.blocks[0].rows
        return first.index > 0 or first.bounds != (0, self.row_map.num_rows)

    @property
    def is_placed(self) -> bool:
        """True if each block has a rank."""
        return self.blocks.ranks is not None or all(run.rank is not None for run in self.blocks.runs)

    @property
    def ranks(self) -> Sequence[int | None]:
        """The rank of each block."""
        if self.blocks.ranks is not None:
            return self.blocks.ranks
        return [None if rank == UNPLACED else rank for rank in self.columns.rank.tolist()]

    def digest(self) -> bytes:
        """A hash of all that is planned for a table, the same for equal blocks however they are written down."""
        columns = self.columns
        dataflows = [to_data(dataflow or self.dataflow) for dataflow in columns.dataflows]
        told = json.dumps([to_data(self.row_map), dataflows, self.variant, dict(self.extras)], sort_keys=True)
        digest = hashlib.sha256(told.encode())
        for column in (columns.part, columns.start, columns.stop, columns.rank, columns.dataflow):
            digest.update(column.tobytes())
        return digest.digest()

    def placed(self, ranks: Iterable[int]) -> Layout:
        """The same layout with block ``i`` on ``ranks[i]``, where it then must live."""
        chosen = tuple(ranks)
        if len(chosen) != len(self.blocks):
            raise InvalidInputError(f"{len(chosen)} ranks were given for {len(self.blocks)} blocks")
        return attrs.evolve(self, blocks=attrs.evolve(self.blocks, ranks=chosen))

    def check(self, table: TableSpec, *, world_size: int | None = None) -> None:
        """Check that each row and column of ``table`` is covered exactly once, or once on every rank, and ranks exist.

        Raises:
            InvalidInputError: naming the table and the rows and columns, or the ranks, that are missing or covered
                twice.
        """
        where = f"table {table.describe()}"
        if self.row_map.num_rows != table.num_embeddings:
            raise InvalidInputError(f"{where}: the row map covers {self.row_map.num_rows} rows")
        covered = _rows_of_parts(self.row_map)
        if covered != table.num_embeddings:
            raise InvalidInputError(f"{where}: the parts of the row map hold {covered} rows together")
        columns = self.columns
        if world_size is not None and (columns.rank >= world_size).any():
            raise InvalidInputError(
                f"{where}: a block is placed on rank {columns.rank.max()} of {world_size} ranks"
            )
        is_copy = np.zeros(len(columns), dtype=bool)
        for place, named in enumerate(columns.dataflows):
            dataflow = named or self.dataflow
            if dataflow.is_replicated:
                own = np.flatnonzero(columns.dataflow == place)
                _check_copies(where, columns, own, table.embedding_dim, dataflow, world_size)
                is_copy[own] = True
        # Of copies the first of each row part, and all other blocks.
        first = np.unique(np.where(is_copy, columns.part, -1), return_index=True)[1]
        kept = np.concatenate([np.flatnonzero(~is_copy), first[is_copy[first]]])
        if fault := _fault(columns, kept, self.row_map.num_parts, table.embedding_dim):
            raise InvalidInputError(f"{where}, {fault}")


def _rows_of_parts(row_map: RowMap) -> int:
    """Count the rows of all parts together; part by part where the class is not one of core's."""
    if type(row_map) in ROW_MAPS:
        return sum(rows * count for rows, count in row_map.part_sizes())
    return sum(row_map.num_rows_of(part) for part in range(row_map.num_parts))


def _check_copies(
    where: str, columns: BlockColumns, copies: Ints, dim: int, dataflow: Dataflow, world_size: int | None
) -> None:
    """Check that every rank has one copy of each row part of a dataflow, with all columns.

    Args:
        where: the table, for errors.
        columns: all blocks.
        copies: indices of the dataflow's: ``[C]``.
        dim: columns of the table.
        dataflow: the dataflow.
        world_size: number of ranks; ``None``: as many as a part has copies.
    """
    widths = columns.stop[copies] - columns.start[copies]
    if (widths != dim).any():
        narrow = int(np.argmax(widths != dim))
        raise InvalidInputError(
            f"{where}: the copy on rank {columns.rank[copies[narrow]]} has {widths[narrow]} columns; dataflow "
            f"{dataflow.name!r} needs all {dim} columns on every rank"
        )
    part, rank = columns.part[copies], columns.rank[copies]
    for index in distinct(part).tolist():
        own = rank[part == index]
        count = len(own) if world_size is None else world_size
        held = np.bincount(own[own != UNPLACED], minlength=count)
        if (held[:count] != 1).any():
            wrong = int(np.argmax(held[:count] != 1))
            raise InvalidInputError(
                f"{where}: rank {wrong} has {held[wrong]} copies of row part {index}; dataflow {dataflow.name!r} needs "
                f"one on each of {count} ranks"
            )


def _fault(columns: BlockColumns, kept: Ints, num_parts: int, dim: int) -> str:
    """Name the first row part of which some blocks do not cover each column once; empty if there is none."""
    # Behind the blocks of each part stands one without columns, at the table's last column.
    end = np.full(num_parts, dim)
    part = np.append(columns.part[kept], np.arange(num_parts))
    start, stop = np.append(columns.start[kept], end), np.append(columns.stop[kept], end)
    order = np.lexsort((start, part))
    part, start, stop = part[order], start[order], stop[order]
    # In order of part and column, each block begins where the last one ended.
    reached = np.where(np.diff(part, prepend=-1) > 0, 0, np.roll(stop, 1))
    if (start == reached).all():
        return ""
    first = int(np.argmax(start != reached))
    low, high = int(reached[first]), int(start[first])
    if high == dim:
        return f"row part {part[first]}: blocks reach column {low} of {dim}"
    what = "not covered" if high > low else "covered twice"
    return f"row part {part[first]}: columns [{min(low, high)}, {max(low, high)}) are {what}"


_Named = TypeVar("_Named", RowMap, Dataflow)


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
    if not isinstance(name, str) or name not in classes:
        raise InvalidInputError(
            f"unknown name {name!r}. Known: {', '.join(sorted(classes)) or 'none'}.{nearest(str(name), classes)}"
        )
    try:
        return classes[name](**{key: value for key, value in data.items() if key != "name"})
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name!r}: {error}") from error
