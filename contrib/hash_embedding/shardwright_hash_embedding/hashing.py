"""Hashes of 64-bit ids: which part an id is in, and what its row begins with.

Everything is int64 that wraps, so that NumPy arrays and torch tensors give the same.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from attrs import frozen

import shardwright as sw

# The finaliser of splitmix64 (Steele, Lea, Flood 2014), its constants as signed numbers, and its increment.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def mixed(values: Any) -> Any:
    """A hash of each int64, int64: a bijection."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Any, bits: int) -> Any:
    """Shifted right, zeros coming in: shifts of signed numbers bring in the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def first_values(keys: npt.NDArray[np.int64], dim: int, *, scale: float) -> npt.NDArray[np.float32]:
    """The values that the rows of keys begin with: uniform in ``[-scale, scale)``, the same wherever they are born.

    Args:
        keys: ``[N]``.
        dim: columns, ``D``.
        scale: the end of the range.

    Returns:
        ``[N, D]``.
    """
    columns = np.arange(1, dim + 1, dtype=np.int64) * _GOLDEN
    bits = _shifted(mixed(mixed(keys)[:, None] + columns), 40)
    return ((bits / (1 << 23) - 1.0) * scale).astype(np.float32)


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
