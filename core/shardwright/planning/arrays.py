"""The columns of which planning is made, the marks that stand in them, their distinct values, the size of an id."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_Number = TypeVar("_Number", np.int64, np.float64)

ID_BYTES = 8
"""Ids travel as 64-bit integers."""

FREE = -1
"""The rank, or rank inside a host, of a shard that may go to any."""

NO_GANG = -1
"""The gang of a shard that needs no other on its host."""


def distinct(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """The values, each once, in rising order.

    Args:
        values: ``[N]``.
    """
    # Without indices, NumPy imports numpy.ma when first called, which takes as long as planning a hundred tables.
    result: npt.NDArray[_Number] = np.unique(values, return_index=True)[0]
    return result


def without(values: Ints, others: Ints) -> Ints:
    """The distinct values that are not among others: whole numbers that are not negative, and not large.

    Args:
        values: ``[N]``.
        others: ``[K]``.
    """
    is_in = np.zeros(1 + max(int(values.max(initial=0)), int(others.max(initial=0))), dtype=bool)
    is_in[values] = True
    is_in[others] = False
    return np.flatnonzero(is_in)
