"""Access counts of rows: given, or measured on batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

import shardwright as sw

KEY = "access_counts"
"""Where the counts stand in a table's ``ParameterConstraints(extras=...)``."""


def _numbers(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _rows(batch: Any, num_rows: int) -> npt.NDArray[np.int64]:
    """The ids of a batch, in one dimension."""
    rows = np.asarray(batch).reshape(-1)
    if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
        raise sw.InvalidInputError(
            f"ids must be 0 <= id < {num_rows}, the rows of the table; a batch has {rows.min()} to {rows.max()}"
        )
    return rows


@frozen(eq=False)
class AccessCounts:
    """The lookups of the rows that get most of them, and of all rows together.

    Args:
        rows: the rows counted, the most looked up first.
        counts: the lookups of each: ``[N]``.
        total: the lookups of all rows, also of those not listed.

    Raises:
        InvalidInputError: the lists are of different lengths, a count is negative or greater than the one before, or
            together they exceed ``total``.
    """

    rows: npt.NDArray[np.int64] = field(converter=_numbers)
    counts: npt.NDArray[np.int64] = field(converter=_numbers)
    total: int

    def __attrs_post_init__(self) -> None:
        if len(self.rows) != len(self.counts) or len(np.unique(self.rows)) != len(self.rows):
            raise sw.InvalidInputError(
                f"access counts need one count for each of different rows, got {len(self.counts)} counts for "
                f"{len(np.unique(self.rows))} different rows of {len(self.rows)}"
            )
        if (self.counts < 0).any() or (np.diff(self.counts) > 0).any() or self.counts.sum() > self.total:
            raise sw.InvalidInputError(
                f"access counts must fall from row to row and be part of the total, {self.total}; they begin with "
                f"{self.counts[:4].tolist()} and add up to {int(self.counts.sum())}"
            )

    @classmethod
    def of(cls, counts: Iterable[int], *, most_rows: int = 100_000) -> AccessCounts:
        """Make counts from the lookups of each row of a table; of rows with equal counts the first comes first.

        Args:
            counts: lookups of every row, in order: ``[R]``.
            most_rows: largest number of rows whose counts are kept.
        """
        of_row = _numbers(counts)
        rows = np.argsort(-of_row, kind="stable")[:most_rows]
        rows = rows[of_row[rows] > 0]
        return cls(rows, of_row[rows], int(of_row.sum()))

    @classmethod
    def measured(cls, ids: Iterable[Any], num_rows: int, *, most_rows: int = 100_000) -> AccessCounts:
        """Measure counts on the ids of some batches.

        Args:
            ids: an array or tensor on the CPU for each batch, or one for all.
            num_rows: number of rows of the table.
            most_rows: largest number of rows whose counts are kept.

        Raises:
            InvalidInputError: an id is no row of the table.
        """
        counts = np.zeros(num_rows, dtype=np.int64)
        for batch in (ids,) if hasattr(ids, "ndim") else ids:
            counts += np.bincount(_rows(batch, num_rows), minlength=num_rows)
        return cls.of(counts, most_rows=most_rows)

    def to_extras(self) -> Mapping[str, Any]:
        """Write as JSON data for ``ParameterConstraints(extras=...)``."""
        return {
            KEY: {"rows": self.rows.tolist(), "counts": self.counts.tolist(), "total": self.total},
        }

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any]) -> AccessCounts | None:
        """Read the data of :meth:`to_extras`; ``None`` if there is none.

        Raises:
            InvalidInputError: the data is of another form.
        """
        data = extras.get(KEY)
        if data is None:
            return None
        try:
            return cls(data["rows"], data["counts"], data["total"])
        except (KeyError, TypeError, ValueError) as error:
            raise sw.InvalidInputError(
                f"extras[{KEY!r}] must be an object of rows, counts and total: {error}"
            ) from error

    def rows_for(self, share: float) -> int:
        """The fewest rows that get this share of all lookups; all that are counted, if they do not."""
        reached = np.cumsum(self.counts)
        return min(int(np.searchsorted(reached, share * self.total)) + 1, len(self.rows))

    def share_of(self, num_rows: int) -> float:
        """The share of all lookups that the first ``num_rows`` rows get."""
        return float(self.counts[:num_rows].sum() / max(self.total, 1))
