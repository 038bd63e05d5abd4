"""The smallest set of demands that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeVar

_Demand = TypeVar("_Demand")
_Unit = TypeVar("_Unit")

# How many sets of one size are looked at; above it a set is only made as small as dropping one by one makes it.
_MOST_TRIALS = 20_000


def smallest_conflict(
    demands: Sequence[_Demand], is_possible: Callable[[Sequence[_Demand]], bool]
) -> tuple[_Demand, ...] | None:
    """The first of the smallest sets of demands that cannot be fulfilled together.

    Args:
        demands: demands in the order in which sets of one size are tried.
        is_possible: true for a set of demands that can be fulfilled; dropping demands never makes that impossible.

    Returns:
        ``None`` if all can be fulfilled together; an empty tuple if nothing can, whatever is demanded.
    """
    if is_possible(demands):
        return None
    for size in range(len(demands)):
        if comb(len(demands), size) > _MOST_TRIALS:
            return _irreducible(demands, is_possible)
        for some in combinations(demands, size):
            if not is_possible(some):
                return some
    return tuple(demands)


def _irreducible(
    demands: Sequence[_Demand], is_possible: Callable[[Sequence[_Demand]], bool]
) -> tuple[_Demand, ...]:
    """A set that becomes possible whichever of its demands is dropped."""
    kept = list(demands)
    for demand in demands:
        rest = [other for other in kept if other is not demand]
        if not is_possible(rest):
            kept = rest
    return tuple(kept)


def too_many_for_their_ranks(allowed: Mapping[_Unit, Iterable[int]]) -> tuple[_Unit, ...] | None:
    """Units of which each needs a rank of its own, and that may use fewer ranks than they are.

    By Hall's theorem there are such units exactly where no matching gives each a rank; they are found where Kuhn's
    augmenting paths end.

    Args:
        allowed: unit -> the ranks it may use.
    """
    taken: dict[int, _Unit] = {}
    for unit in allowed:
        reached: dict[int, None] = {}
        if not _augment(unit, allowed, taken, reached):
            crowded = [unit, *(taken[rank] for rank in reached)]
            return smallest_conflict(crowded, lambda units: _have_a_rank_each(units, allowed))
    return None


def _have_a_rank_each(units: Iterable[_Unit], allowed: Mapping[_Unit, Iterable[int]]) -> bool:
    taken: dict[int, _Unit] = {}
    return all(_augment(unit, allowed, taken, {}) for unit in units)


def _augment(
    unit: _Unit, allowed: Mapping[_Unit, Iterable[int]], taken: dict[int, _Unit], reached: dict[int, None]
) -> bool:
    """Give ``unit`` a rank, moving others to other ranks where that helps; the ranks looked at are ``reached``."""
    came_from: dict[int, tuple[_Unit, int | None]] = {}
    queue: list[tuple[_Unit, int | None]] = [(unit, None)]
    for current, via in queue:
        for rank in allowed[current]:
            if rank in reached:
                continue
            reached[rank], came_from[rank] = None, (current, via)
            if rank not in taken:
                _shift(rank, came_from, taken)
                return True
            queue.append((taken[rank], rank))
    return False


def _shift(rank: int, came_from: Mapping[int, tuple[_Unit, int | None]], taken: dict[int, _Unit]) -> None:
    """Move the units along the path that ended at ``rank``, each to the next rank of it."""
    at: int | None = rank
    while at is not None:
        taken[at], at = came_from[at]
