"""The mixed-integer solver HiGHS (Huangfu and Hall 2018), as SciPy brings it; imported when something is solved.

Legend: N columns (numbers to be chosen), K rows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.planning.options import Bools, Floats

_STDOUT = 1
_ONE_AT_A_TIME = threading.RLock()
# The solver's tolerance; the nodes of its tree for a small program, and seconds that only far slower machines need.
_EXACT, _NODES, _SECONDS = 2e-6, 2000, 300.0


@frozen(eq=False)
class MixedProgram:
    """The least ``cost @ x`` of ``lower <= matrix @ x <= upper`` and ``0 <= x <= most``.

    Args:
        cost: ``[N]``.
        matrix: anything that SciPy takes as a matrix, sparse ones too: ``[K, N]``.
        lower: ``[K]``.
        upper: ``[K]``.
        most: ``[N]``.
        is_whole: which columns are whole numbers: ``[N]``.
    """

    cost: Floats
    matrix: Any
    lower: Floats
    upper: Floats
    most: Floats
    is_whole: Bools

    def solve(self, *, most_nodes: int, seconds: float, precision: float) -> Any:
        """Ask the solver; the same answer on any machine, unless the seconds are too few there.

        Args:
            most_nodes: how many nodes of its tree it may look at.
            seconds: how long it may take.
            precision: it ends where its bound is within this part of its best solution.

        Returns:
            SciPy's ``OptimizeResult``; its ``x`` is ``None`` where no solution was found.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        with _quiet_stdout():
            return milp(
                self.cost,
                integrality=self.is_whole.astype(np.int64),
                bounds=Bounds(np.zeros(len(self.most)), self.most),
                constraints=LinearConstraint(self.matrix, self.lower, self.upper),
                options={"node_limit": most_nodes, "time_limit": seconds, "mip_rel_gap": precision},
            )


@frozen(eq=False)
class LinearSolution:
    """The best of a linear program.

    Args:
        value: the least cost.
        x: ``[N]``.
        prices: by how much the cost falls with a little more of each limit, zero or more: ``[K]``.
    """

    value: float
    x: Floats
    prices: Floats


@frozen(eq=False)
class LinearProgram:
    """The least ``cost @ x`` of ``at_most @ x <= limits``, ``equal @ x == wanted`` and ``0 <= x``.

    Args:
        cost: ``[N]``.
        at_most: anything that SciPy takes as a matrix, sparse ones too: ``[K, N]``.
        limits: ``[K]``.
        equal: likewise: ``[E, N]``.
        wanted: ``[E]``.
    """

    cost: Floats
    at_most: Any
    limits: Floats
    equal: Any
    wanted: Floats

    def solve(self) -> LinearSolution | None:
        """A vertex, by the dual simplex method; ``None`` if there is no solution."""
        from scipy.optimize import linprog

        with _quiet_stdout():
            found = linprog(
                self.cost,
                A_ub=self.at_most,
                b_ub=self.limits,
                A_eq=self.equal,
                b_eq=self.wanted,
                method="highs-ds",
            )
        if found.x is None or found.ineqlin.marginals is None:
            return None
        return LinearSolution(float(found.fun), found.x, np.maximum(-found.ineqlin.marginals, 0.0))


def most_worth(size: Floats, prices: Floats) -> tuple[float, Floats]:
    """What a set of shards that fits into a rank is worth at most, proven by the solver, and the best set found.

    Args:
        size: of each kind of shards, in parts of a rank: ``[K, D]``.
        prices: of each kind: ``[K]``.

    Returns:
        The bound, and how many there are of each kind: ``[K]``.
    """
    number = np.zeros(len(prices))
    worth = np.flatnonzero(prices > 0)
    if not len(worth):
        return 0.0, number
    scale, dims = float(prices.max()), size.shape[1]
    found = MixedProgram(
        cost=-prices[worth] / scale,
        matrix=size[worth].T,
        lower=np.full(dims, -np.inf),
        upper=np.ones(dims),
        most=np.floor(np.minimum(1 / np.maximum(size[worth], 1e-9), 1e9).min(axis=1) * (1 + _EXACT)),
        is_whole=np.ones(len(worth), dtype=bool),
    ).solve(most_nodes=_NODES, seconds=_SECONDS, precision=_EXACT)
    if found.x is not None:
        number[worth] = np.rint(found.x)
    bound = np.inf if found.mip_dual_bound is None else -float(found.mip_dual_bound)
    return scale * bound * (1 + _EXACT), number


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what C code prints to standard output to nowhere.

    HiGHS 1.12 prints a line from within even where it is told to be silent
    (https://github.com/ERGO-Code/HiGHS/issues/2783), and who pipes our output reads JSON there.
    """
    with _ONE_AT_A_TIME:
        try:
            sys.stdout.flush()
            _flush_c()
            kept, nowhere = os.dup(_STDOUT), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _STDOUT)
            os.close(nowhere)
        except (OSError, ValueError, AttributeError):  # there is no standard output
            yield
            return
        try:
            yield
        finally:
            _flush_c()
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _flush_c() -> None:
    """Write out what C code has printed; it waits in a buffer where standard output is a pipe."""
    try:
        ctypes.CDLL(None).fflush(None)
    except (OSError, TypeError, AttributeError):  # pragma: no cover - Windows has no such handle
        return
