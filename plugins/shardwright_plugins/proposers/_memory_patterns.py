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
from functools import partial

import numpy as np

from shardwright.planning.options import Floats, Ints
from shardwright_plugins.packing import patience
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.neighbourhoods import repaired, without_time
from shardwright_plugins.proposers._dives import packed_by_dives
from shardwright_plugins.proposers._full_patterns import FullPatterns, full_patterns
from shardwright_plugins.proposers._memory_budgets import MARGIN, Budgets
from shardwright_plugins.proposers._pattern_program import Kinds, Program
from shardwright_plugins.proposers._patterns import whole_tables
from shardwright_plugins.proposers._whole_patterns import Whole, seated, whole_numbers

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
    """Any plan within all memories: by dives, by patience, and by patterns, whichever comes first.

    Args:
        catalogue: of the space.
        proposal: options that fit in memory as a whole: ``[A]``.
        limit_ms: the time that a plan may take.
        by_patterns_first: whether there are so many tables alike, and so many ranks, that patterns are what counts;
            they come before the others.
    """

    def is_over() -> bool:
        return catalogue.space.watch.is_over

    by_patterns = partial(packed_by_memory, catalogue, limit_ms, is_over)
    by_dives = partial(packed_by_dives, catalogue, limit_ms, is_over)
    by_patience = partial(patience.packed, catalogue, proposal, limit_ms, is_over)
    searches = [by_dives, by_patience]
    searches = [by_patterns, *searches] if by_patterns_first else [*searches, by_patterns]
    for search in searches:
        found = None if is_over() else search()
        if found is not None and np.isfinite(found.value_ms):
            return found
    return None


def packed_by_memory(catalogue: Catalogue, limit_ms: float, is_over: Callable[[], bool]) -> Assignment | None:
    """A plan within all memories, or ``None`` if patterns do not find one.

    Args:
        catalogue: of the space.
        limit_ms: the time that a plan may take.
        is_over: whether to end.
    """
    budgets = Budgets(without_time(catalogue.space))
    for kinds, whole in _choices(budgets, is_over):
        found = seated(catalogue, kinds, whole, limit_ms)
        if patience.turned(found, range(_TURNS), is_over, hopeless=_HOPELESS):
            return found
        found = repaired(catalogue, found, _ROUNDS, is_over)
        if np.isfinite(found.value_ms):
            return found
    return None


def _choices(budgets: Budgets, is_over: Callable[[], bool]) -> Iterator[tuple[Kinds, Whole]]:
    """Choices in whole numbers: from patterns as they come, then from all that fill a rank."""
    space, again = budgets.space, list[tuple[float, Floats]]()
    for budget in budgets.some():
        if is_over():
            return
        kinds = budgets.kinds(budget)
        if kinds is None:
            continue
        program = Program(kinds, space.options.multiplicity)
        solution = program.solve(0.0)
        if solution.ranks > len(space.capacity_bytes) * _WORTH_A_TRY:
            continue
        whole = whole_numbers(space, kinds, program.patterns)
        if whole is not None:
            yield kinds, whole
        chosen = whole_tables(solution.tables, kinds, space.options.alike)
        nearly_whole = budgets.spread[chosen].sum(axis=0) * (1 + MARGIN)
        again += [(solution.ranks, each) for each in (nearly_whole, budget)]
    for _, budget in sorted(again, key=lambda entry: entry[0])[:_MOST_FILLED]:
        kinds = None if is_over() else budgets.kinds(budget)
        filled = None if kinds is None else _filled(budgets, kinds)
        if kinds is None or filled is None:
            continue
        whole = whole_numbers(space, kinds, filled.shards, filled)
        if whole is not None:
            yield kinds, whole


def _filled(budgets: Budgets, kinds: Kinds) -> FullPatterns | None:
    """All patterns that fill a rank; ``None`` if shards of gangs are among them, or there are too many."""
    space, scarce = budgets.space, budgets.scarce
    if kinds.is_gang.any() and space.topology.local_world_size > 1:
        return None
    most = np.zeros(len(kinds.size), dtype=np.int64)
    for table, number in enumerate(space.options.multiplicity.tolist()):
        most += number * kinds.needs[:, kinds.table == table].max(axis=1).astype(np.int64)
    waste = budgets.waste / (1 - kinds.budget[scarce])
    return full_patterns(kinds.size, most, scarce, max(waste, 0.0))
