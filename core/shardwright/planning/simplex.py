"""Linear programs whose columns are made as they are needed, by the revised simplex method.

The programs of planning have a few dozen rows, and the inverse of the basis is kept (Dantzig and Orchard-Hays 1954): a
pivot takes microseconds, where a general solver takes half a second to import. New columns go on from the basis that
there is.

Legend: R rows, N columns.
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.options import Floats, Ints

TOLERANCE = 1e-9
# The inverse is made anew after so many pivots; a pivot is no less than this, nor is a value less than none by more.
_REFRESH, LEAST_PIVOT = 60, 1e-7


class Simplex:
    """The least ``cost @ x`` of ``columns @ x = limit`` and ``x >= 0``.

    Args:
        columns: ``[R, N]``.
        cost: ``[N]``.
        limit: ``[R]``.
    """

    def __init__(self, columns: Floats, cost: Floats, limit: Floats) -> None:
        self._columns, self._cost, self._limit = columns, cost, limit
        self.basis: Ints = np.empty(0, dtype=np.int64)
        """The columns in use: ``[R]``."""
        self._inverse: Floats = np.empty((0, 0))
        self._value: Floats = np.empty(0)
        self._pivots = 0

    def begin(self, basis: Ints) -> bool:
        """Begin with a basis, ``[R]``; whether it is one, and no value is negative."""
        self.basis = basis.copy()
        return self._refresh() and bool((self._value >= -LEAST_PIVOT).all())

    def add(self, columns: Floats, cost: Floats) -> None:
        """Add columns ``[R, N']`` with their costs ``[N']``."""
        self._columns, self._cost = np.hstack([self._columns, columns]), np.append(self._cost, cost)

    @property
    def size(self) -> int:
        """The entries of all columns."""
        return int(self._columns.size)

    def solve(self, most_pivots: int, enough: float = -np.inf) -> bool:
        """Pivot as long as that is of use; whether no column would make it less.

        Args:
            most_pivots: at most.
            enough: what need not be less.
        """
        for _ in range(most_pivots):
            reduced = self._cost - self.prices @ self._columns
            entering = int(reduced.argmin())
            if reduced[entering] >= -TOLERANCE:
                return True
            if not self._pivot(entering) or self.value <= enough:
                break
        return False

    @property
    def value(self) -> float:
        """The cost of the solution so far."""
        return float(self._cost[self.basis] @ self._value)

    @property
    def prices(self) -> Floats:
        """What one more of each row's limit would cost: ``[R]``."""
        prices: Floats = self._cost[self.basis] @ self._inverse
        return prices

    @property
    def solution(self) -> Floats:
        """How much there is of each column: ``[N]``."""
        values = np.zeros(len(self._cost))
        values[self.basis] = np.maximum(self._value, 0.0)
        return values

    def _pivot(self, entering: int) -> bool:
        column = self._inverse @ self._columns[:, entering]
        rows = np.flatnonzero(column > LEAST_PIVOT)
        if not len(rows):
            return False
        ratio = np.maximum(self._value[rows], 0.0) / column[rows]
        # Of rows that leave at about the same step, the largest pivot keeps the inverse accurate.
        row = int(rows[np.where(ratio <= ratio.min() + 1e-9, column[rows], 0.0).argmax()])
        pivot = self._inverse[row] / column[row]
        step = self._value[row] / column[row]
        self._value -= step * column
        self._value[row] = step
        self._inverse -= column[:, None] * pivot
        self._inverse[row] = pivot
        self.basis[row] = entering
        self._pivots += 1
        return self._pivots % _REFRESH != 0 or self._refresh()

    def _refresh(self) -> bool:
        """Make the inverse anew; whether there is one."""
        try:
            inverse = np.asarray(np.linalg.inv(self._columns[:, self.basis]), dtype=np.float64)
        except np.linalg.LinAlgError:
            return False
        self._inverse, self._value = inverse, inverse @ self._limit
        return True
