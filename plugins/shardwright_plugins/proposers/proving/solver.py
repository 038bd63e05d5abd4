"""Mixed-integer programs, solved by HiGHS (Huangfu and Hall 2018); it is imported when one is solved.

The same program has the same answer on any machine: the solver runs on one thread, and is limited by nodes of its tree,
unless whoever asks has a limit of time.

Legend: N columns (numbers to be chosen), R rows.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Bools, Floats, Ints
from shardwright.planning.watch import Watch

# Microseconds of a program's root and of a node of its tree, for each column (measured); and the least time there is.
_ROOT_COLUMN_US, _NODE_COLUMN_US = 1000.0, 10.0
_LEAST_S = 0.01


@frozen(eq=False)
class Entries:
    """A sparse matrix by its entries; those of one place are added up.

    Args:
        row: row of each entry.
        column: column of each entry.
        value: value of each entry.
    """

    row: Ints
    column: Ints
    value: Floats

    @classmethod
    def of(cls, dense: Floats) -> Entries:
        """The entries of a dense matrix ``[R, N]``."""
        row, column = np.nonzero(dense)
        return cls(row, column, dense[row, column])

    def by_column(self, num_columns: int) -> tuple[Ints, Ints, Floats]:
        """Sort the entries by column: first entry of each column ``[N + 1]``, then rows and values."""
        height = int(self.row.max(initial=-1)) + 1
        place = self.column * height + self.row
        order = np.argsort(place, kind="stable")
        place, value = place[order], self.value[order]
        first = np.flatnonzero(np.diff(place, prepend=-1))
        value = np.add.reduceat(value, first) if len(first) else value
        start = np.searchsorted(place[first], np.arange(num_columns + 1) * height)
        return start, place[first] % max(height, 1), value


@frozen(eq=False)
class MixedSolution:
    """Result of the solver.

    Args:
        x: the best numbers: ``[N]``; ``None`` if none were found.
        bound: no numbers cost less.
        nodes: number of nodes of its tree that were looked at.
        is_infeasible: it is proven that there are none.
    """

    x: Floats | None
    bound: float
    nodes: int
    is_infeasible: bool


@frozen(eq=False)
class MixedProgram:
    """The least ``cost @ x`` of ``lower <= matrix @ x <= upper`` and ``0 <= x <= most``.

    Args:
        cost: ``[N]``.
        matrix: ``[R, N]``.
        lower: ``[R]``.
        upper: ``[R]``.
        most: ``[N]``.
        is_whole: true for columns that are whole numbers: ``[N]``.
    """

    cost: Floats
    matrix: Entries
    lower: Floats
    upper: Floats
    most: Floats
    is_whole: Bools

    def solve(
        self,
        *,
        most_nodes: int,
        precision: float,
        watch: Watch,
    ) -> MixedSolution:
        """Ask the solver.

        Args:
            most_nodes: largest number of nodes of its tree.
            precision: it ends where its bound is within this part of its best solution.
            watch: ends it, and counts its work.
        """
        import highspy

        columns, seconds = len(self.cost), max(watch.seconds_left, _LEAST_S)
        solver = silent_solver({"mip_max_nodes": most_nodes, "mip_rel_gap": precision, "time_limit": seconds})
        watch.spend(_ROOT_COLUMN_US * columns)
        nodes = 0

        def look(event: Any) -> None:
            nonlocal nodes
            watch.spend(_NODE_COLUMN_US * columns * (event.data_out.mip_node_count - nodes))
            nodes = event.data_out.mip_node_count
            if watch.is_over:
                event.interrupt()

        solver.cbMipInterrupt += look
        solver.passModel(self._model())
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        is_infeasible = status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        )
        has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        x = np.array(solver.getSolution().col_value) if has_solution else None
        return MixedSolution(x, float(info.mip_dual_bound), max(int(info.mip_node_count), 0), is_infeasible)

    def _model(self) -> Any:
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.cost), len(self.lower)
        model.col_cost_, model.col_lower_, model.col_upper_ = self.cost, np.zeros(len(self.cost)), self.most
        model.row_lower_, model.row_upper_ = self.lower, self.upper
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        matrix.start_, matrix.index_, matrix.value_ = self.matrix.by_column(len(self.cost))
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[whole] for whole in self.is_whole.astype(int).tolist()]
        return model


def silent_solver(options: dict[str, Any]) -> Any:
    """A solver on one thread that prints nothing.

    Its constructor prints a licence notice since HiGHS 1.16, before the option that turns output off can be set.
    """
    import highspy

    with _c_stdout_discarded():
        solver: Any = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, value)
    return solver


_C_STDOUT = threading.Lock()


@contextmanager
def _c_stdout_discarded() -> Iterator[None]:
    """Discard what C code prints to its stream ``stdout``.

    The file descriptor stays as it is, so that nothing that Python or another process writes is lost. C libraries
    other than glibc do not let the stream be replaced: there everything is printed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.fopen.restype = ctypes.c_void_p
    with _C_STDOUT:
        stdout, nowhere = ctypes.c_void_p.in_dll(libc, "stdout"), libc.fopen(os.devnull.encode(), b"w")
        kept, stdout.value = stdout.value, nowhere
        try:
            yield
        finally:
            stdout.value = kept
            libc.fclose(ctypes.c_void_p(nowhere))
