"""All patterns that leave next to nothing of a rank free: where hardly any memory is left over, no plan has others.

If all ranks together have room for so much more than all tables need at least, then no rank of a plan has more free
than that. So the patterns of a plan are among those that fill a rank but for that much, and where shards are large,
they can be counted (bin completion prunes by the same sum: Korf 2003, Schreiber and Korf 2013). Where small shards are
many, patterns are made of the larger ones only, and what is left free is for the small ones: those are poured in last.

Legend: K kinds of shards, N patterns, D dimensions.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Bools, Floats, Ints
from shardwright_plugins.proposers._pattern_program import TOLERANCE

# A solver gets so many patterns at most; fewer kinds are told apart until there are no more.
_MOST_PATTERNS, _FEWER = 50_000, 0.9
# Steps of the enumeration, of one number of kinds.
_MOST_STEPS = 400_000


@frozen(eq=False)
class FullPatterns:
    """Patterns of the larger kinds of shards.

    Args:
        shards: of each kind, none of the small ones: ``[N, K]``.
        is_small: the kinds that are poured in: ``[K]``.
        free: what each pattern leaves free that the small ones may use, in parts of a rank: ``[N]``.
        scarce: the dimension that counts.
    """

    shards: Floats
    is_small: Bools
    free: Floats
    scarce: int


def full_patterns(size: Floats, most: Ints, scarce: int, waste: float) -> FullPatterns | None:
    """The patterns that leave no more free than what there is too much of; ``None`` if there are too many.

    Args:
        size: of each kind, in parts of a rank: ``[K, D]``.
        most: so many shards of each kind there may be at most: ``[K]``.
        scarce: the dimension that counts.
        waste: what all ranks together have too much of it, in parts of a rank.
    """
    order = np.argsort(-size[:, scarce], kind="stable")
    large = len(order)
    while large:
        small = order[large:]
        poured = float((size[small, scarce] * most[small]).sum())
        found = _Filling(size[order[:large]], most[order[:large]], scarce, waste + poured).patterns()
        if found is not None:
            return _spread_out(found, order, large, size, scarce)
        large = int(large * _FEWER)
    return None


def _spread_out(found: list[list[int]], order: Ints, large: int, size: Floats, scarce: int) -> FullPatterns:
    shards = np.zeros((len(found), len(order)))
    for row, chosen in enumerate(found):
        np.add.at(shards[row], order[chosen], 1)
    is_small = np.zeros(len(order), dtype=bool)
    is_small[order[large:]] = True
    least = float(size[is_small, scarce].min(initial=np.inf))
    free = 1 - shards @ size[:, scarce]
    return FullPatterns(shards, is_small, np.where(free >= least, free, 0.0), scarce)


class _Filling:
    """The sets of shards that fill a rank, in depth first order; kinds are in falling order of size."""

    def __init__(self, size: Floats, most: Ints, scarce: int, free: float) -> None:
        self._size = [tuple(row) for row in size.tolist()]
        self._most, self._scarce, self._free = most.tolist(), scarce, free
        amount = size[:, scarce] * most
        self._rest: list[float] = np.append(np.cumsum(amount[::-1])[::-1], 0.0).tolist()
        self._found: list[list[int]] = []
        self._steps = 0

    def patterns(self) -> list[list[int]] | None:
        """The positions of the kinds of each, as often as they are in it; ``None`` if there are too many."""
        room = tuple([1 + TOLERANCE] * len(self._size[0]))
        return self._found if self._extend(0, room, []) else None

    def _extend(self, first: int, room: tuple[float, ...], chosen: list[int]) -> bool:
        """Add shards from a kind on; whether there were not too many."""
        self._steps += 1
        if room[self._scarce] <= self._free:
            self._found.append(chosen)
        if self._steps > _MOST_STEPS or len(self._found) > _MOST_PATTERNS:
            return False
        for kind in range(first, len(self._size)):
            if room[self._scarce] - self._rest[kind] > self._free:
                break  # all that is left does not fill it
            left, more = room, chosen
            for _ in range(self._most[kind]):
                left = tuple(have - need for have, need in zip(left, self._size[kind], strict=True))
                if min(left) < 0:
                    break
                more = [*more, kind]
                if not self._extend(kind + 1, left, more):
                    return False
        return True
