"""exact: the fastest placement, found by the mixed-integer solver HiGHS."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints
from shardwright.planning.search.placement import Misfit, ProposedShards
from shardwright.planning.watch import Watch
from shardwright_plugins.partitioners.longest_first import LongestFirst, as_bins
from shardwright_plugins.proposers.proving.solver import Entries, MixedProgram

# The nodes of the solver's tree, times columns; and the seconds that only far slower machines need.
_NODE_COLUMNS, _LEAST_NODES, _MOST_NODES = 100_000, 20, 1000
_SECONDS = 300.0
_PRECISION = 1e-4
# A solver is not asked for more numbers.
_MOST_NUMBERS = 3000


class Exact(Partitioner):
    """Minimises the largest rank's time exactly, for few or lumpy shards; packs what nothing else gets in.

    What ``longest_first`` finds is the start. Then a solver is asked where it can answer: proposals
    with gangs or of many thousand numbers are left as they are. Equal shards are counted, not told apart: a whole
    number for each kind and rank. The limit is a number of nodes of the solver's tree, so the answer does not depend
    on the machine's speed, unless that is so slow that ``seconds`` end it.
    """

    name: ClassVar[str] = "exact"
    is_last_resort: ClassVar[bool] = True

    def __init__(self, seconds: float = _SECONDS) -> None:
        self.seconds = seconds

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        first = LongestFirst().place(shards)
        if (shards.gang != NO_GANG).any() or shards.is_fixed.all():
            return first
        model = _Model(shards)
        found = model.solve(self.seconds) if model.num_numbers <= _MOST_NUMBERS else None
        if found is None:
            return first
        if isinstance(first, Misfit):
            return found
        return min(found, first, key=lambda ranks: float(shards.loads_ms(ranks).max()))


class _Model:
    """Kinds of shards K times ranks W: how many of each kind on each rank; and the largest time."""

    def __init__(self, shards: ProposedShards) -> None:
        self._shards = shards
        bins = as_bins(shards)
        self._used = bins.used
        self._free = np.flatnonzero(shards.rank == FREE)
        _, leader, kind, count = np.unique(
            bins.kind[self._free], return_index=True, return_inverse=True, return_counts=True
        )
        self._kind, self._count, self._size = kind.reshape(-1), count, bins.size[self._free[leader]]

    @property
    def num_numbers(self) -> int:
        """Count of whole numbers to choose."""
        return len(self._count) * self._shards.world_size

    def solve(self, seconds: float) -> Ints | None:
        """The ranks of all shards, if any placement was found in time."""
        found = self._program().solve(
            most_nodes=int(np.clip(_NODE_COLUMNS / self.num_numbers, _LEAST_NODES, _MOST_NODES)),
            precision=_PRECISION,
            watch=Watch(seconds),
        )
        if found.x is None:
            return None
        return self._ranks(np.rint(found.x[:-1]).astype(np.int64).reshape(len(self._count), -1))

    def _program(self) -> MixedProgram:
        """Columns: the numbers, kind after kind, then the largest time. Rows: kinds, then ranks by dimension."""
        kinds, ranks = len(self._count), self._shards.world_size
        numbers = kinds * ranks
        scale = self._scale()
        room = self._shards.capacity_bytes - self._used[:, 1:]
        # Time: used + placed - largest <= 0. Memory: used + placed <= capacity. Both in parts of the scale.
        limits = np.hstack([-self._used[:, :1], room]) / scale
        return MixedProgram(
            cost=np.append(np.zeros(numbers), 1.0),
            matrix=self._matrix(scale),
            lower=np.concatenate([self._count, np.full(limits.size, -np.inf)]),
            upper=np.concatenate([self._count, limits.T.reshape(-1)]),
            most=np.append(np.repeat(self._count, ranks).astype(np.float64), np.inf),
            is_whole=np.arange(numbers + 1) < numbers,
        )

    def _scale(self) -> Floats:
        """Estimate a rank's supply of each dimension: ``[D]``."""
        mean_ms = self._used[:, 0].mean() + (self._count @ self._size)[0] / self._shards.world_size
        scale: Floats = np.maximum(np.append(mean_ms, self._shards.capacity_bytes.max(axis=0)), 1e-30)
        return scale

    def _matrix(self, scale: Floats) -> Entries:
        """Each number counts once in the row of its kind, and what its shards take in those of its rank."""
        kinds, ranks, dims = len(self._count), self._shards.world_size, len(scale)
        number = np.arange(kinds * ranks)
        kind, rank = np.divmod(number, ranks)
        held = (self._size / scale)[kind]
        # After the rows of the kinds come those of the ranks, one dimension after the other.
        rows = kinds + np.arange(dims) * ranks + rank[:, None]
        # Three groups: a number in its kind's row, its load in its rank's rows, and the largest time in those of time.
        return Entries(
            np.concatenate([kind, rows.reshape(-1), kinds + np.arange(ranks)]),
            np.concatenate([number, np.repeat(number, dims), np.full(ranks, len(number))]),
            np.concatenate([np.ones(len(number)), held.reshape(-1), np.full(ranks, -1.0)]),
        )

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
