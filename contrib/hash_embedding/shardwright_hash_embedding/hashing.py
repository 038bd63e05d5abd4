"""The row map: 64-bit ids dealt to parts by their hash."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

import shardwright as sw

# The finaliser of splitmix64 (Steele, Lea, Flood 2014), its constants as signed numbers that wrap: NumPy arrays and
# torch tensors give the same.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def mixed(values: Any) -> Any:
    """A hash of each int64, int64: a bijection."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Any, bits: int) -> Any:
    """Shifted right, zeros coming in: shifts of signed numbers bring in the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@frozen
class HashedIds(sw.RowMap):
    """Ids dealt to parts by their hash; each part has its run of the table's rows to give to them.

    Args:
        num_rows: number of rows of all parts.
        parts: number of parts.
    """

    name: ClassVar[str] = "hashed_ids"
    takes_any_id: ClassVar[bool] = True
    num_rows: int
    parts: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.parts

    def part_of(self, ids: Any) -> Any:
        """Part of each id, by its hash."""
        return _shifted(mixed(ids), 1) % self.parts

    def local_row_of(self, ids: Any) -> Any:
        """The id itself: the kernel finds it a row."""
        return ids

    def rows_of(self, part: int) -> slice:
        """The rows that the part has to give."""
        return sw.RowsRange(self.num_rows, parts=self.parts).rows_of(part)

    def id_fraction_of(self, part: int) -> float:
        """Hashes spread ids evenly, whatever rows there are."""
        return 1.0 / self.parts
