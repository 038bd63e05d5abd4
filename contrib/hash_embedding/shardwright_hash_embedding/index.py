"""An index from ids to rows: births, uses and evictions, in torch, on the device of the rows.

Legend: N ids, K new ids, R rows, M rows of other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
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
        self._eviction, self._rises = settings.evict, settings.evict in SCORES
        self._evicts, self._lifetime = settings.evict != NEVER, settings.steps_to_live
        room = num_rows if self._least > 1 else 0
        self.keys, self.uses, self.last_use, self._trial_keys, self._trial_counts = (
            _zeros(size, torch.int64, device) for size in (*[num_rows] * 3, room, room)
        )
        self._step = 0
        self._begin(0)

    def _begin(self, num_used: int) -> None:
        """Begin with the first rows in use, so many, and none on trial."""
        self._given_back, self._first_unused = self.keys.new_empty(0), num_used
        self._next = self.keys[:0]
        self._num_on_trial = 0
        self._fill_slots()

    def _fill_slots(self) -> None:
        """Make the slots anew; zeros take no memory until they are written."""
        rows = self.rows_in_use()
        self._slots = _zeros(2 * len(self.keys) + 1, torch.int32, self.keys.device)
        self._search.put(self._slots, self.keys, rows)
        self._num_filled = len(rows)

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id, or -1: ``[N]``."""
        return self._search.find(self._slots, self.keys, ids.contiguous())

    def rows_in_use(self) -> Tensor:  # noqa: D102 - described in the base class
        return _places(self.uses)

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
        new = _places(is_new & (seen > 0))
        known = ~is_new if bool(is_new.any()) else slice(None)
        self.uses.index_add_(0, rows[known], seen[known])
        self.last_use[rows[known]] = self._step
        if not len(new):
            return rows, new
        born = self._insert(*self._tried(*_summed(keys[new], seen[new])))
        rows[is_new] = self.find(keys[is_new])
        return rows, born

    def _expire(self) -> None:
        """Give up the rows that were not looked up for too long."""
        old = _places(self._idle_since(self._step - self._lifetime))
        self._next = self.keys[:0]
        self.uses[old] = 0
        self.num_evicted += len(old)
        self._given_back = torch.cat([self._given_back, old]).sort().values
        self._fill_slots()

    def _idle_since(self, step: int, rows: Tensor | slice = slice(None)) -> Tensor:
        """A mask of the rows of ids, of some rows, that were not looked up in a step or later."""
        return (self.uses[rows] > 0) & (self.last_use[rows] < step)

    def _tried(self, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Those of new ids that were seen often enough; the others are on trial, as many as there are rows."""
        if self._least == 1:
            return keys, counts
        before = slice(self._num_on_trial)
        every, seen = _summed(
            torch.cat([self._trial_keys[before], keys]), torch.cat([self._trial_counts[before], counts])
        )
        is_ready = seen >= self._least
        kept = _lowest(~is_ready, len(self.keys), [-seen])
        self._num_on_trial = len(kept)
        self._trial_keys[: len(kept)], self._trial_counts[: len(kept)] = every[kept], seen[kept]
        return every[is_ready], seen[is_ready]

    def _insert(self, keys: Tensor, counts: Tensor) -> Tensor:
        """Give ids rows: first those that nobody has, then those that are evicted; no row that this step uses.

        Args:
            keys: different ids, rising: ``[K]``.
            counts: how often each was seen. Should there be too few rows, those seen most get one.
        """
        free = self._free(len(keys))
        evicted = self._worst(len(keys) - len(free))
        rows = torch.cat([free, evicted])
        chosen = counts.argsort(descending=True, stable=True)[: len(rows)]
        self.num_evicted += len(evicted)
        self.keys[rows], self.uses[rows], self.last_use[rows] = keys[chosen], counts[chosen], self._step
        if len(self._next):
            self._next = torch.cat([self._next, rows]).sort().values
        self._num_filled += len(rows)
        if self._num_filled > len(self._slots) * 3 // 4:  # too many are of rows that have other keys now
            self._fill_slots()
        else:
            self._search.put(self._slots, self.keys, rows)
        return rows

    def _free(self, count: int) -> Tensor:
        """Take rows that nobody has, so many if there are: the lowest first, rising."""
        back, self._given_back = self._given_back[:count], self._given_back[count:]
        first = self._first_unused
        self._first_unused = min(first + count - len(back), len(self.keys))
        return torch.cat([back, torch.arange(first, self._first_unused, device=self.keys.device)])

    def _worst(self, count: int) -> Tensor:
        """The rows that make room, of those that this step does not use.

        A pass over all rows finds as many as make room in many steps, and what the last of them is: the bound. Uses and
        last uses only rise, and so do ranks: later, rows up to the bound are among those, or were used in the step of
        the pass, or were born since. A plugin's score need not rise, so that there is a pass in each step that evicts.
        """
        if not count or not self._evicts:
            return self.keys[:0]
        rows = self._next[self._is_up_to_bound(self._next)] if len(self._next) else self._next
        is_left = self._idle_since(self._step, rows)
        if int(is_left.sum()) < count:
            rows = self._found(max(count, math.isqrt(len(self.keys) * count)) if self._rises else count)
            is_left = self._idle_since(self._step, rows)
        scores = (score(self.uses[rows], self.last_use[rows]) for score in self._scores)
        chosen = _lowest(is_left, count, scores)
        is_kept = torch.ones_like(is_left)
        is_kept[chosen], evicted = False, rows[chosen]
        self._next = rows[is_kept]
        return self._in_order(evicted, self.uses, self.last_use)

    def _found(self, count: int) -> Tensor:
        """So many rows as make room next, if there are, and the bound; and the rows that this step uses, rising."""
        rows = _lowest(self._idle_since(self._step), count, map(self._scored, self._scores))
        if not self._rises or not len(rows):
            return rows
        self._bound = self._rank(self._in_order(rows, self.uses, self.last_use)[-1:])
        return torch.cat([rows, _places(self.last_use == self._step)]).sort().values

    def _rank(self, rows: Tensor) -> Tensor:
        """Rank of rows, by which they make room, ``[S + 1, n]``: the S scores, and the number of the row."""
        return torch.stack([*(score(self.uses[rows], self.last_use[rows]) for score in self._scores), rows])

    def _is_up_to_bound(self, rows: Tensor) -> Tensor:
        """A mask of rows whose rank is the bound at most, ``[n]``: the first place where they differ decides."""
        is_less, is_equal = rows < 0, rows >= 0
        for own, bound in zip(self._rank(rows), self._bound, strict=True):
            is_less, is_equal = is_less | (is_equal & (own < bound)), is_equal & (own == bound)
        return is_less | is_equal

    def _scored(self, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The score of each row, ``[R]``, if it is that."""
        scores: object = score(self.uses, self.last_use)
        if not isinstance(scores, Tensor) or scores.shape != self.uses.shape:
            raise sw.InvalidInputError(
                f"the eviction {self._eviction!r} must give a tensor of {len(self.uses)} scores, it gave "
                f"{list(scores.shape) if isinstance(scores, Tensor) else scores!r}"
            )
        if bool(scores.isnan().any()):
            raise sw.InvalidInputError(
                f"the eviction {self._eviction!r} gave NaN, which no row can be ordered by"
            )
        return scores

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


def _zeros(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Make zeros; on the CPU those of NumPy, which take no memory until they are written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(size, dtype=str(dtype).removeprefix("torch.")))


def _summed(keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The different keys, rising, and the sum of each one's counts."""
    distinct, place = keys.unique(return_inverse=True)
    return distinct, torch.zeros_like(distinct).index_add_(0, place, counts)


def _places(values: Tensor) -> Tensor:
    """The places that are not 0; on the CPU NumPy finds them several times as fast as torch does."""
    if values.device.type != "cpu":
        return values.nonzero().flatten()
    return torch.from_numpy(np.flatnonzero(values.numpy()))


def _lowest(is_left: Tensor, count: int, scores: Iterable[Tensor]) -> Tensor:
    """The places, rising, of those of the lowest scores; of equal ones, of the lowest next scores, then the first.

    Nothing is sorted: many may have one score, as rows that were used once.

    Args:
        is_left: mask of those to choose from, ``[n]``.
        count: how many are wanted.
        scores: scores of all, ``[n]`` each.
    """
    is_chosen = torch.zeros_like(is_left)
    for values in scores:
        left = values.masked_select(is_left)
        if not 0 < count < len(left):
            break
        bound = left.kthvalue(count).values
        is_below = is_left & (values < bound)
        count -= int(is_below.sum())
        is_chosen, is_left = is_chosen | is_below, is_left & (values == bound)
    is_chosen[_places(is_left)[:count]] = True
    return _places(is_chosen)
