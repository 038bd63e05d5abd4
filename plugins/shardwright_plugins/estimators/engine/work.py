"""The work of lookups and updates as amounts that take time: what constants of a machine are multiplied by.

A row is read in cache lines. Of ``N`` ids that fall evenly on ``R`` rows ``U = R (1 - exp(-N / R))`` are distinct; ids
of which a profile tells that fewer are distinct fall on as many rows as if those were all (:func:`even_rows`). The
first read of each comes from memory, and so do further ones as far as the rows read exceed the near cache. Tables of
pages say where a page is. If many pages are read, these are far away too: few rows of a large table take longer than as
many of a small one. An update sorts ids, adds the gradients of each row, and reads and writes each distinct row with
its optimizer state once.

Legend: N ids, U distinct rows, V vectors (bags; ids of sequences), D columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats

LINE_BYTES = 64
"""A cache line."""
PAGE_BYTES = 4096
"""A page of memory: the smallest of x86-64 and of most systems on ARM."""
_HALVINGS = 40
"""Bits of the number of rows that skewed ids count as."""
SUM_BYTES = 4
"""Kernels sum in float32."""
LOOKUP = (
    "lookup_id",
    "lookup_line",
    "lookup_missed_row",
    "lookup_missed_line",
    "lookup_page",
    "lookup_vector",
    "lookup_element",
)
UPDATE = ("update_id", "update_line", "update_missed_line", "update_page", "update_row", "update_row_line")
OF_KERNELS: Mapping[str, tuple[str, ...]] = {"forward_compute": LOOKUP, "backward_compute": UPDATE}
"""Phase -> constants of kernels."""


@frozen(eq=False)
class LookupWork:
    """Lookups in blocks, as columns.

    Args:
        ids: ids looked up, ``N``.
        rows: rows of the block.
        even_rows: rows of the block on which the ids fall, taken to fall evenly: all, or fewer by a profile.
        vectors: vectors returned, ``V``.
        columns: columns of the block, ``D``.
        gradient_columns: columns of the gradients that it is sent: all of the table if its update needs whole rows.
        row_bytes: bytes of a stored row.
        state_bytes: bytes of a row's optimizer state.
        updates_all: the kernel writes all rows in an update, not those that were looked up.
        cache_bytes: bytes of the near cache.
    """

    ids: Floats
    rows: Floats
    even_rows: Floats
    vectors: Floats
    columns: Floats
    gradient_columns: Floats
    row_bytes: Floats
    state_bytes: Floats
    updates_all: Floats
    cache_bytes: float

    def amounts(self) -> Mapping[str, Floats]:
        """The amounts that constants of :data:`LOOKUP` and :data:`UPDATE` are multiplied by."""
        lines, state_lines = np.ceil(self.row_bytes / LINE_BYTES), np.ceil(self.state_bytes / LINE_BYTES)
        distinct = self.distinct
        missed = distinct + self._beyond_cache(distinct * lines) * (self.ids - distinct)
        gradient_lines = np.ceil(self.gradient_columns * SUM_BYTES / LINE_BYTES)
        far = self._beyond_cache(self.vectors * gradient_lines)
        written = np.where(self.updates_all, self.rows, distinct)
        return {
            "lookup_id": self.ids,
            "lookup_line": self.ids * lines,
            "lookup_missed_row": missed,
            "lookup_missed_line": missed * lines,
            "lookup_page": self.pages,
            "lookup_vector": self.vectors,
            "lookup_element": self.vectors * self.columns,
            "update_id": self.ids,
            "update_line": self.ids * gradient_lines,
            "update_missed_line": self.ids * gradient_lines * far,
            "update_page": self.pages,
            "update_row": written,
            "update_row_line": written * (lines + state_lines),
        }

    @property
    def distinct(self) -> Floats:
        """Distinct rows among the ids, ``U``."""
        return _distinct_of(self.ids, self.even_rows)

    @property
    def pages(self) -> Floats:
        """Distinct pages of rows that the ids read. Frequent rows may be anywhere in the table.

        Fewer distinct rows count as the ``N'`` ids that would fall on so many of all: ``U = R (1 - exp(-N' / R))``. Of
        rows wider than a page each counts as one.
        """
        rows = np.maximum(self.rows, 1)
        # Ids fall on one row at least, so that ids of a block of one row are not skewed.
        is_skewed = np.maximum(self.even_rows, 1) < rows
        fewer = -rows * np.log1p(-np.where(is_skewed, self.distinct, 0.0) / rows)
        ids = np.where(is_skewed, fewer, self.ids)
        return np.minimum(_distinct_of(ids, np.ceil(self.rows * self.row_bytes / PAGE_BYTES)), self.distinct)

    def _beyond_cache(self, lines: Floats) -> Floats:
        """The part of so many lines that the near cache does not hold."""
        return 1 - np.minimum(1.0, self.cache_bytes / np.maximum(lines * LINE_BYTES, 1))


def _distinct_of(ids: Floats, number: Floats) -> Floats:
    """Number of parts, of so many, that ids fall on if they fall evenly."""
    parts = np.maximum(number, 1)
    found: Floats = np.minimum(-parts * np.expm1(-ids / parts), ids)
    return found


def even_rows(distinct: Floats, ids: Floats) -> Floats:
    """Number of rows ``R`` on which ``N`` ids that fall evenly have ``U`` distinct ones: ``U = R (1 - exp(-N / R))``.

    So one number says how skewed ids are, and estimates how many of another number of them are distinct.

    Args:
        distinct: ``U``, above 0.
        ids: ``N``, more than ``U``.
    """
    # (1 - exp(-x)) / x = U / N falls in x = N / R, which is between 0 and N / U.
    low, high = np.zeros_like(ids), ids / distinct
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_few = -np.expm1(-middle) * ids < middle * distinct
        low, high = np.where(is_few, low, middle), np.where(is_few, middle, high)
    found: Floats = ids / high
    return found
