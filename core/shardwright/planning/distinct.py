"""The distinct values of columns.

``np.unique`` without indices, and what is built on it, imports ``numpy.ma`` when first called, which takes as long as
planning a hundred tables.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Number = TypeVar("_Number", np.int64, np.float64)


def distinct(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """The values, each once, in rising order.

    Args:
        values: ``[N]``.
    """
    ordered = np.sort(values, axis=None)
    if not len(ordered):
        return ordered
    # In rising order, a value is new where it differs from the one before it.
    result: npt.NDArray[_Number] = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return result


def without(values: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The distinct values that are not among others: whole numbers that are not negative, and not large.

    Args:
        values: ``[N]``.
        others: ``[K]``.
    """
    is_in = np.zeros(1 + max(int(values.max(initial=0)), int(others.max(initial=0))), dtype=bool)
    is_in[values] = True
    is_in[others] = False
    return np.flatnonzero(is_in)
