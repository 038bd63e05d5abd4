"""The row map: 64-bit ids dealt to parts by their hash."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

import shardwright as sw


def mixed(values):  # type: ignore[no-untyped-def]  # Triton compiles it too, and would read annotations
    """A hash of each int64, int64, of arrays, of tensors, and in compiled loops: a bijection.

    The finaliser of splitmix64 (Steele, Lea, Flood 2014). Its constants are signed numbers, and products wrap. Shifts
    of signed numbers bring the sign in, which is masked.
    """
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return values ^ ((values >> 31) & 0x1FFFFFFFF)


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
        return ((mixed(ids) >> 1) & 0x7FFFFFFFFFFFFFFF) % self.parts

    def local_row_of(self, ids: Any) -> Any:
        """The id itself: the kernel finds it a row."""
        return ids

    def rows_of(self, part: int) -> slice:
        """The rows that the part has to give."""
        return sw.RowsRange(self.num_rows, parts=self.parts).rows_of(part)

    def id_fraction_of(self, part: int) -> float:
        """Hashes spread ids evenly, whatever rows there are."""
        return 1.0 / self.parts
