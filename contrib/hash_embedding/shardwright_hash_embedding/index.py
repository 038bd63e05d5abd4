"""An index from ids to rows: births, uses and evictions, in torch, on the device of the rows.

Legend: N ids, K new ids, R rows, M rows of other blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

import shardwright as sw
from shardwright_hash_embedding.settings import NEVER, SCORES, STATE, HashSettings

_MOST_ROWS = (1 << 31) - 1  # that slots can number


class Search(Protocol):
    """The search for rows on a type of device: a module, see :mod:`.numba_search`."""

    def find(self, slots: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
        """Find the row of each id, or -1."""

    def put(self, slots: Tensor, keys: Tensor, rows: Tensor) -> None:
        """Put rows into empty slots."""


class HashIndex(sw.RowIndex):
    """The rows of one block. Which id gets which row follows from the batches alone, whatever searches for rows.

    Args:
        num_rows: number of rows to give to ids.
        settings: rules of births and evictions.
        search: search for rows.
        device: device of the rows.

    Attributes:
        keys: id of each row: ``[R]``.
        uses: lookups of each row in training; 0 for a row without an id: ``[R]``.
        last_use: step of each row's last lookup: ``[R]``.
        num_evicted: number of rows that have been taken from their ids.

    Raises:
        InvalidInputError: there are more rows than slots can number.
    """

    def __init__(
        self, num_rows: int, settings: HashSettings, search: Search, device: torch.device | str = "cpu"
    ) -> None:
        if num_rows > _MOST_ROWS:
            raise sw.InvalidInputError(
                f"a block has {num_rows} rows for keys, an index numbers {_MOST_ROWS} at most: use more ranks"
            )
        self._least, self._search = settings.min_sightings, search
        self._scores = tuple(dict.fromkeys((settings.score(), SCORES["lru"], SCORES["lfu"])))
        self._eviction = settings.evict
        self._evicts, self._lifetime = settings.evict != NEVER, settings.steps_to_live
        room = num_rows if self._least > 1 else 0
        self.keys, self.uses, self.last_use, self._trial_keys, self._trial_counts = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in (*[num_rows] * 3, room, room)
        )
        self._slots = torch.empty(2 * num_rows + 1, dtype=torch.int32, device=device)
        self._step = 0
        self._begin(0)

    def _begin(self, num_used: int) -> None:
        """Begin with the first rows in use, so many, and none on trial."""
        self._free = torch.arange(num_used, len(self.keys), device=self.keys.device)  # rising
        self._num_on_trial = 0
        self._fill_slots()

    def _fill_slots(self) -> None:
        """Make the slots anew."""
        rows = self.rows_in_use()
        self._slots.fill_(-1)
        self._search.put(self._slots, self.keys, rows)
        self._num_filled = len(rows)

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id, or -1: ``[N]``."""
        return self._search.find(self._slots, self.keys, ids.contiguous())

    def rows_in_use(self) -> Tensor:  # noqa: D102 - described in the base class
        return self.uses.nonzero().flatten()

    def state(self) -> Mapping[str, Tensor]:  # noqa: D102
        values = zip(STATE, (self.keys, self.uses, self.last_use), strict=True)
        return {name: value.unsqueeze(1) for name, value in values}

    def resolve(  # noqa: D102
        self, keys: Tensor, *, training: bool, columns: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if not training:
            return self.find(keys), keys[:0]
        (seen,) = (columns or {"": torch.ones_like(keys)}).values()
        seen = seen.clamp(min=0)
        self._step += 1
        if self._lifetime and self._step % max(1, self._lifetime // 8) == 0:
            self._expire()
        rows = self.find(keys)
        is_new = rows < 0
        new = (is_new & (seen > 0)).nonzero().flatten()
        known = ~is_new if bool(is_new.any()) else slice(None)
        self.uses.index_add_(0, rows[known], seen[known])
        self.last_use[rows[known]] = self._step
        if not len(new):
            return rows, new
        born = self._bear(*self._tried(*_summed(keys[new], seen[new])))
        rows[is_new] = self.find(keys[is_new])
        return rows, born

    def _expire(self) -> None:
        """Give up the rows that were not looked up for too long."""
        old = self._idle_since(self._step - self._lifetime).nonzero().flatten()
        self.uses[old] = 0
        self.num_evicted += len(old)
        self._free = torch.cat([self._free, old]).sort().values
        self._fill_slots()

    def _idle_since(self, step: int) -> Tensor:
        """A mask of the rows of ids that were not looked up in a step or later: ``[R]``."""
        return (self.uses > 0) & (self.last_use < step)

    def _tried(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Those of new ids that were seen often enough; the others are on trial, as many as there are rows."""
        if self._least == 1:
            return keys, counts
        before = slice(self._num_on_trial)
        every, seen = _summed(
            torch.cat([self._trial_keys[before], keys]), torch.cat([self._trial_counts[before], counts])
        )
        is_ready = seen >= self._least
        kept = (~is_ready).nonzero().flatten()
        kept = kept[seen[kept].argsort(descending=True, stable=True)[: len(self.keys)]].sort().values
        self._num_on_trial = len(kept)
        self._trial_keys[: len(kept)], self._trial_counts[: len(kept)] = every[kept], seen[kept]
        return every[is_ready], seen[is_ready]

    def _bear(self, keys: Tensor, counts: Tensor) -> Tensor:
        """Give ids rows: first those that nobody has, then those that are evicted; no row that this step uses.

        Args:
            keys: different ids, rising: ``[K]``.
            counts: how often each was seen. Should there be too few rows, those seen most get one.
        """
        free, self._free = self._free[: len(keys)], self._free[len(keys) :]
        evicted = self._worst(len(keys) - len(free))
        rows = torch.cat([free, evicted])
        chosen = counts.argsort(descending=True, stable=True)[: len(rows)]
        self.num_evicted += len(evicted)
        self.keys[rows], self.uses[rows], self.last_use[rows] = keys[chosen], counts[chosen], self._step
        self._num_filled += len(rows)
        if self._num_filled > len(self._slots) * 3 // 4:  # too many are of rows that have other keys now
            self._fill_slots()
        else:
            self._search.put(self._slots, self.keys, rows)
        return rows

    def _worst(self, count: int) -> Tensor:
        """The rows that make room, of those that this step does not use."""
        if not count or not self._evicts:
            return self.keys[:0]
        # Nothing is sorted but what is chosen: many rows may have one score, as those that were used once under "lfu".
        is_left = self._idle_since(self._step)
        is_chosen = torch.zeros_like(is_left)
        for score in self._scores:
            scores = score(self.uses, self.last_use)
            if not isinstance(scores, Tensor) or scores.shape != self.uses.shape:
                raise sw.InvalidInputError(
                    f"the eviction {self._eviction!r} must give a tensor of {len(self.uses)} scores, it gave "
                    f"{list(scores.shape) if isinstance(scores, Tensor) else scores!r}"
                )
            left = scores[is_left]
            if count >= len(left):
                break
            bound = left.kthvalue(count).values
            is_below = is_left & (scores < bound)
            count -= int(is_below.sum())
            is_chosen |= is_below
            is_left &= scores == bound
        rows = torch.cat([is_chosen.nonzero(), is_left.nonzero()[:count]]).flatten().sort().values
        return self._in_order(rows, self.uses, self.last_use)

    def _in_order(self, rows: Tensor, uses: Tensor, last_use: Tensor) -> Tensor:
        """Rows in the order in which they make room: by score, then last use, then uses, then as they are given."""
        for score in reversed(self._scores) if len(rows) else ():
            rows = rows[score(uses[rows], last_use[rows]).argsort(stable=True)]
        return rows

    def load(self, state: Mapping[str, Tensor]) -> Tensor:
        """Take over keys; if there are more than room for, those that would be evicted last.

        Args:
            state: keys, uses and last uses, ``[M, 1]`` each.
        """
        given = [state[name].flatten() for name in STATE]
        _, uses, last_use = given
        kept = uses.nonzero().flatten()
        if len(kept) > len(self.keys):
            kept = self._in_order(kept, uses, last_use).flip(0)[: len(self.keys)].sort().values
        for own, values in zip((self.keys, self.uses, self.last_use), given, strict=True):
            own[: len(kept)], own[len(kept) :] = values[kept].to(own.device), 0
        self._step = int(last_use.max()) if len(last_use) else 0
        self._begin(len(kept))
        return torch.cat([kept, kept.new_full((len(self.keys) - len(kept),), -1)])


def _summed(keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The different keys, rising, and the sum of each one's counts."""
    distinct, place = keys.unique(return_inverse=True)
    return distinct, torch.zeros_like(distinct).index_add_(0, place, counts)
