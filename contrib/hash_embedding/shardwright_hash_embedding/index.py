"""Which row each id has: births, uses and evictions, in NumPy, with no loop over ids.

Legend: N ids, R rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwright_hash_embedding.settings import LRU, HashSettings

Ints = npt.NDArray[np.int64]

NONE = -1
"""The row of an id that has none."""


class RowIndex:
    """The rows of one block.

    Args:
        num_rows: how many there are to give.
        settings: when rows are born, and which make room.

    Attributes:
        keys: the id of each row: ``[R]``.
        uses: how often each was looked up in training; 0 for a row that nobody has: ``[R]``.
        last_use: the step in which it was last: ``[R]``.
        num_evicted: how many rows have been taken from their ids.
    """

    def __init__(self, num_rows: int, settings: HashSettings) -> None:
        self._settings = settings
        self.keys, self.uses, self.last_use = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))
        self._step = 0
        self.num_evicted = 0
        self._trial_keys = self._trial_counts = np.empty(0, dtype=np.int64)
        self._sort()

    def _sort(self) -> None:
        used = np.flatnonzero(self.uses)
        self._sorted_rows = used[np.argsort(self.keys[used])]
        self._sorted_keys = self.keys[self._sorted_rows]

    def find(self, ids: Ints) -> Ints:
        """The row of each id, or :data:`NONE`: ``[N]``."""
        if not len(self._sorted_keys):
            return np.full(len(ids), NONE, dtype=np.int64)
        places = np.searchsorted(self._sorted_keys, ids).clip(max=len(self._sorted_keys) - 1)
        return np.where(self._sorted_keys[places] == ids, self._sorted_rows[places], NONE)

    def see(self, ids: Ints) -> tuple[Ints, Ints]:
        """A training step looks ids up: count their uses, and bear the rows of those that are seen often enough.

        Args:
            ids: ``[N]``, any number of times each.

        Returns:
            The row of each id, or :data:`NONE`: ``[N]``; and the rows that were born.
        """
        self._step += 1
        keys, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
        rows = self.find(keys)
        known = rows != NONE
        self._use(rows[known], counts[known])
        born = self._bear(*self._tried(keys[~known], counts[~known]))
        if len(born):
            self._sort()
            rows = self.find(keys)
        return rows[place], born

    def _use(self, rows: Ints, counts: Ints) -> None:
        self.uses[rows] += counts
        self.last_use[rows] = self._step

    def _tried(self, keys: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Those of new ids that were seen often enough; the others are on trial, as many as there are rows."""
        if self._settings.min_sightings == 1:
            return keys, counts
        merged, place = np.unique(np.concatenate([self._trial_keys, keys]), return_inverse=True)
        seen = np.bincount(place, np.concatenate([self._trial_counts, counts])).astype(np.int64)
        ready = seen >= self._settings.min_sightings
        kept = np.flatnonzero(~ready)
        kept = np.sort(kept[np.argsort(-seen[kept], kind="stable")][: len(self.keys)])
        self._trial_keys, self._trial_counts = merged[kept], seen[kept]
        return merged[ready], seen[ready]

    def _bear(self, keys: Ints, counts: Ints) -> Ints:
        """Give ids rows: first those that nobody has, then those that are evicted; no row that this step uses."""
        order = np.argsort(-counts, kind="stable")  # should there be too few rows, those seen most get one
        free = np.flatnonzero(self.uses == 0)[: len(keys)]
        evicted = self._worst(len(keys) - len(free))
        rows = np.concatenate([free, evicted])
        chosen = order[: len(rows)]
        self.num_evicted += len(evicted)
        self.keys[rows], self.uses[rows] = keys[chosen], 0
        self._use(rows, counts[chosen])
        return rows

    def _worst(self, count: int) -> Ints:
        """The rows that make room, of those that this step does not use."""
        if not count:
            return np.empty(0, dtype=np.int64)
        idle = np.flatnonzero((self.uses > 0) & (self.last_use < self._step))
        return idle[np.argsort(self._order(self.uses[idle], self.last_use[idle]), kind="stable")][:count]

    def _order(self, uses: Ints, last_use: Ints) -> Ints:
        """The order in which rows make room, as numbers."""
        first, then = (last_use, uses) if self._settings.evict == LRU else (uses, last_use)
        places = np.empty(len(uses), dtype=np.int64)
        places[np.lexsort((then, first))] = np.arange(len(uses))
        return places

    def load(self, keys: Ints, uses: Ints, last_use: Ints, mine: npt.NDArray[np.bool_]) -> Ints:
        """Take over rows; if there are more than room for, those that would be evicted last.

        Args:
            keys: of the rows of a whole table: ``[T]``.
            uses: of each.
            last_use: of each.
            mine: which of the ids belong here.

        Returns:
            For each row here, which of those it is, or -1: ``[R]``.
        """
        theirs = np.flatnonzero(mine & (uses > 0))
        kept = theirs[np.argsort(-self._order(uses[theirs], last_use[theirs]))][: len(self.keys)]
        source = np.full(len(self.keys), NONE, dtype=np.int64)
        source[: len(kept)] = np.sort(kept)
        for own, given in ((self.keys, keys), (self.uses, uses), (self.last_use, last_use)):
            own[:] = np.where(source == NONE, 0, given[source])
        self._step = int(last_use.max(initial=0))
        self._trial_keys = self._trial_counts = np.empty(0, dtype=np.int64)
        self._sort()
        return source
