"""What may lie on every rank, of memory, so that shards of some size still find room beside it.

The more of each rank is left to copies and rows of all ranks, the less room there is for whatever has to be in one
place.

Legend: O options, D dimensions (time, which is none, then memory tiers).
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.options import FREE, Bools, Floats
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._pattern_program import Kinds
from shardwright_plugins.proposers._patterns import MOST_KINDS, kinds_of, spread_of

# So many sizes of shards are looked at; this is left free beside what lies on every rank.
_MOST_SIZES, MARGIN = 24, 1e-6


class Budgets:
    """What may lie on every rank, and what is left for shards that lie somewhere.

    Args:
        space: options and memory, no time.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space, options, covers = space, space.options, space.bound.problem.covers
        self._is_free: Bools = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
        self._allowed: Bools = Catalogue(space).is_efficient & (covers | self._is_free)
        self.spread = spread_of(space, covers)
        self._capacity: Floats = space.capacity_bytes.min(axis=0).astype(np.float64)
        least = np.minimum.reduceat(space.total_bytes, options.first_option[:-1], axis=0)
        self._parts: Floats = options.multiplicity @ least / np.maximum(self._capacity, 1)

    @property
    def scarce(self) -> int:
        """The dimension of which there is least."""
        return 1 + int(np.argmax(self._parts))

    @property
    def waste(self) -> float:
        """What all ranks together have too much of it at most, in parts of a rank."""
        return float(len(self.space.capacity_bytes) - self._parts.max())

    def kinds(self, budget: Floats, most_kinds: int = MOST_KINDS) -> Kinds | None:
        """The kinds of shards beside what lies on every rank, ``[D]``; ``None`` if there is no room, or too many."""
        return kinds_of(self.space, self._allowed, self.spread, budget, 1.0, most_kinds)

    def some(self) -> list[Floats]:
        """Budgets, in bytes, so that shards of some size still find room: each ``[D]``.

        Room is left for the largest shard of one option or another, in the tier that is scarcest; of other tiers, no
        more than half is left to what lies on every rank.
        """
        has, scarce = self._capacity[self.scarce - 1], self.scarce
        most = self._extreme(np.maximum, self.spread)
        sizes = np.unique(self.space.largest_bytes[self._allowed & self._is_free, scarce - 1])
        rooms = np.append(sizes[sizes < has] * (1 + MARGIN), has)[::-1]
        rooms = rooms[rooms >= min(max(has - most[scarce], self._least_room), has)]
        chosen = rooms[np.unique(np.linspace(0, len(rooms) - 1, _MOST_SIZES).astype(np.int64))]
        # What is chosen to lie on every rank is a little less than may be: half of what a rank has too much of.
        spare = max(self.waste / len(self.space.capacity_bytes), 0.0) * has / 2
        both = np.unique(np.maximum(has - np.concatenate([chosen, chosen + spare]), 0.0))
        budgets = np.repeat(np.append(0.0, np.minimum(most[1:], self._capacity / 2))[None], len(both), axis=0)
        budgets[:, scarce] = both
        return list(budgets)

    def different(self) -> list[Floats]:
        """The least budget and some others, none that is about the same as another: each ``[D]``."""
        near = self.waste / len(self.space.capacity_bytes) * self._capacity / 8 + 1
        found: list[Floats] = []
        for budget in [self.least(), *self.some()]:
            if all((np.abs(budget - other)[1:] > near).any() for other in found):
                found.append(budget)
        return found

    def least(self) -> Floats:
        """What lies on every rank whatever is chosen, in bytes: ``[D]``."""
        return self._extreme(np.minimum, self.spread) * (1 + MARGIN)

    def _extreme(self, extreme: np.ufunc, column: Floats) -> Floats:
        """The least, or the most, that all tables have of a column ``[O, D]``: ``[D]``."""
        nothing = np.inf if extreme is np.minimum else 0.0
        usable = np.where(self._allowed[:, None], column, nothing)
        of_table: Floats = extreme.reduceat(usable, self.space.options.first_option[:-1], axis=0)
        result: Floats = self.space.options.multiplicity @ of_table
        return result

    @property
    def _least_room(self) -> float:
        """What the largest shard needs that cannot but lie somewhere."""
        first, shards = self.space.options.first_option[:-1], self.space.largest_bytes[:, self.scarce - 1]
        needs = np.where(self._allowed, np.where(self._is_free, shards, 0.0), np.inf)
        return float(np.minimum.reduceat(needs, first).max())
