"""Row maps: which part of a table each row is in, and where in that part.

They work on NumPy arrays and torch tensors alike, and nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from attrs import field, frozen

from shardwright.arguments import NonNegativeInt, PositiveInt, brief, listed, typed
from shardwright.errors import InvalidInputError


class RowMap(ABC):
    """Bijection from the rows of a table to ``(part, local row)``: ``ids -> (part, local row)``.

    Subclasses are frozen attrs classes with a ``name`` of their own; their fields are plain data (numbers, strings,
    tuples of them), so that a plan document can hold them. A plugin that brings a row map lists its class in its
    sharding type's ``row_maps``.
    """

    name: ClassVar[str]
    takes_any_id: ClassVar[bool] = False
    """True if ids are keys, any 64-bit numbers, and not rows. Then ``local_row_of`` gives the key, and a kernel with
    a ``row_state`` finds it a row; the rows of the table are its capacity."""
    keeps_neighbours: ClassVar[bool] = True
    """True if a part may be a run of neighbouring rows. ``False`` for a map that deals rows out: then nobody lists the
    rows of a part to learn whether they are neighbours."""
    stored_as: ClassVar[Literal["runs", "index"] | None] = None
    """The form in which checkpoints store rows: ``"runs"`` of neighbouring rows, in the order of the table; or the
    parts one after the other, with an ``"index"`` of their rows. By default, an index where parts are no runs."""
    ns_per_id: ClassVar[float] = 0.0
    """Nanoseconds that placing an id takes on one core of a CPU, beyond those of a division, which any map of core
    takes. Estimators of steps add them for each id that is placed."""
    num_rows: int

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """Number of parts; some may be empty."""

    @abstractmethod
    def part_of(self, ids: Any) -> Any:
        """The part of each id: an array or tensor ``[N]`` of the kind given."""

    @abstractmethod
    def local_row_of(self, ids: Any) -> Any:
        """The row of each id inside its part: ``[N]`` of the kind given."""

    @classmethod
    def place(cls, maps: Sequence[RowMap], ids: Any, sizes: Sequence[int]) -> tuple[Any, Any]:
        """Map the ids of several tables: results of :meth:`part_of` and :meth:`local_row_of`, map after map.

        A class whose maps differ in a number or two may do all of them at once: it is called in every step.

        Args:
            maps: row maps of this class, one for each piece of ``ids``.
            ids: a torch tensor ``[N]``.
            sizes: number of ids of each map, in order; they add up to ``N``.

        Returns:
            The part of each id, and its row in that part: ``[N]`` each.
        """
        import torch

        pieces = [(row_map, piece) for row_map, piece in zip(maps, ids.split(list(sizes)), strict=True)]
        parts = torch.cat([row_map.part_of(piece) for row_map, piece in pieces])
        return parts, torch.cat([row_map.local_row_of(piece) for row_map, piece in pieces])

    @abstractmethod
    def rows_of(self, part: int) -> slice | np.ndarray[Any, Any]:
        """The table's rows that ``part`` holds, in the order of its local rows: a slice, or an index array."""

    def num_rows_of(self, part: int) -> int:
        """Count the rows of ``part``.

        By default they are listed and counted, which takes seconds where there are 1e9: a map whose ``rows_of`` gives
        an array brings the formula.
        """
        rows = self.rows_of(part)
        if isinstance(rows, slice):
            return len(range(*rows.indices(self.num_rows)))
        return len(rows)

    def id_fraction_of(self, part: int) -> float:
        """The part of a table's lookups that are of ``part``'s rows; by default, ids are spread evenly over rows.

        A row map that knows which rows are asked for often says so: costs follow from it.
        """
        return self.num_rows_of(part) / max(self.num_rows, 1)

    def part_sizes(self) -> Iterable[tuple[int, int]]:
        """The rows of all parts in order, as runs of equal parts: ``(rows of each, how many parts)``.

        By default parts are counted one by one, each when it is asked for.
        """
        return ((self.num_rows_of(part), 1) for part in range(self.num_parts))

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
        """Number of its rows."""
        return self.row_map.num_rows_of(self.index)

    @property
    def rows(self) -> slice | np.ndarray[Any, Any]:
        """The table's rows it holds, in local order."""
        return self.row_map.rows_of(self.index)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """``(start, stop)`` if it is a run of neighbouring rows, else ``None``."""
        if not self.row_map.keeps_neighbours:
            return None
        rows = self.rows
        if isinstance(rows, slice) and rows.step in (None, 1):
            return rows.start, rows.stop
        return None


@frozen(field_transformer=typed)
class RowsRange(RowMap):
    """Neighbouring rows in ``parts`` runs of ``ceil(num_rows / parts)``; the last runs may be shorter or empty.

    Example:
        >>> import shardwright as sw
        >>> rows = sw.RowsRange(10, parts=4)
        >>> [rows.num_rows_of(part) for part in range(rows.num_parts)], rows.part_of(7), rows.local_row_of(7)
        ([3, 3, 3, 1], 2, 1)
    """

    name: ClassVar[str] = "range"
    num_rows: NonNegativeInt
    parts: PositiveInt = 1

    @property
    def num_parts(self) -> int:  # noqa: D102 - described in the base class
        return self.parts

    @cached_property
    def block_rows(self) -> int:
        """Rows of every run but the last ones."""
        return max(1, -(-self.num_rows // self.parts))

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        return ids // self.block_rows

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        return ids % self.block_rows

    @classmethod
    def place(cls, maps: Sequence[RowMap], ids: Any, sizes: Sequence[int]) -> tuple[Any, Any]:  # noqa: D102
        rows = _one_number([row_map.block_rows for row_map in maps], ids, sizes)  # type: ignore[attr-defined]
        parts = ids.floor_divide(rows)
        return parts, ids - parts * rows

    def rows_of(self, part: int) -> slice:  # noqa: D102
        start = min(part * self.block_rows, self.num_rows)
        return slice(start, min(start + self.block_rows, self.num_rows))

    def part_sizes(self) -> list[tuple[int, int]]:  # noqa: D102
        whole, rest = divmod(self.num_rows, self.block_rows)
        empty = self.parts - whole - (rest > 0)
        runs = [(self.block_rows, whole), (rest, int(rest > 0)), (0, empty)]
        return [(rows, count) for rows, count in runs if count]


@frozen(field_transformer=typed)
class RowsModulo(RowMap):
    """Row ``r`` in part ``r % parts``, so that neighbours are spread.

    Example:
        >>> import shardwright as sw
        >>> rows = sw.RowsModulo(10, parts=4)
        >>> [rows.num_rows_of(part) for part in range(rows.num_parts)], rows.part_of(7), rows.local_row_of(7)
        ([3, 3, 2, 2], 3, 1)
    """

    name: ClassVar[str] = "modulo"
    num_rows: NonNegativeInt
    parts: PositiveInt = 1

    @property
    def num_parts(self) -> int:  # noqa: D102
        return self.parts

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        return ids % self.parts

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        return ids // self.parts

    @classmethod
    def place(cls, maps: Sequence[RowMap], ids: Any, sizes: Sequence[int]) -> tuple[Any, Any]:  # noqa: D102
        parts = _one_number([row_map.parts for row_map in maps], ids, sizes)  # type: ignore[attr-defined]
        rows = ids.floor_divide(parts)
        return ids - rows * parts, rows

    def rows_of(self, part: int) -> slice:  # noqa: D102
        return slice(part, self.num_rows, self.parts)

    def part_sizes(self) -> list[tuple[int, int]]:  # noqa: D102
        least, larger = divmod(self.num_rows, self.parts)
        return [(rows, count) for rows, count in ((least + 1, larger), (least, self.parts - larger)) if count]


def _one_number(numbers: Sequence[int], ids: Any, sizes: Sequence[int]) -> Any:
    """A number for each piece of ``ids``: one for all where they are equal, else one for each id."""
    if len(set(numbers)) == 1:
        return numbers[0]
    import torch

    each = torch.from_numpy(np.repeat(np.array(numbers, dtype=np.int64), sizes))
    return each.to(ids.device, ids.dtype)


@frozen(field_transformer=typed)
class RowsSplit(RowMap):
    """Neighbouring rows cut at given bounds: part ``i`` holds ``bounds[i] <= r < bounds[i + 1]``.

    Example:
        >>> import shardwright as sw
        >>> rows = sw.RowsSplit([0, 2, 10])
        >>> [rows.num_rows_of(part) for part in range(rows.num_parts)]
        [2, 8]
    """

    name: ClassVar[str] = "split"
    bounds: tuple[NonNegativeInt, ...] = field(converter=listed)

    @bounds.validator
    def _rise(self, attribute: Any, value: tuple[int, ...]) -> None:
        if len(value) < 2 or value[0] != 0 or any(a > b for a, b in pairwise(value)):
            raise InvalidInputError(
                f"RowsSplit: bounds must rise from 0 to the number of rows, got {brief(value)}",
                subject="bounds",
            )

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


ROW_MAPS: tuple[type[RowMap], ...] = (RowsModulo, RowsRange, RowsSplit)
"""The row maps of core."""
