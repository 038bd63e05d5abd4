"""Linear programs that grow by columns, solved by HiGHS (Huangfu and Hall 2018). Legend: N columns, R rows."""

from __future__ import annotations

import numpy as np

from shardwright.planning.arrays import Floats
from shardwright_plugins.proposers.proving.solver import Entries, silent_solver


class LinearProgram:
    """The least ``cost @ x`` of ``lower <= columns @ x <= upper`` and ``x >= 0``, to which columns are added.

    With new columns the solver goes on from the basis that it has.

    Args:
        lower: ``[R]``.
        upper: ``[R]``.
    """

    def __init__(self, lower: Floats, upper: Floats) -> None:
        self._solver = silent_solver(
            {"presolve": "off", "simplex_strategy": 4}
        )  # 4: the primal simplex method
        nothing = np.empty(0, dtype=np.int32)
        self._solver.addRows(
            len(lower), lower, upper, 0, np.zeros(len(lower), dtype=np.int32), nothing, np.empty(0)
        )
        self.size = 0
        """Number of entries of columns that were added."""

    def add(self, cost: Floats, columns: Floats) -> None:
        """Add columns ``[R, N]`` with their costs ``[N]``."""
        start, row, value = Entries.of(columns).by_column(len(cost))
        zero, most = np.zeros(len(cost)), np.full(len(cost), np.inf)
        self._solver.addCols(
            len(cost), cost, zero, most, len(row), start[:-1].astype(np.int32), row.astype(np.int32), value
        )
        self.size += len(row)

    def solve(self) -> bool:
        """Find the least; whether there is one."""
        import highspy

        self._solver.run()
        return bool(self._solver.getModelStatus() == highspy.HighsModelStatus.kOptimal)

    @property
    def value(self) -> float:
        """The cost of the solution."""
        return float(self._solver.getInfo().objective_function_value)

    @property
    def pivots(self) -> int:
        """Iterations of the simplex method that the last solution took."""
        return int(self._solver.getInfo().simplex_iteration_count)

    @property
    def solution(self) -> Floats:
        """Amount of each column in the solution: ``[N]``."""
        return np.maximum(np.array(self._solver.getSolution().col_value, dtype=np.float64), 0.0)

    @property
    def prices(self) -> Floats:
        """Price of one more of each row's limit: ``[R]``."""
        return np.array(self._solver.getSolution().row_dual, dtype=np.float64)
