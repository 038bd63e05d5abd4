"""Any plan within memory, where nothing simpler finds one: patterns of memory alone, in whole numbers by a solver.

What counts is which shards lie together on how many ranks, and what lies on every rank: the more of each rank is left
to copies and rows of all ranks, the less room there is for whatever has to be in one place. For several divisions of
the ranks' memory between the two, patterns are made by column generation (Gilmore and Gomory 1961), and a solver
chooses options, and how many ranks and hosts hold each pattern, in whole numbers (the price-and-branch heuristic:
Desrosiers and Luebbecke, A Primer in Column Generation, 2005). Where hardly any memory is left over, it chooses among
all patterns that fill a rank (:mod:`~shardwright_plugins.proposers._full_patterns`). Time does not count.

Legend: A tables, K kinds of shards, O' options, T distinct tables, N patterns, W ranks of hosts of L, D dimensions
(time, which is none, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardwright.planning.options import FREE, Bools, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing import patience
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.neighbourhoods import repaired, without_time
from shardwright_plugins.proposers._full_patterns import FullPatterns, full_patterns
from shardwright_plugins.proposers._pattern_program import Kinds, Program
from shardwright_plugins.proposers._patterns import kinds_of, spread_of, whole_tables
from shardwright_plugins.proposers._whole_patterns import Whole, seated, whole_numbers

# So many divisions of the memory are tried at most; in each, this is left free beside what lies on every rank.
_MOST_DIVISIONS, _MARGIN = 24, 1e-6
# The program of fractions may need so many ranks more than there are for whole numbers to be worth a try.
_WORTH_A_TRY = 1.02
# Divisions for which all patterns that fill a rank are looked at.
_MOST_FILLED = 3
# For what the patterns leave over: turns of patience, given up where more than this is left, divided by the turns; and
# groups of ranks that a solver shares out anew.
_TURNS, _HOPELESS, _ROUNDS = 6, 0.3, 40


def packed_last(
    catalogue: Catalogue, proposal: Ints, limit_ms: float, *, by_patterns_first: bool
) -> Assignment | None:
    """Any plan within all memories: by patience and by patterns, whichever comes first.

    Args:
        catalogue: of the space.
        proposal: options that fit in memory as a whole: ``[A]``.
        limit_ms: the time that a plan may take.
        by_patterns_first: whether there are so many tables alike, and so many ranks, that patterns are what counts.
    """

    def is_over() -> bool:
        return catalogue.space.watch.is_over

    found = packed_by_memory(catalogue, limit_ms, is_over) if by_patterns_first else None
    if found is None:
        found = patience.packed(catalogue, proposal, limit_ms, is_over)
    if (found is None or not np.isfinite(found.value_ms)) and not by_patterns_first:
        found = packed_by_memory(catalogue, limit_ms, is_over)
    return found if found is not None and np.isfinite(found.value_ms) else None


def packed_by_memory(catalogue: Catalogue, limit_ms: float, is_over: Callable[[], bool]) -> Assignment | None:
    """A plan within all memories, or ``None`` if patterns do not find one.

    Args:
        catalogue: of the space.
        limit_ms: the time that a plan may take.
        is_over: whether to end.
    """
    search = _Divisions(without_time(catalogue.space))
    for kinds, whole in search.choices(is_over):
        found = seated(catalogue, kinds, whole, limit_ms)
        if patience.turned(found, range(_TURNS), is_over, hopeless=_HOPELESS):
            return found
        found = repaired(catalogue, found, _ROUNDS, is_over)
        if np.isfinite(found.value_ms):
            return found
    return None


class _Divisions:
    """What may lie on every rank, and what is left for shards that lie somewhere.

    Args:
        space: options and memory, no time.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space, options, covers = space, space.options, space.bound.problem.covers
        self._is_free: Bools = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
        self._allowed: Bools = Catalogue(space).is_efficient & (covers | self._is_free)
        self._spread = spread_of(space, covers)
        self._capacity: Floats = space.capacity_bytes.min(axis=0).astype(np.float64)
        least = np.minimum.reduceat(space.total_bytes, options.first_option[:-1], axis=0)
        self._parts: Floats = options.multiplicity @ least / np.maximum(self._capacity, 1)
        self._scarce = int(np.argmax(self._parts))

    def choices(self, is_over: Callable[[], bool]) -> Iterator[tuple[Kinds, Whole]]:
        """Choices in whole numbers: from patterns as they come, then from all that fill a rank."""
        again: list[tuple[float, Floats]] = []
        for budget in self._budgets():
            if is_over():
                return
            kinds = self._kinds(budget)
            if kinds is None:
                continue
            program = Program(kinds, self._space.options.multiplicity)
            solution = program.solve(0.0)
            if solution.ranks > len(self._space.capacity_bytes) * _WORTH_A_TRY:
                continue
            whole = whole_numbers(self._space, kinds, program.patterns)
            if whole is not None:
                yield kinds, whole
            again += [(solution.ranks, each) for each in (self._spread_of(solution.tables, kinds), budget)]
        for _, budget in sorted(again, key=lambda entry: entry[0])[:_MOST_FILLED]:
            kinds = None if is_over() else self._kinds(budget)
            filled = None if kinds is None else self._filled(kinds)
            if kinds is None or filled is None:
                continue
            whole = whole_numbers(self._space, kinds, filled.shards, filled)
            if whole is not None:
                yield kinds, whole

    def _kinds(self, budget: Floats) -> Kinds | None:
        return kinds_of(self._space, self._allowed, self._spread, budget, 1.0)

    def _budgets(self) -> list[Floats]:
        """What may lie on every rank, in bytes, so that shards of some size still find room: each ``[D]``.

        Room is left for the largest shard of one option or another, in the tier that is scarcest; of other tiers, no
        more than half is left to what lies on every rank.
        """
        space, has = self._space, self._capacity[self._scarce]
        sizes = np.unique(space.largest_bytes[self._allowed & self._is_free, self._scarce])
        rooms = np.append(sizes[sizes < has] * (1 + _MARGIN), has)[::-1]
        chosen = rooms[np.unique(np.linspace(0, len(rooms) - 1, _MOST_DIVISIONS).astype(np.int64))]
        most = np.maximum.reduceat(self._spread, space.options.first_option[:-1], axis=0)
        others = np.append(0.0, np.minimum((space.options.multiplicity @ most)[1:], self._capacity / 2))
        # What is chosen to lie on every rank is a little less than may be: half of what a rank has too much of.
        spare = max(1 - self._parts[self._scarce] / len(space.capacity_bytes), 0.0) * has / 2
        both = np.unique(np.maximum(has - np.concatenate([chosen, chosen + spare]), 0.0))
        budgets = np.repeat(others[None], len(both), axis=0)
        budgets[:, 1 + self._scarce] = both
        return list(budgets)

    def _spread_of(self, tables: Floats, kinds: Kinds) -> Floats:
        """What lies on every rank by a choice that is nearly whole."""
        proposal = whole_tables(tables, kinds, self._space.options.alike)
        budget: Floats = self._spread[proposal].sum(axis=0) * (1 + _MARGIN)
        return budget

    def _filled(self, kinds: Kinds) -> FullPatterns | None:
        """All patterns that fill a rank; ``None`` if shards of gangs are among them, or there are too many."""
        if kinds.is_gang.any() and self._space.topology.local_world_size > 1:
            return None
        room = 1 - kinds.budget[1 + self._scarce]
        waste = (len(self._space.capacity_bytes) - self._parts[self._scarce]) / room
        most = np.zeros(len(kinds.size), dtype=np.int64)
        for table, number in enumerate(self._space.options.multiplicity.tolist()):
            most += number * kinds.needs[:, kinds.table == table].max(axis=1).astype(np.int64)
        return full_patterns(kinds.size, most, 1 + self._scarce, max(waste, 0.0))
