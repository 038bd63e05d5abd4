"""An index from ids to rows: births, uses and evictions, in NumPy, with no loop over ids.

Legend: N ids, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

import shardwright as sw
from shardwright_hash_embedding.settings import NEVER, STATE, HashSettings, Ints

NONE = -1
"""The row of an id that has none."""


class HashIndex(sw.RowIndex):
    """The rows of one block.

    Args:
        num_rows: number of rows to give to ids.
        settings: rules of births and evictions.

    Attributes:
        keys: id of each row: ``[R]``.
        uses: lookups of each row in training; 0 for a row without an id: ``[R]``.
        last_use: step of each row's last lookup: ``[R]``.
        num_evicted: number of rows that have been taken from their ids.
    """

    def __init__(self, num_rows: int, settings: HashSettings) -> None:
        self._least, self._score = settings.min_sightings, settings.score()
        self._evicts = settings.evict != NEVER
        self.keys, self.uses, self.last_use = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))
        self._step = 0
        room = num_rows if self._least > 1 else 0
        self._trial_keys, self._trial_counts = (np.zeros(room, dtype=np.int64) for _ in range(2))
        self._num_on_trial = 0
        self._sort(0)

    def _sort(self, num_used: int) -> None:
        """Make the sorted index; rows are given in order, so those from ``num_used`` on are free."""
        self._num_used = num_used
        self._sorted_rows = np.argsort(self.keys[:num_used])
        self._sorted_keys = self.keys[self._sorted_rows]

    def resolve(  # noqa: D102 - described in the base class
        self, keys: Tensor, *, training: bool, columns: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        seen = [column.numpy() for column in (columns or {}).values()]  # one column is asked for, or none
        rows, born = self.see(keys.numpy(), *seen) if training else (self.find(keys.numpy()), _NO_ROWS)
        return torch.from_numpy(rows), torch.from_numpy(born)

    def rows_in_use(self) -> Tensor:  # noqa: D102
        return torch.from_numpy(np.flatnonzero(self.uses))

    def state(self) -> Mapping[str, Tensor]:  # noqa: D102
        values = zip(STATE, (self.keys, self.uses, self.last_use), strict=True)
        return {name: torch.from_numpy(value).unsqueeze(1) for name, value in values}

    def find(self, ids: Ints) -> Ints:
        """The row of each id, or :data:`NONE`: ``[N]``."""
        if not len(self._sorted_keys):
            return np.full(len(ids), NONE, dtype=np.int64)
        places = np.searchsorted(self._sorted_keys, ids).clip(max=len(self._sorted_keys) - 1)
        return np.where(self._sorted_keys[places] == ids, self._sorted_rows[places], NONE)

    def see(self, ids: Ints, seen: Ints | None = None) -> tuple[Ints, Ints]:
        """A training step looks ids up: count their uses, and bear the rows of those that are seen often enough.

        Args:
            ids: ``[N]``, any number of times each.
            seen: number of sightings that each stands for, ``[N]``; ``None`` if one. Below 1 it is none: an id has its
                row, if it has one, and is not counted.

        Returns:
            The row of each id, or :data:`NONE`: ``[N]``; and the rows that were born.
        """
        self._step += 1
        keys, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
        if seen is not None:
            counts = np.zeros_like(counts)
            np.add.at(counts, place, seen.clip(min=0))
        rows = self.find(keys)
        known, new = rows != NONE, (rows == NONE) & (counts > 0)
        self._use(rows[known], counts[known])
        born = self._bear(*self._tried(keys[new], counts[new]))
        if len(born):
            rows = self.find(keys)
        return rows[place], born

    def _use(self, rows: Ints, counts: Ints) -> None:
        self.uses[rows] += counts
        self.last_use[rows] = self._step

    def _tried(self, keys: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Those of new ids that were seen often enough; the others are on trial, as many as there are rows."""
        if self._least == 1:
            return keys, counts
        before = slice(self._num_on_trial)
        merged, place = np.unique(np.concatenate([self._trial_keys[before], keys]), return_inverse=True)
        seen = np.bincount(place, np.concatenate([self._trial_counts[before], counts])).astype(np.int64)
        ready = seen >= self._least
        kept = np.flatnonzero(~ready)
        kept = np.sort(kept[np.argsort(-seen[kept], kind="stable")][: len(self.keys)])
        self._num_on_trial = len(kept)
        self._trial_keys[: len(kept)], self._trial_counts[: len(kept)] = merged[kept], seen[kept]
        return merged[ready], seen[ready]

    def _bear(self, keys: Ints, counts: Ints) -> Ints:
        """Give ids rows: first those that nobody has, then those that are evicted; no row that this step uses."""
        order = np.argsort(-counts, kind="stable")  # should there be too few rows, those seen most get one
        free = np.arange(self._num_used, min(self._num_used + len(keys), len(self.keys)))
        evicted = self._worst(len(keys) - len(free))
        rows = np.concatenate([free, evicted])
        chosen = order[: len(rows)]
        self._num_used += len(free)
        self._reindex(self.keys[evicted], keys[chosen], rows)
        self.keys[rows], self.uses[rows] = keys[chosen], 0
        self._use(rows, counts[chosen])
        return rows

    def _reindex(self, gone: Ints, keys: Ints, rows: Ints) -> None:
        """Take keys out of the sorted index, and put others in, whose rows are given."""
        if len(gone):
            self.num_evicted += len(gone)
            places = np.searchsorted(self._sorted_keys, gone)
            self._sorted_keys = np.delete(self._sorted_keys, places)
            self._sorted_rows = np.delete(self._sorted_rows, places)
        order = np.argsort(keys)
        places = np.searchsorted(self._sorted_keys, keys[order])
        self._sorted_keys = np.insert(self._sorted_keys, places, keys[order])
        self._sorted_rows = np.insert(self._sorted_rows, places, rows[order])

    def _worst(self, count: int) -> Ints:
        """The rows that make room, of those that this step does not use."""
        if not count or not self._evicts:
            return _NO_ROWS
        idle = np.flatnonzero((self.uses > 0) & (self.last_use < self._step))
        if count < len(idle):  # most are not near: a partition leaves few to sort
            scores = self._score(self.uses[idle], self.last_use[idle])
            idle = idle[scores <= np.partition(scores, count - 1)[count - 1]]
        return idle[self._order(self.uses[idle], self.last_use[idle])][:count]

    def _order(self, uses: Ints, last_use: Ints) -> Ints:
        """The rows in the order in which they make room."""
        return np.lexsort((uses, last_use, self._score(uses, last_use)))

    def load(self, state: Mapping[str, Tensor]) -> Tensor:
        """Take over keys; if there are more than room for, those that would be evicted last."""
        keys, uses, last_use = (state[name].flatten().cpu().numpy() for name in STATE)
        born = np.flatnonzero(uses)
        kept = born[self._order(uses[born], last_use[born])[::-1]][: len(self.keys)]
        source = np.full(len(self.keys), NONE, dtype=np.int64)
        source[: len(kept)] = np.sort(kept)
        for own, given in ((self.keys, keys), (self.uses, uses), (self.last_use, last_use)):
            own[:] = 0
            own[: len(kept)] = given[source[: len(kept)]]
        self._step = int(last_use.max(initial=0))
        self._num_on_trial = 0
        self._sort(len(kept))
        return torch.from_numpy(source)


_NO_ROWS = np.empty(0, dtype=np.int64)
