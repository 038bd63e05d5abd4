"""Layouts: how a table is cut into blocks, and where each row of it lives.

A row map parts rows, ``ids -> (part, local row)``; a block is a part of the rows times a range of columns, on a
rank or free to go to any; a layout is the blocks of a table with the dataflow that serves them. All the engine
does follows from these (DESIGN, section 2). Row maps work on NumPy arrays and torch tensors alike, and nothing
here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import numpy as np
from attrs import field, frozen

from shardwright.errors import InvalidInputError, nearest

if TYPE_CHECKING:
    from shardwright.planning.tables import TableSpec
    from shardwright.runtime.part import Part
    from shardwright.runtime.return_paths import ReturnPath


def _not_negative(instance: Any, attribute: Any, value: Any) -> None:
    if value < 0:
        raise InvalidInputError(
            f"{type(instance).__name__}.{attribute.name} must not be negative, got {value}"
        )


@frozen
class ColumnRange:
    """The columns ``start <= c < stop`` of a table."""

    start: int = field(validator=_not_negative)
    stop: int = field()

    @stop.validator
    def _not_empty(self, attribute: Any, value: int) -> None:
        if value <= self.start:
            raise InvalidInputError(
                f"columns [{self.start}, {value}) are empty; a block needs at least one column"
            )

    def __len__(self) -> int:
        return self.stop - self.start


class RowMap(ABC):
    """Where each row of a table goes: ``ids -> (part, local row)``, a bijection from rows to (part, local row).

    Subclasses are frozen attrs classes with a ``name`` of their own; their fields are plain data (numbers, strings,
    tuples of them), so that a plan document can hold them. A plugin that brings a row map lists its class in its
    sharding type's ``row_maps``.
    """

    name: ClassVar[str]
    num_rows: int

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """How many parts there are; some may be empty."""

    @abstractmethod
    def part_of(self, ids: Any) -> Any:
        """The part of each id: an array or tensor ``[N]`` of the kind given."""

    @abstractmethod
    def local_row_of(self, ids: Any) -> Any:
        """The row of each id inside its part: ``[N]`` of the kind given."""

    @abstractmethod
    def rows_of(self, part: int) -> slice | np.ndarray[Any, Any]:
        """The table's rows that ``part`` holds, in the order of its local rows: a slice, or an index array."""

    def num_rows_of(self, part: int) -> int:
        """How many rows ``part`` holds."""
        rows = self.rows_of(part)
        if isinstance(rows, slice):
            return len(range(*rows.indices(self.num_rows)))
        return len(rows)

    def __len__(self) -> int:
        return self.num_parts

    def __getitem__(self, part: int) -> RowPart:
        if not 0 <= part < self.num_parts:
            raise IndexError(f"part {part} of a row map with {self.num_parts} parts")
        return RowPart(self, part)

    def __iter__(self) -> Iterator[RowPart]:
        return (RowPart(self, part) for part in range(self.num_parts))


@frozen
class RowPart:
    """One part of a row map."""

    row_map: RowMap
    index: int

    @property
    def num_rows(self) -> int:
        """How many rows it holds."""
        return self.row_map.num_rows_of(self.index)

    @property
    def rows(self) -> slice | np.ndarray[Any, Any]:
        """The table's rows it holds, in local order."""
        return self.row_map.rows_of(self.index)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """``(start, stop)`` if it is a run of neighbouring rows, else ``None``."""
        rows = self.rows
        if isinstance(rows, slice) and rows.step in (None, 1):
            return rows.start, rows.stop
        return None


@frozen
class RowsRange(RowMap):
    """Neighbouring rows in ``parts`` runs of ``ceil(num_rows / parts)``; the last runs may be shorter or empty."""

    name: ClassVar[str] = "range"
    num_rows: int = field(validator=_not_negative)
    parts: int = field(default=1, validator=attrs.validators.ge(1))

    @property
    def num_parts(self) -> int:  # noqa: D102 - described in the base class
        return self.parts

    @property
    def block_rows(self) -> int:
        """Rows of every run but the last ones."""
        return max(1, -(-self.num_rows // self.parts))

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        return ids // self.block_rows

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        return ids % self.block_rows

    def rows_of(self, part: int) -> slice:  # noqa: D102
        start = min(part * self.block_rows, self.num_rows)
        return slice(start, min(start + self.block_rows, self.num_rows))


@frozen
class RowsModulo(RowMap):
    """Row ``r`` in part ``r % parts``, so that neighbours are spread."""

    name: ClassVar[str] = "modulo"
    num_rows: int = field(validator=_not_negative)
    parts: int = field(default=1, validator=attrs.validators.ge(1))

    @property
    def num_parts(self) -> int:  # noqa: D102
        return self.parts

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        return ids % self.parts

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        return ids // self.parts

    def rows_of(self, part: int) -> slice:  # noqa: D102
        return slice(part, self.num_rows, self.parts)


def _increasing(instance: Any, attribute: Any, value: tuple[int, ...]) -> None:
    if len(value) < 2 or value[0] != 0 or any(a > b for a, b in pairwise(value)):
        raise InvalidInputError(f"bounds must rise from 0 to the number of rows, got {value}")


def _whole_numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class RowsSplit(RowMap):
    """Neighbouring rows cut at given bounds: part ``i`` holds ``bounds[i] <= r < bounds[i + 1]``."""

    name: ClassVar[str] = "split"
    bounds: tuple[int, ...] = field(converter=_whole_numbers, validator=_increasing)

    @property
    def num_rows(self) -> int:  # type: ignore[override]  # derived here
        """The last bound."""
        return self.bounds[-1]

    @property
    def num_parts(self) -> int:  # noqa: D102
        return len(self.bounds) - 1

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        inner = self.bounds[1:-1]
        if isinstance(ids, np.ndarray):
            return np.searchsorted(np.asarray(inner, dtype=ids.dtype), ids, side="right")
        import torch

        return torch.bucketize(ids, torch.tensor(inner, dtype=ids.dtype, device=ids.device), right=True)

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        starts = self.bounds[:-1]
        part = self.part_of(ids)
        if isinstance(ids, np.ndarray):
            return ids - np.asarray(starts, dtype=ids.dtype)[part]
        import torch

        return ids - torch.tensor(starts, dtype=ids.dtype, device=ids.device)[part]

    def rows_of(self, part: int) -> slice:  # noqa: D102
        return slice(self.bounds[part], self.bounds[part + 1])


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

    Raises:
        InvalidInputError: a number is negative, a block has both a rank and a ``host_group``, or a ``local_rank``
            without one.
    """

    rows: RowPart
    columns: ColumnRange
    rank: int | None = field(default=None, validator=attrs.validators.optional(_not_negative))
    host_group: int | None = field(default=None, validator=attrs.validators.optional(_not_negative))
    local_rank: int | None = field(default=None, validator=attrs.validators.optional(_not_negative))

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


def _plain(instance: Any, attribute: Any, value: Mapping[str, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise InvalidInputError(f"extras must be JSON data with string keys, got the key {key!r}")


def _as_blocks(values: Iterable[Block]) -> tuple[Block, ...]:
    return tuple(values)


@frozen(hash=False)
class Layout:
    """The blocks of a table and the dataflow that serves them.

    Args:
        blocks: all of one row map; together they cover every row and column exactly once. Where the dataflow is
            replicated, each is the whole table, and every rank has one.
        dataflow: how ids and results travel.
        variant: tells layouts of one sharding type for one table apart (``"4 columns blocks"``); part of an
            option's identity.
        extras: JSON data of the plugin, kept in the plan and handed back at run time.
    """

    blocks: tuple[Block, ...] = field(converter=_as_blocks)
    dataflow: Dataflow = field(factory=Exchange)
    variant: str = ""
    extras: Mapping[str, Any] = field(factory=dict, validator=_plain)

    @blocks.validator
    def _some(self, attribute: Any, value: tuple[Block, ...]) -> None:
        if not value:
            raise InvalidInputError("a layout needs at least one block")
        if any(block.rows.row_map != value[0].rows.row_map for block in value):
            raise InvalidInputError("the blocks of a layout must be parts of one row map")

    @property
    def row_map(self) -> RowMap:
        """The row map of all its blocks."""
        return self.blocks[0].rows.row_map

    @property
    def cuts_rows(self) -> bool:
        """Whether a row part is less than the whole table, so that results are partial sums."""
        return self.row_map.num_parts > 1

    @property
    def maps_rows(self) -> bool:
        """Whether a row's place in its part differs from its place in the table, so that ids must be mapped."""
        return self.blocks[0].rows.bounds != (0, self.row_map.num_rows)

    def placed(self, ranks: Iterable[int]) -> Layout:
        """The same layout with block ``i`` on ``ranks[i]``, where it then must live."""
        blocks = [
            Block(block.rows, block.columns, rank) for block, rank in zip(self.blocks, ranks, strict=True)
        ]
        return attrs.evolve(self, blocks=blocks)

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
        for block in self.blocks:
            if world_size is not None and block.rank is not None and block.rank >= world_size:
                raise InvalidInputError(
                    f"{where}: a block is placed on rank {block.rank} of {world_size} ranks"
                )
        if self.dataflow.is_replicated:
            self._check_copies(where, table, world_size)
            return
        spans: dict[int, list[ColumnRange]] = {part: [] for part in range(self.row_map.num_parts)}
        for block in self.blocks:
            spans[block.rows.index].append(block.columns)
        for part, columns in spans.items():
            _check_columns(f"{where}, row part {part}", columns, table.embedding_dim)

    def _check_copies(self, where: str, table: TableSpec, world_size: int | None) -> None:
        """Check that every rank has one copy of the whole table."""
        for block in self.blocks:
            size = (block.num_rows, block.num_columns)
            if size != (table.num_embeddings, table.embedding_dim):
                raise InvalidInputError(
                    f"{where}: the copy on rank {block.rank} has {size[0]} rows and {size[1]} columns; "
                    f"dataflow {self.dataflow.name!r} needs the whole table on every rank"
                )
        copies = Counter(block.rank for block in self.blocks)
        count = len(self.blocks) if world_size is None else world_size
        for rank in range(count):
            if copies[rank] != 1:
                raise InvalidInputError(
                    f"{where}: rank {rank} has {copies[rank]} copies; dataflow {self.dataflow.name!r} needs one on "
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

ROW_MAPS: tuple[type[RowMap], ...] = (RowsModulo, RowsRange, RowsSplit)
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
            f"unknown name {name!r}. Known: {', '.join(sorted(classes))}.{nearest(str(name), classes)}"
        )
    try:
        return classes[name](**{key: value for key, value in data.items() if key != "name"})
    except TypeError as error:
        raise InvalidInputError(f"{name!r}: {error}") from error
