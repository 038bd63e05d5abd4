"""The distinct rows of arrays of patterns."""

from __future__ import annotations

import numpy as np

from shardwright.planning.arrays import Floats


def distinct_rows(rows: Floats) -> Floats:
    """The rows, each once, in the order in which they come first; much faster than sorting wide rows.

    Args:
        rows: ``[N, K]``.
    """
    # Last to first, so that of equal rows the first one's index stays.
    first = {row.tobytes(): index for index, row in reversed(list(enumerate(rows)))}
    return rows[sorted(first.values())]


def sorted_rows(rows: Floats) -> Floats:
    """The rows, each once, in rising order, as ``np.unique`` has them with ``axis=0``.

    Args:
        rows: ``[N, K]``.
    """
    once = distinct_rows(rows)
    # lexsort takes its first key last.
    return once[np.lexsort(once.T[::-1])] if once.size else once
