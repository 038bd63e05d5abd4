"""exact: the best placement there is, by the mixed-integer solver HiGHS."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.errors import UnknownPluginError
from shardwright.planning.options import FREE, NO_GANG, Ints
from shardwright.planning.placement import Misfit, ProposedShards
from shardwright_plugins.partitioners.longest_first import LongestFirst, as_bins

_SECONDS = 20.0


class Exact(Partitioner):
    """Minimises the largest rank's time exactly, for few or lumpy shards; needs ``pip install highspy``.

    Equal shards are counted, not told apart: a whole number for each kind and rank. What ``longest_first`` finds is
    the start and the fall-back, where the solver comes to its time limit with nothing better. Proposals with gangs are
    left to ``longest_first``.
    """

    name: ClassVar[str] = "exact"
    is_last_resort: ClassVar[bool] = True

    def __init__(self, seconds: float = _SECONDS) -> None:
        self.seconds = seconds

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise UnknownPluginError(
                "partitioner 'exact' needs the solver HiGHS, which is not installed: pip install highspy"
            ) from error
        first = LongestFirst().place(shards)
        if (shards.gang != NO_GANG).any() or not (~shards.is_fixed).any():
            return first
        found = _Model(shards, highspy).solve(self.seconds)
        if found is None:
            return first
        if isinstance(first, Misfit):
            return found
        return min(found, first, key=lambda ranks: float(shards.loads_ms(ranks).max()))


class _Model:
    """Kinds of shards K times ranks W: how many of each kind on each rank; and the largest time."""

    def __init__(self, shards: ProposedShards, highspy: Any) -> None:
        self._shards, self._highspy = shards, highspy
        bins = as_bins(shards)
        self._used = bins.used
        self._free = np.flatnonzero(shards.rank == FREE)
        _, leader, kind, count = np.unique(
            bins.kind[self._free], return_index=True, return_inverse=True, return_counts=True
        )
        self._kind, self._count, self._size = kind.reshape(-1), count, bins.size[self._free[leader]]

    def solve(self, seconds: float) -> Ints | None:
        """The ranks of all shards, if any placement was found in time."""
        solver = self._highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("random_seed", 0)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 1e-4)
        solver.passModel(self._model())
        solver.run()
        if not np.isfinite(solver.getInfo().objective_function_value):
            return None
        values = np.array(solver.getSolution().col_value)[:-1]
        if len(values) != len(self._count) * self._shards.world_size:
            return None
        return self._ranks(np.rint(values).astype(np.int64).reshape(len(self._count), -1))

    def _model(self) -> Any:
        """Columns: the numbers, kind after kind, then the largest time. Rows: kinds, then ranks by dimension."""
        kinds, ranks = len(self._count), self._shards.world_size
        dims = self._size.shape[1]
        scale = np.maximum(
            np.append(self._used[:, 0].mean() + self._total()[0] / ranks, self._capacity()), 1e-30
        )
        matrix = np.zeros((kinds + ranks * dims, kinds * ranks + 1))
        for kind in range(kinds):
            matrix[kind, kind * ranks : (kind + 1) * ranks] = 1
            for dim in range(dims):
                rows = kinds + dim * ranks + np.arange(ranks)
                matrix[rows, kind * ranks + np.arange(ranks)] = self._size[kind, dim] / scale[dim]
        matrix[kinds : kinds + ranks, -1] = -1
        room = (self._shards.capacity_bytes - self._used[:, 1:]) / scale[1:]
        upper = np.concatenate([self._count, -self._used[:, 0] / scale[0], room.T.reshape(-1)])
        lower = np.concatenate([self._count, np.full(ranks * dims, -np.inf)])
        return self._as_lp(matrix, lower, upper)

    def _total(self) -> Any:
        return self._count @ self._size

    def _capacity(self) -> Any:
        return self._shards.capacity_bytes.max(axis=0)

    def _as_lp(self, matrix: Any, lower: Any, upper: Any) -> Any:
        highspy = self._highspy
        model = highspy.HighsLp()
        model.num_row_, model.num_col_ = matrix.shape
        model.col_cost_ = np.append(np.zeros(matrix.shape[1] - 1), 1.0)
        model.col_lower_ = np.zeros(matrix.shape[1])
        most = np.repeat(self._count, self._shards.world_size).astype(np.float64)
        model.col_upper_ = np.append(most, np.inf)
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        rows, columns = np.nonzero(matrix)
        model.a_matrix_.start_ = np.searchsorted(rows, np.arange(matrix.shape[0] + 1)).astype(np.int32)
        model.a_matrix_.index_ = columns.astype(np.int32)
        model.a_matrix_.value_ = matrix[rows, columns]
        kinds = [highspy.HighsVarType.kInteger] * (matrix.shape[1] - 1)
        model.integrality_ = [*kinds, highspy.HighsVarType.kContinuous]
        return model

    def _ranks(self, numbers: Ints) -> Ints | None:
        """The ranks of all shards from how many of each kind go to each rank; ``None`` if rounding broke a limit."""
        ranks = self._shards.rank.copy()
        for kind, row in enumerate(numbers):
            places = np.repeat(np.arange(len(row)), np.maximum(row, 0))
            mine = self._free[self._kind == kind]
            if len(places) != len(mine):
                return None
            ranks[mine] = places
        fits = (self._shards.used_bytes(ranks) <= self._shards.capacity_bytes).all()
        return ranks if fits else None
